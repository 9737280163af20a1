"""What the arms of a replay differ by, with an interval, and what that allows one to say.

The unit is the seed: arms of the same seed are paired, so that what the seed changes in both
cancels. The interval is Student's t interval of the mean difference; it assumes that differences
are about normal, and nothing about the steps within a training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import polars as pl

TAIL_SHARE: Final = 0.25
"""The outcome of a training is the mean of a signal over this last share of its steps."""

CLAIM_RATE: Final = 0.05
"""Largest chance of a claim of cause where there is no effect, over all judged signals."""

BETTER: Final[Mapping[str, Literal["higher", "lower"]]] = {
    "probe_ratio": "higher",
    "probe_loss": "lower",
}
"""The signals that are judged unless told otherwise, and the good direction of each."""

Finding = Literal["better", "worse", "none shown", "no interval", "undefined", "not judged"]

SIGNALS: Final[Mapping[str, Any]] = {
    "arm": pl.String,
    "seed": pl.Int64,
    "step": pl.Int64,  # null where a training gave one value only
    "signal": pl.String,
    "value": pl.Float64,
}

OUTCOMES: Final[Mapping[str, Any]] = {k: v for k, v in SIGNALS.items() if k != "step"}


@dataclass(frozen=True)
class Effect:
    """One arm less another in one signal.

    Attributes:
        signal, better: the signal, and its good direction; None where it is not judged.
        arm, versus: the difference is that of ``arm`` less that of ``versus``.
        differences: by seed, f64 [n].
        mean: of the differences.
        low, high: the interval of the mean at ``level``; None for one seed, where the seeds made no
            difference, or where a value is not finite.
        finding: ``better`` (the interval excludes zero in the good direction), ``worse`` (in the
            bad one), ``none shown`` (it holds zero), ``no interval``, ``undefined`` (a value is not
            finite), ``not judged``.
    """

    signal: str
    better: str | None
    arm: str
    versus: str
    differences: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    level: float
    finding: Finding


def signals_of(returned: object) -> list[tuple[int | None, str, float]]:
    """What a training returned as (step, signal, value).

    Either a mapping of signal to number, or rows: mappings with ``step`` and signals, of which
    those that are None were not measured.

    Raises:
        TypeError, ValueError: it is neither, or a value is no number; says what.
    """
    if isinstance(returned, Mapping):
        rows: Iterable[object] = [{"step": None, **returned}]
        if returned.get("step") is not None:
            rows = [returned]
    elif isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        raise TypeError(
            "what train returns must be a mapping of signal to number, or rows of them with a "
            f"step, got {type(returned).__name__}"
        )
    else:
        rows = returned
    found: list[tuple[int | None, str, float]] = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or "step" not in row:
            raise TypeError(f"row {number} of what train returned is no mapping with 'step'")
        step = None if row["step"] is None else int(row["step"])
        for signal, value in row.items():
            if signal == "step" or value is None:
                continue
            try:
                found.append((step, str(signal), float(value)))
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"row {number}: {str(signal)[:60]!r} is no number but {type(value).__name__}"
                ) from error
    if not found:
        raise ValueError("train returned no signal")
    return found


def outcomes_of(signals: pl.DataFrame, first: int, last: int) -> pl.DataFrame:
    """One value per arm, seed and signal: ``OUTCOMES``.

    The mean over the last ``TAIL_SHARE`` of steps ``first`` to ``last``; of a signal without a
    value there, its last one. ``signals`` has the columns of ``SIGNALS``.
    """
    begin = last + 1 - math.ceil((last + 1 - first) * TAIL_SHARE)
    in_tail = pl.col("value").filter(pl.col("step") >= begin)
    return (
        signals.sort("step", nulls_last=False, maintain_order=True)
        .group_by("arm", "seed", "signal", maintain_order=True)
        .agg(
            value=pl.when(in_tail.len() > 0).then(in_tail.mean()).otherwise(pl.col("value").last())
        )
        .select(list(OUTCOMES))
        .sort("signal", "seed", "arm")
    )


def effects_of(outcomes: pl.DataFrame, better: Mapping[str, str]) -> list[Effect]:
    """The effect of leaving out the implicated: against leaving out others, and against nothing.

    ``better`` gives the good direction of signals that are judged. Signals that are judged come
    first. Their intervals are at 95% for one or two; with more they are wider, so that a claim in
    the good direction of any is made with a chance of at most ``CLAIM_RATE`` where there is no
    effect.
    """
    table = outcomes.pivot("arm", index=["signal", "seed"], values="value", maintain_order=True)
    names = table["signal"].unique(maintain_order=True).to_list()
    judged = [name for name in better if name in names]
    # Of a two-sided interval one side makes a claim: two signals share the rate at 95%.
    level = 1 - 2 * CLAIM_RATE / max(2, len(judged))
    effects = []
    for signal in [*judged, *(name for name in names if name not in judged)]:
        own = table.filter(pl.col("signal") == signal).sort("seed")
        for versus in ("without_random", "as_it_was"):
            pairs = own.select("without_implicated", versus).to_numpy()
            effects.append(
                _effect(signal, better.get(signal), versus, pairs[:, 0], pairs[:, 1], level)
            )
    return effects


def _effect(
    signal: str,
    better: str | None,
    versus: str,
    without: np.ndarray[Any, Any],
    other: np.ndarray[Any, Any],
    level: float,
) -> Effect:
    with np.errstate(invalid="ignore"):
        differences = without - other
    mean = float(differences.mean())
    low = high = None
    finding: Finding
    # Seeds that change nothing but the last bits are one training repeated.
    scale = 1e-12 * max(np.abs(without).max(), np.abs(other).max())
    has_spread = np.ptp(differences) > scale
    if not np.isfinite(differences).all():
        finding = "undefined"
    elif len(differences) < 2 or not (has_spread or mean == 0.0):
        finding = "no interval"
    else:
        low, high = t_interval(differences, level)
        gain = (-high, -low) if better == "lower" else (low, high)
        finding = "better" if gain[0] > 0 else "worse" if gain[1] < 0 else "none shown"
    if better is None:
        finding = "not judged"
    return Effect(
        signal, better, "without_implicated", versus,
        tuple(differences.tolist()), mean, low, high, level, finding,
    )  # fmt: skip


def t_interval(values: Sequence[float] | np.ndarray[Any, Any], level: float) -> tuple[float, float]:
    """Student's t interval of the mean of two or more values."""
    x = np.asarray(values, np.float64)
    half = t_quantile(0.5 + level / 2, len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    mean = float(x.mean())
    return mean - half, mean + half


def t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t for whole degrees of freedom, .5 <= p < 1, by bisection."""
    low, high = 0.0, 1.0
    while _t_cdf(high, df) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, df: int) -> float:
    """Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(df))
    cos2 = math.cos(angle) ** 2
    term = math.cos(angle) if df % 2 else 1.0
    total = 0.0
    for k in range(1 + df % 2, df, 2):
        total += term
        term *= cos2 * k / (k + 1)
    if df % 2:
        return 0.5 + (angle + math.sin(angle) * total) / math.pi
    return 0.5 + math.sin(angle) * total / 2
