"""Events: where a signal left what had been normal for this run.

Each rule reads one series of a signal over sampled steps and compares it with its own recent past,
after the warm-up of :mod:`auditor.measure.grading`. An onset between two samples is an interval:
(last healthy sample, first bad sample]. Events are cheap and meant to be: whether data caused one
is for the attribution to say. Thresholds were chosen on small byte-level GPTs, see
`docs/attribution.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from auditor import schema
from auditor.explain.grades import graded_kind
from auditor.measure.baseline import (
    HISTORY_SAMPLES,
    INPUT_DEVIATIONS,
    INPUT_FALL,
    LONG_HISTORY_SAMPLES,
    MIN_SAMPLES,
    PROBE_LOSS_RISE,
    Baseline,
    IsBad,
    below_share,
    fell_from_median,
)
from auditor.measure.grading import DEFAULT_POLICY
from auditor.tables import polars_schema

RATIO_FALL: Final = 0.10
"""Fall of a token rank ratio below its best of the last ``BEST_STEPS``, in two samples running."""

BEST_STEPS: Final = 100
MIN_BEST_SAMPLES: Final = MIN_SAMPLES
"""The best is looked for among at least this many samples, however sparse they are."""

LOSS_DEVIATIONS: Final = 6.0
LONE_LOSS_DEVIATIONS: Final = 10.0
LONE_LOSS_SHARE: Final = 0.25
"""A loss that jumps once is an event of its own from both: so many robust deviations, and this
share of the median. Below, it is one hard batch of the many that a run has. Chosen on the clean
runs of the demo's model and on four published logs of one data order, whose two known spikes are
11 to 14 deviations and a third of the median, the next jump 7 deviations and a seventh."""

GRAD_DEVIATIONS: Final = 10.0
GRAD_FACTOR: Final = 5.0
HISTORY_RECORDS: Final = 100
"""Good records of a loss or norm that the next one is compared with: steps where every step is
recorded; where a log has every tenth, it reaches back ten times as far."""

_LEAST_BLOCK, _LARGEST_BLOCK = 16, 4096
"""Samples that are judged at once."""

EPISODE_STEPS: Final = 100
"""An event this soon after the last sign of the one before belongs to the same episode."""


@dataclass(frozen=True)
class _Series:
    kind: str  # of events
    signal: str
    measured: str
    layer: int | None
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class _Bad:
    """Samples of one series that a rule calls bad, and what was normal before each."""

    series: _Series
    bad: NDArray[np.bool_]
    normal: NDArray[np.float64]
    lower_is_worse: bool
    alone: NDArray[np.bool_] | None = None  # bad samples that are events by themselves


def events_of(signals: pl.DataFrame, grades: pl.DataFrame) -> pl.DataFrame:
    """All events in order of onset: ``schema.EVENTS``."""
    rows: list[dict[str, Any]] = []
    # A resumed run may be another model, or the same one further back: each attempt is judged by
    # its own past, after its own warm-up, as its grades are.
    for attempt in signals["attempt"].unique().sort():
        own = pl.col("attempt") == attempt
        for found in _judged(signals.filter(own), grades.filter(own)):
            rows += _events(found)
    rows.sort(key=lambda row: (row["onset_high"], row["onset_low"], row["kind"]))
    _number_episodes(rows)
    frame = pl.DataFrame(
        rows, schema={**polars_schema(schema.EVENTS), "last_bad": pl.Int64}, orient="row"
    ).drop("last_bad")
    return _with_grades(frame, grades)


def _judged(signals: pl.DataFrame, grades: pl.DataFrame) -> Iterator[_Bad]:
    kind = graded_kind(signals)
    for variant in ("raw", "column"):
        series = _lowest(signals, "ratio_fall", "token_rank", kind, variant)
        if series is not None:
            yield _beyond_best(series, RATIO_FALL, highest=True)
    series = _one(signals, "input_fall", "sample_rank", "live", layer=-1)
    if series is not None:
        yield _below_median(series)
    series = _one(signals, "probe_loss_rise", "probe_loss", "probe")
    if series is not None:
        yield from _not_finite(series, ~np.isfinite(series.values))
        yield _beyond_best(series, PROBE_LOSS_RISE, highest=False)
    series = _mean(signals, "entropy_fall", "entropy_mean", kind)
    if series is not None:
        yield _below_share(series)
    for event, signal, spikes in (
        ("loss_spike", "loss", _loss_spikes),
        ("grad_spike", "grad_norm", _gradient_spikes),
    ):
        series = _one(signals, event, signal, "step")
        if series is None:
            continue
        bad = ~np.isfinite(series.values)
        # With mixed precision a norm overflows now and then, and the step is skipped.
        yield from _not_finite(series, bad if signal == "loss" else _twice(bad))
        yield spikes(series)
    if len(grades):
        yield _alarming(grades)


# -- series out of the signals ---------------------------------------------------------------


def _per_step(signals: pl.DataFrame, *, reduce: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Steps i64 [S] and values f64 [S]; of several ranks the first speaks."""
    own = signals.filter(pl.col("rank") == pl.col("rank").min())
    value = {"min": pl.col("value").min(), "mean": pl.col("value").mean()}[reduce]
    per_step = own.group_by("step").agg(value).sort("step")
    values = per_step["value"].fill_null(np.nan).to_numpy()
    return per_step["step"].to_numpy(), values.astype(np.float64)


def _chosen(signals: pl.DataFrame, signal: str, kind: str) -> pl.DataFrame:
    return signals.filter((pl.col("signal") == signal) & (pl.col("kind") == kind))


def _lowest(
    signals: pl.DataFrame, event: str, signal: str, kind: str, variant: str
) -> _Series | None:
    """The lowest block at each sampled step."""
    own = _chosen(signals, signal, kind).filter(
        (pl.col("variant") == variant) & pl.col("value").is_not_null()
    )
    if own.is_empty():
        return None
    return _Series(event, f"{signal} {variant}", kind, None, *_per_step(own, reduce="min"))


def _one(
    signals: pl.DataFrame, event: str, signal: str, kind: str, layer: int | None = None
) -> _Series | None:
    own = _chosen(signals, signal, kind)
    if layer is not None:
        own = own.filter(pl.col("layer") == layer)
    if own.is_empty():
        return None
    return _Series(event, signal, kind, layer, *_per_step(own, reduce="mean"))


def _mean(signals: pl.DataFrame, event: str, signal: str, kind: str) -> _Series | None:
    own = _chosen(signals, signal, kind).filter(pl.col("value").is_not_null())
    if own.is_empty():
        return None
    return _Series(event, signal, kind, None, *_per_step(own, reduce="mean"))


# -- rules -----------------------------------------------------------------------------------


def _warm(steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    return (np.arange(len(steps)) >= DEFAULT_POLICY.warmup_samples) & (
        steps - steps[:1] >= DEFAULT_POLICY.warmup_steps
    )


def _not_finite(series: _Series, bad: NDArray[np.bool_]) -> Iterator[_Bad]:
    if bad.any():
        undefined = np.full(len(bad), np.nan)
        yield _Bad(replace(series, kind="non_finite"), bad, undefined, lower_is_worse=False)


def _twice(bad: NDArray[np.bool_], within: int = 1) -> NDArray[np.bool_]:
    """Bad samples with another at most ``within`` places away: one odd sample is not an event."""
    if not len(bad):
        return bad
    padded = np.concatenate([np.zeros(within, np.bool_), bad, np.zeros(within, np.bool_)])
    n_near = sliding_window_view(padded, 2 * within + 1).sum(axis=1)
    return bad & (n_near > 1)


def _median_of_three(values: NDArray[np.float64]) -> NDArray[np.float64]:
    padded = np.concatenate([values[:1], values[:1], values])
    return np.median(np.stack([padded[:-2], padded[1:-1], padded[2:]]), axis=0)


def _beyond_best(series: _Series, margin: float, *, highest: bool) -> _Bad:
    """Samples that lie a margin beyond the best median of three of the good samples before.

    The best is that of the last ``BEST_STEPS``, or of as many samples as it takes for
    ``MIN_BEST_SAMPLES`` where they are sparse or were bad.
    """
    smooth, warm = _median_of_three(series.values), _warm(series.steps)
    bad = np.zeros(len(series.values), np.bool_)
    best = np.full(len(series.values), np.nan)
    good: deque[tuple[int, float]] = deque()
    for i, (step, value) in enumerate(zip(series.steps, series.values, strict=True)):
        while len(good) > MIN_BEST_SAMPLES and good[0][0] < step - BEST_STEPS:
            good.popleft()
        if good:
            past = [one for _, one in good]
            best[i] = max(past) if highest else min(past)
            fall = best[i] - value if highest else value - best[i]
            bad[i] = fall >= margin
        if warm[i] and not bad[i] and np.isfinite(smooth[i]):
            good.append((int(step), float(smooth[i])))
    return _Bad(series, _twice(bad), best, lower_is_worse=highest)


def _against_history(
    series: _Series,
    n: int,
    is_bad: IsBad,
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Judge each sample by the last n good warm samples before it: bad, and the median.

    As :class:`Baseline` has it, one after another; once there are n, in blocks that end at the
    first bad sample, because logs have hundreds of thousands of steps.
    """
    values, joins = series.values, _warm(series.steps) & np.isfinite(series.values)
    bad = np.zeros(len(values), np.bool_)
    normal = np.full(len(values), np.nan)
    baseline, good, i = Baseline(n), list[float](), 0
    while i < len(values) and len(good) < n:
        bad[i], normal[i] = baseline.judge(float(values[i]), is_bad, keep=bool(joins[i]))
        if joins[i] and not bad[i]:
            good.append(float(values[i]))
        i += 1
    past, size = np.array(good), _LEAST_BLOCK
    while i < len(values):
        block, joined = values[i : i + size], joins[i : i + size]
        following = np.concatenate([past, block[joined]])
        windows = sliding_window_view(following, n)[np.cumsum(joined) - joined]
        middle = np.median(windows, axis=1)
        deviation = 1.4826 * np.median(np.abs(windows - middle[:, None]), axis=1)
        judged = zip(block, middle, deviation, windows.min(axis=1), strict=True)
        first = next(
            (k for k, one in enumerate(judged) if np.isfinite(one[0]) and is_bad(*map(float, one))),
            None,
        )
        end = len(block) if first is None else first + 1
        normal[i : i + end] = np.where(np.isfinite(block[:end]), middle[:end], np.nan)
        if first is None:
            past, size = following[-n:], min(2 * size, _LARGEST_BLOCK)
        else:
            bad[i + first] = True
            past, size = windows[first], _LEAST_BLOCK
        i += end
    return bad, normal


def _below_median(series: _Series) -> _Bad:
    is_bad = fell_from_median(INPUT_FALL, INPUT_DEVIATIONS)
    bad, normal = _against_history(series, HISTORY_SAMPLES, is_bad)
    return _Bad(series, _twice(bad, within=2), normal, lower_is_worse=True)


def _below_share(series: _Series) -> _Bad:
    bad, normal = _against_history(series, LONG_HISTORY_SAMPLES, below_share)
    return _Bad(series, _twice(bad), normal, lower_is_worse=True)


def _loss_spikes(series: _Series) -> _Bad:
    """Jumps of two records running, and lone ones that are large by every measure."""

    def is_bad(value: float, median: float, deviation: float, _: float) -> bool:
        return value - median >= LOSS_DEVIATIONS * max(deviation, _least_deviation(median))

    bad, normal = _against_history(series, HISTORY_RECORDS, is_bad)
    running = _twice(bad)
    alone = np.zeros(len(bad), np.bool_)
    good = np.flatnonzero(~bad & _warm(series.steps) & np.isfinite(series.values))
    for i in np.flatnonzero(bad & ~running):
        end = int(np.searchsorted(good, i))
        past = series.values[good[max(0, end - HISTORY_RECORDS) : end]]
        deviation = 1.4826 * float(np.median(np.abs(past - normal[i])))
        least = LONE_LOSS_DEVIATIONS * max(deviation, _least_deviation(normal[i]))
        alone[i] = series.values[i] - normal[i] >= max(least, LONE_LOSS_SHARE * abs(normal[i]))
    return _Bad(series, running | alone, normal, lower_is_worse=False, alone=alone)


def _gradient_spikes(series: _Series) -> _Bad:
    def is_bad(value: float, median: float, deviation: float, _: float) -> bool:
        deviation = max(deviation, _least_deviation(median))
        # Logs have norms of zero where none was taken.
        far = median > 0 and value - median >= GRAD_DEVIATIONS * deviation
        return far and value >= GRAD_FACTOR * median

    bad, normal = _against_history(series, HISTORY_RECORDS, is_bad)
    return _Bad(series, bad, normal, lower_is_worse=False)


def _least_deviation(median: float) -> float:
    """A series that hardly varies must not make spikes of its last digits."""
    return max(1e-3 * abs(median), 1e-12)


def _alarming(grades: pl.DataFrame) -> _Bad:
    """Grades below S5 after the warm-up, and blocks that lost their ratio: theirs counts as 0."""
    lost = pl.col("grade").is_null() & (pl.col("alert") == "danger")
    own = grades.filter(pl.col("grade").is_not_null() | lost)
    values = own["ratio"].fill_null(0.0).to_numpy().astype(np.float64)
    series = _Series(
        "grade_drop", "grade", str(own["kind"][0]) if len(own) else "live", None,
        own["step"].to_numpy(), values,
    )  # fmt: skip
    bad = own["alert"].is_in(["watch, stable", "watch, falling", "danger"]).to_numpy()
    best = _beyond_best(series, RATIO_FALL, highest=True).normal
    return _Bad(series, _twice(bad), best, lower_is_worse=True)


# -- from bad samples to events --------------------------------------------------------------


def _events(found: _Bad) -> Iterator[dict[str, Any]]:
    """Group bad samples into events; one ends after half of ``EPISODE_STEPS`` of good ones."""
    series = found.series
    bad = np.flatnonzero(found.bad)
    if not len(bad):
        return
    is_over = (np.diff(series.steps[bad]) > EPISODE_STEPS // 2) & (np.diff(bad) > 2)
    if found.alone is not None:
        is_over |= found.alone[bad[1:]] | found.alone[bad[:-1]]
    groups = np.split(bad, np.flatnonzero(is_over) + 1)
    earliest = 0
    for group in groups:
        first, last = int(group[0]), int(group[-1])
        values = series.values[first : last + 1]
        if np.isfinite(values).any():
            worst = int(np.nanargmin(values) if found.lower_is_worse else np.nanargmax(values))
        else:
            worst = 0
        trough = first + worst
        before = found.normal[first]
        # Of a level that stays, each spike has its own onset, after what came before it.
        onset = max(_onset(found, first, trough), earliest)
        earliest = last + 1
        yield {
            "event": 0,
            "episode": 0,
            "kind": series.kind,
            "signal": series.signal,
            "measured": series.measured,
            "layer": series.layer,
            "onset_low": int(series.steps[onset - 1]) if onset else int(series.steps[0]) - 1,
            "onset_high": int(series.steps[onset]),
            "trough_step": int(series.steps[trough]),
            "recovery_step": _recovery(found, first, trough, last),
            "before": float(before) if np.isfinite(before) else None,
            "after": float(series.values[trough]) if np.isfinite(series.values[trough]) else None,
            "last_bad": int(series.steps[last]),
        }


def _onset(found: _Bad, first: int, trough: int) -> int:
    """The first sample of the way down: past a quarter of the fall, and staying there."""
    before, after = found.normal[first], found.series.values[trough]
    if not (np.isfinite(before) and np.isfinite(after)):
        return first
    line = before + 0.25 * (after - before)
    values = found.series.values
    onset = first
    falling = after < before
    while onset > 0 and (values[onset - 1] <= line if falling else values[onset - 1] >= line):
        onset -= 1
    return onset


def _recovery(found: _Bad, first: int, trough: int, last: int) -> int | None:
    """The first sample after the last bad one that has made good half of the way, if any."""
    before, after = found.normal[first], found.series.values[trough]
    for i in range(last + 1, len(found.series.values)):
        value = found.series.values[i]
        defined = np.isfinite(before) and np.isfinite(after)
        if not defined or abs(value - before) <= 0.5 * abs(after - before):
            return int(found.series.steps[i])
    return None


def _number_episodes(rows: list[dict[str, Any]]) -> None:
    episode, last_sign = -1, None
    for number, row in enumerate(rows):
        if last_sign is None or row["onset_low"] > last_sign + EPISODE_STEPS:
            episode += 1
            last_sign = row["last_bad"]
        last_sign = max(last_sign, row["last_bad"])
        row["event"], row["episode"] = number, episode


def _with_grades(events: pl.DataFrame, grades: pl.DataFrame) -> pl.DataFrame:
    """Grades at the last healthy sample and the lowest between onset and trough."""
    known = grades.filter(pl.col("grade").is_not_null())
    steps, values = known["step"].to_numpy(), known["grade"].to_numpy()

    def before(low: int) -> int | None:
        i = int(np.searchsorted(steps, low, side="right")) - 1
        return int(values[i]) if i >= 0 else None

    def lowest(low: int, trough: int) -> int | None:
        between = values[(steps > low) & (steps <= trough)]
        return int(between.min()) if len(between) else before(trough)

    lows, troughs = events["onset_low"].to_list(), events["trough_step"].to_list()
    return events.with_columns(
        pl.Series("grade_before", [before(low) for low in lows], dtype=pl.Int32),
        pl.Series(
            "grade_after",
            [lowest(low, trough) for low, trough in zip(lows, troughs, strict=True)],
            dtype=pl.Int32,
        ),
    )
