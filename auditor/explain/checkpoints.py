"""Checkpoints of a run, scored by what was recorded around them: which are unharmed."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import polars as pl

from auditor.errors import RunError
from auditor.explain.events import EPISODE_STEPS, events_of
from auditor.explain.grades import grades_table, judgements_of, policy_of
from auditor.measure.grading import Grade, Policy, heads_fell
from auditor.measure.recovery import (
    LOOKBACK_STEPS,
    ROLLBACK_GRADE,
    Checkpoint,
    choose_checkpoint,
    find_drop,
    grade_at,
)
from auditor.run import Run
from auditor.tables import polars_schema

NEIGHBOUR_STEPS: Final = 100
"""The lowest grade is looked for among so many steps before a checkpoint, and after it."""

LOSS_STEPS: Final = 50

MODEL_EVENTS: Final = frozenset(
    {"grade_drop", "ratio_fall", "probe_loss_rise", "entropy_fall", "non_finite"}
)
"""Events that mean the model changed; the others are of the input or of a single step."""

CHECKPOINTS: Final[Mapping[str, str]] = {
    "path": "str",
    "step": "i64",
    "attempt": "i32",  # null: found by a pattern
    "exists": "bool",  # null: not a local path
    "graded_step": "i64",  # the sampled step at or before it
    "grade": "i32",  # there; null: none before it, or no ratio was defined
    "ratio": "f64",
    "lowest_before": "i32",  # lowest grade of the 100 steps up to it, without the warm-up
    "lowest_after": "i32",  # of the 100 steps after it
    "loss": "f64",  # training loss, median of the last 50 steps
    "probe_loss": "f64",  # at the sampled step at or before it
    "verdict": "str",  # good, suspect, after onset
    "reason": "str",
    "best": "bool",  # the one to go back to
}
"""Columns of the scored checkpoints."""


@dataclass(frozen=True)
class Scored:
    """Checkpoints of a run by step: ``table`` has ``CHECKPOINTS``.

    ``grades``, ``events`` and ``heads_fell`` (the attention of all heads, together) are those of
    the run as it went on in the end; ``drop_onset`` is the onset that the best checkpoint must
    precede. ``not_understood`` are names found without a step, ``n_torn_lines`` are of the
    register.
    """

    table: pl.DataFrame
    checkpoints: tuple[Checkpoint, ...]
    grades: tuple[Grade, ...]
    events: pl.DataFrame
    heads_fell: bool
    drop_onset: tuple[int, int] | None
    not_understood: tuple[str, ...]
    n_torn_lines: int

    @property
    def candidates(self) -> list[Checkpoint]:
        """Of those not known to be missing the good ones; all where none is good."""
        rows = list(zip(self.checkpoints, self.table.iter_rows(named=True), strict=True))
        there = [(one, row["verdict"]) for one, row in rows if row["exists"] is not False]
        good = [one for one, verdict in there if verdict == "good"]
        return good or [one for one, _ in there]


def registered(run: Path) -> tuple[list[Checkpoint], int]:
    """Checkpoints that training registered, by attempt and step, and how many torn lines there are.

    What several ranks registered is there once.
    """
    found: dict[tuple[int, str], Checkpoint] = {}
    n_torn = 0
    for file in sorted(run.glob("checkpoints/rank-*.jsonl")):
        for line in file.read_bytes().split(b"\n"):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                attempt, step = int(entry["attempt"]), int(entry["step"])
                path = str(entry["path"])
            except (ValueError, KeyError, TypeError):
                n_torn += 1
                continue
            # Of the same path written twice the later content is what is there.
            found[(attempt, path)] = Checkpoint(path, step, attempt=attempt)
    by_path = {one.path: one for one in sorted(found.values(), key=_in_order)}
    return sorted(by_path.values(), key=_in_order), n_torn


def find_checkpoints(pattern: str) -> tuple[list[Checkpoint], list[str]]:
    """Checkpoints whose names match a glob, by step, and the names without a step.

    ``{step}`` in the pattern stands for the step's digits; without it the step is what
    :func:`step_of` finds in the name, or in the folder's where the name has none: the folder then
    is the checkpoint.

    Raises:
        RunError: nothing matches.
        ValueError: the pattern holds ``{step}`` more than once.
    """
    if pattern.count("{step}") > 1:
        raise ValueError(f"a pattern holds {{step}} once, got {pattern!r}")
    # Not Path.glob: it refuses absolute patterns.
    names = sorted(glob.glob(pattern.replace("{step}", "*"), recursive=True))  # noqa: PTH207
    if not names:
        raise RunError(
            "no checkpoint matches",
            path=pattern,
            remedy="Quote the pattern, and give it from the current folder or as an absolute path",
        )
    found: dict[str, Checkpoint] = {}
    not_understood = []
    named = _with_step(pattern) if "{step}" in pattern else None
    for name in names:
        path = Path(name)
        if named is not None:
            match = named.fullmatch(name)
            step = int(match["step"]) if match else None
        else:
            step = step_of(path.name)
            if (
                step is None
                and (inside := _labelled_step(path.parent.name, _FOLDER_STEP)) is not None
            ):
                step, path = inside, path.parent
        if step is None:
            not_understood.append(name)
        else:
            found[str(path)] = Checkpoint(str(path), step)
    return sorted(found.values(), key=_in_order), not_understood


_NO_STEP = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T_-]\d{2}[-:.]?\d{2}(?:[-:.]?\d{2})?)?"  # dates and times
    r"|\d+-of-\d+"  # parts of a checkpoint
    r"|\d*\.\d+(?:e[+-]?\d+)?"  # losses and rates
    r"|\d+(?:e[+-]?\d+)"
    # Numbers of other things, and sizes: 7b, 4k.
    r"|(?<![a-z])(?:epochs?|ep|rank|shard|part|seed|version|v|lr|loss|acc|bs|worker|node|gpu)[=_-]?\d+"
    r"|\d+(?=[a-z])",
    re.IGNORECASE,
)
_STEP_LABELS: Final = "steps?|iters?|iteration|updates?"
_STEP = re.compile(rf"(?:{_STEP_LABELS})[=_-]?(\d+)(?![a-z\d])", re.IGNORECASE)
_FOLDER_STEP = re.compile(
    rf"(?:checkpoint|ckpt|{_STEP_LABELS})[=_-]?(\d+)(?![a-z\d])", re.IGNORECASE
)
_SUFFIX = re.compile(r"(?:\.[a-z][a-z0-9]*)+$", re.IGNORECASE)
_MOST_DIGITS: Final = 15


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name, None where it has none.

    What follows ``step``, ``iter`` or ``update``; otherwise the last integer that is no date, part
    of a set, decimal number, size (``7b``), or number of something else (``epoch=3``, ``v2``).

    >>> [step_of(name) for name in ("epoch=0-step=500.ckpt", "checkpoint-500", "epoch=3.ckpt")]
    [500, 500, None]
    """
    if (labelled := _labelled_step(name, _STEP)) is not None:
        return labelled
    rest = _NO_STEP.sub(" ", _SUFFIX.sub("", name))
    numbers = [one for one in re.findall(r"\d+", rest) if len(one) <= _MOST_DIGITS]
    return int(numbers[-1]) if numbers else None


def _labelled_step(name: str, label: re.Pattern[str]) -> int | None:
    numbers = [one for one in label.findall(name) if len(one) <= _MOST_DIGITS]
    return int(numbers[-1]) if numbers else None


def score(run: Run, pattern: str | None = None) -> Scored:
    """Score the checkpoints that match a pattern, or without one those that were registered.

    Raises:
        RunError: nothing matches the pattern.
        ValueError: the pattern holds ``{step}`` more than once.
    """
    if pattern is None:
        checkpoints, n_torn = registered(run.path)
        not_understood: list[str] = []
    else:
        (checkpoints, not_understood), n_torn = find_checkpoints(pattern), 0
    signals, policy = run.scan("signals", view="all").collect(), policy_of(run)
    courses: dict[int | None, Course] = {}
    rows, known = [], []
    for one in checkpoints:
        if one.attempt not in courses:
            courses[one.attempt] = Course(signals, one.attempt, policy)
        row = courses[one.attempt].scored(one)
        rows.append(row)
        known.append(replace(one, grade=row["grade"], loss=row["loss"]))
    whole = courses.get(None) or Course(signals, None, policy)
    table = pl.DataFrame(rows, schema=polars_schema(CHECKPOINTS), orient="row")
    scored = Scored(
        table=table,
        checkpoints=tuple(known),
        grades=whole.grades,
        events=whole.events,
        heads_fell=whole.heads_fell,
        drop_onset=whole.onset,
        not_understood=tuple(not_understood),
        n_torn_lines=n_torn,
    )
    onset_low = None if whole.onset is None else whole.onset[0]
    best, is_good = choose_checkpoint(scored.candidates, whole.grades, onset_low)
    marks = pl.Series([is_good and one is best for one in known], dtype=pl.Boolean)
    return replace(scored, table=table.with_columns(best=marks))


def onset_by_events(events: pl.DataFrame, low: int, high: int) -> tuple[int, int]:
    """The onset of a drop of the grade, or of what fell before it and has not recovered by then."""
    before = events.filter(
        pl.col("kind").is_in(list(MODEL_EVENTS - {"grade_drop"}))
        & pl.col("onset_high").is_between(low - EPISODE_STEPS, high - 1)
        & (pl.col("recovery_step").is_null() | (pl.col("recovery_step") > low))
    ).sort("onset_high", "onset_low")
    for row in before.head(1).iter_rows(named=True):
        return row["onset_low"], row["onset_high"]
    return low, high


class Course:
    """What led up to an attempt, None: to the last; without what was rolled back on the way.

    ``onset`` is that of a drop which has not recovered, None where there is none; ``heads_fell``
    whether the attention of all heads fell together at any time.
    """

    def __init__(self, signals: pl.DataFrame, attempt: int | None, policy: Policy) -> None:
        if attempt is not None:
            signals = signals.filter(pl.col("attempt") <= attempt)
        self._signals = _effective(signals)
        judged = list(judgements_of(self._signals, policy))
        frame = grades_table(judged)
        self.grades = tuple(judgement.grade for _, judgement in judged)
        self.heads_fell = heads_fell(alert for _, one in judged for alert in one.alerts)
        self.events = events_of(self._signals, frame)
        drop = find_drop(self.grades, policy)
        self.onset: tuple[int, int] | None = None
        if drop is not None and drop.recovery_step is None:
            self.onset = onset_by_events(self.events, drop.onset_low, drop.onset_high)
        self._losses = _by_step(self._signals, "loss", "step")
        self._probe_losses = _by_step(self._signals, "probe_loss", "probe")

    def scored(self, one: Checkpoint) -> dict[str, Any]:
        """The checkpoint's row of ``CHECKPOINTS``, not yet compared with others."""
        at = grade_at(self.grades, one.step)
        lowest_before = self._lowest(one.step - NEIGHBOUR_STEPS, one.step)
        grade = None if at is None else at.grade
        verdict, reason = self._verdict(one.step, at, lowest_before)
        recent = self._losses.filter(
            (pl.col("step") <= one.step) & (pl.col("step") > one.step - LOSS_STEPS)
        )["value"]
        probe = self._probe_losses.filter(pl.col("step") <= one.step)["value"]
        return {
            "path": one.path,
            "step": one.step,
            "attempt": one.attempt,
            "exists": None if "://" in one.path else Path(one.path).exists(),
            "graded_step": None if at is None else at.step,
            "grade": grade,
            "ratio": None if at is None or at.grade is None else at.ratio,
            "lowest_before": lowest_before,
            "lowest_after": self._lowest(one.step + 1, one.step + NEIGHBOUR_STEPS),
            "loss": recent.median(),
            "probe_loss": probe[-1] if len(probe) else None,
            "verdict": verdict,
            "reason": reason,
            "best": False,
        }

    def _verdict(self, step: int, at: Grade | None, lowest_before: int | None) -> tuple[str, str]:
        for low, high, end in self._damaged():
            if step > low and (end is None or step < end):
                until = "not recovered since" if end is None else f"recovered by {end}"
                return "after onset", f"onset after step {low}, by step {high}; {until}"
            if step == low:
                return (
                    "suspect",
                    "of the last healthy sample: its own update may be the harmful one",
                )
        if at is None:
            return "suspect", "no grade was recorded up to it"
        if at.grade is None:
            return "suspect", f"no ratio was defined at step {at.step}"
        if at.grade < ROLLBACK_GRADE:
            if at.alert == "warming":
                return "suspect", "ranks are low in the warm-up of every run"
            return "suspect", f"below S{ROLLBACK_GRADE}"
        notes = [
            f"{low - step} steps before an onset: suspected batches are in it"
            for low, _, _ in self._damaged()
            if low - LOOKBACK_STEPS < step < low
        ][:1]
        if lowest_before is not None and lowest_before < ROLLBACK_GRADE:
            notes.append(f"S{lowest_before} in the {NEIGHBOUR_STEPS} steps up to it")
        return "good", "; ".join(notes)

    def _damaged(self) -> Iterable[tuple[int, int, int | None]]:
        """(onset_low, onset_high, recovery_step) of what happened to the model."""
        if self.onset is not None:
            yield (*self.onset, None)
        of_model = self.events.filter(
            pl.col("kind").is_in(list(MODEL_EVENTS - {"grade_drop"}))
            # A grade that was low since the warm-up has not dropped.
            | ((pl.col("kind") == "grade_drop") & (pl.col("grade_before") > ROLLBACK_GRADE))
        )
        for row in of_model.iter_rows(named=True):
            yield row["onset_low"], row["onset_high"], row["recovery_step"]

    def _lowest(self, low: int, high: int) -> int | None:
        near = (
            one.grade
            for one in self.grades
            if low <= one.step <= high and one.alert != "warming" and one.grade is not None
        )
        return min(near, default=None)


def _effective(signals: pl.DataFrame) -> pl.DataFrame:
    """Without what a later one of these attempts trained again, or went back behind."""
    first = signals.group_by("rank", "attempt").agg(pl.col("step").min().alias("first"))
    rolled_back = pl.lit(False)
    for row in first.iter_rows(named=True):
        rolled_back |= (
            (pl.col("rank") == row["rank"])
            & (pl.col("attempt") < row["attempt"])
            & (pl.col("step") >= row["first"])
        )
    return signals.filter(~rolled_back)


def _by_step(signals: pl.DataFrame, signal: str, kind: str) -> pl.DataFrame:
    own = signals.filter(
        (pl.col("signal") == signal)
        & (pl.col("kind") == kind)
        & pl.col("value").is_finite().fill_null(False)
    )
    return own.group_by("step").agg(pl.col("value").mean()).sort("step")


def _with_step(pattern: str) -> re.Pattern[str]:
    """A glob with ``{step}`` in it as an expression over whole paths."""
    parts = re.split(r"(\{step\}|\*\*/?|\*|\?|\[!?[^\]]+\])", pattern)
    meanings = {"{step}": r"(?P<step>\d{1,15})", "**": ".*", "**/": ".*", "*": "[^/]*", "?": "[^/]"}
    text = ""
    for part in parts:
        if part in meanings:
            text += meanings[part]
        elif part.startswith("[") and part.endswith("]"):
            text += f"[^{part[2:]}" if part.startswith("[!") else part
        else:
            text += re.escape(part)
    return re.compile(text)


def _in_order(one: Checkpoint) -> tuple[int, int, str]:
    return (one.step, -1 if one.attempt is None else one.attempt, one.path)
