"""Which column of a log is which of our signals: by its words, or as the user says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from auditor.explain.logs.log import Log, LogError

SIGNALS: Final = ("loss", "grad_norm", "lr", "probe_loss")
"""What is imported, by the names of ``schema.SIGNAL_NAMES``."""

STEP_NAMES: Final = ("step", "global_step", "iteration", "iter", "num_updates", "_step")
"""Names of the column that holds the step, without folder and case, the first that is there."""

_LOSS: Final = frozenset(("loss", "losses", "trl", "tel"))
_HELD_OUT: Final = frozenset(
    ("val", "valid", "validation", "eval", "evaluation", "dev", "test", "tel", "heldout")
)
_NO_LOSS: Final = frozenset(
    ("scale", "scaling", "scaler", "mask", "weight", "coef", "count", "num", "skipped", "grad")
) | frozenset(("ppl", "perplexity", "time", "min", "max", "std", "vs", "nan"))
_USUAL: Final = (
    _LOSS
    | _HELD_OUT
    | frozenset(("train", "training", "trainer", "lm", "step", "value", "avg", "mean", "reduced"))
    | frozenset(("total", "metrics"))
)
"""Words that do not make a loss one of several: ``aux_loss`` is less the loss than ``lm loss``."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_RANGE_OF = re.compile(r"__(?:MIN|MAX)$")


@dataclass(frozen=True)
class Columns:
    """Columns by signal as the user says; ``step`` is the column of the step, None: by its name."""

    step: str | None = None
    signals: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Iterable[str]) -> Columns:
        """From ``SIGNAL=COLUMN`` each. Raises ValueError for other forms and unknown signals."""
        step, signals = None, {}
        for setting in settings:
            signal, mark, column = setting.partition("=")
            if not mark or not column or signal not in ("step", *SIGNALS):
                raise ValueError(
                    f"{setting!r} is not SIGNAL=COLUMN with a signal of step, {', '.join(SIGNALS)}"
                )
            if signal == "step":
                step = column
            else:
                signals[signal] = column
        return cls(step, signals)

    def step_among(self, names: Iterable[str]) -> str | None:
        """The column of the step among these names; None where there is none."""
        if self.step is not None:
            return self.step if self.step in names else None
        by_name: dict[str, str] = {}
        for name in names:
            by_name.setdefault(_leaf(name), name)
        return next((by_name[known] for known in STEP_NAMES if known in by_name), None)


@dataclass(frozen=True)
class Chosen:
    """Column by signal, and of each signal the other columns that could have been meant."""

    columns: Mapping[str, str]
    others: Mapping[str, tuple[str, ...]]


def role_of(name: str) -> str | None:
    """The signal that a column's name speaks of; None where it is none of ours.

    >>> role_of("val_loss"), role_of("train/learning_rate"), role_of("loss scale")
    ('probe_loss', 'lr', None)
    """
    words = _words(name)
    told = set(words)
    if _RANGE_OF.search(name):
        return None
    if "lr" in told or {"learning", "rate"} <= told:
        return "lr"
    if words == ["norm"] or "gnorm" in told:
        return "grad_norm"
    if "norm" in told and told & {"grad", "grads", "gradient", "gradients"}:
        return "grad_norm"
    if not told & _LOSS or told & _NO_LOSS:
        return None
    return "probe_loss" if told & _HELD_OUT else "loss"


def choose(log: Log, columns: Columns) -> Chosen:
    """The column of each signal: as the user says, else the one whose name says least else.

    Of equal names the one with more numbers is taken, of these the first.

    Raises:
        LogError: a column is not in the log, or none is one of ours.
    """
    names = log.names
    for signal, column in columns.signals.items():
        if column not in names:
            raise LogError(
                f"has no column {column!r} for {signal}; it has {_listed(names)}",
                path=log.path,
                remedy="Name one of these in --column",
            )
    by_role: dict[str, list[str]] = {}
    for name in names:
        role = role_of(name)
        if role is not None:
            by_role.setdefault(role, []).append(name)
    chosen, others = dict(columns.signals), {}
    for signal, candidates in by_role.items():
        if signal in chosen:
            continue
        # sorted() is stable: of equals the first that appeared stays first.
        ranked = sorted(candidates, key=lambda name: (_besides(name), -names[name]))
        chosen[signal] = ranked[0]
        others[signal] = tuple(ranked[1:])
    if not chosen:
        raise LogError(
            f"no column is a loss, gradient norm or learning rate; it has {_listed(names)}",
            path=log.path,
            remedy="Say which is which, as in --column loss=NAME",
        )
    return Chosen({signal: chosen[signal] for signal in SIGNALS if signal in chosen}, others)


def _words(name: str) -> list[str]:
    # W&B exports columns as "RUN - METRIC".
    return [word.lower() for word in _WORDS.findall(name.rsplit(" - ", 1)[-1])]


def _leaf(name: str) -> str:
    return name.strip().rsplit("/", 1)[-1].lower()


def _besides(name: str) -> int:
    return sum(word not in _USUAL for word in _words(name))


def _listed(names: Iterable[str]) -> str:
    known = [repr(name) for name in names]
    if not known:
        return "no columns"
    more = f" and {len(known) - 12} more" if len(known) > 12 else ""
    return ", ".join(known[:12]) + more
