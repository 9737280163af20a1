"""The join: for each event, what was consumed before it, against what this run consumed earlier.

A source is compared with itself: its share of the batch, its near-duplicates and its repetition as
shares of the batch, in the lookback before the event against windows of the same length before the
episode began. The statistic of a window is its strongest 10-step stretch, so that a short burst is
not diluted and the lookback and its controls are scanned alike.

Shapes: **S** steps, **W** control windows.

- ``z``: how many robust deviations (median/MAD over the control windows, at least the binomial
  deviation of a stretch) the lookback lies from the run's own past. The verdict rests on it.
- ``p``: the share of circular shifts of the run up to the event that look at least as bad. Shifts
  keep the autocorrelation; with little history before the event p cannot be small, and the least it
  could be is given beside it.
- ``q``: Benjamini-Hochberg over everything tested for the event.

Association, not causation: a replay with and without the samples is the test of cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from auditor import schema
from auditor.schema import DUPLICATE_SIMILARITY, UNKNOWN_SOURCE
from auditor.tables import polars_schema

LOOKBACK_STEPS: Final = 40
STRETCH_STEPS: Final = 10
MIN_CONTROL_WINDOWS: Final = 20

BLAME_DEVIATIONS: Final = 6.0
"""|z| from which a source is blamed. On small trainings 6 left no learning-rate spike and no clean
event with a culprit; lower thresholds did."""

INPUT_SIDE: Final = ("input_fall",)
"""Kinds of events that say the input is poor, before they say anything about the model."""

MODEL_SIDE: Final = ("ratio_fall", "grade_drop", "probe_loss_rise", "entropy_fall")

MIN_EXPOSURES: Final = 2
"""A cluster, shard or sample seen once before an event is no evidence."""

CLUSTER_STEPS: Final = 1000
"""Clusters, shards and samples are compared with this many steps of the history."""

READ_AHEAD_STEPS: Final = 400
"""Steps of an episode that are read together with the history before it."""

N_NAMED: Final = 5
"""Clusters, shards and samples named per source."""


@dataclass(frozen=True)
class Windows:
    """The windows of one event, in places of the step axis.

    ``lookback`` is half-open; control windows start before ``n_control`` minus their length.
    """

    lookback: tuple[int, int]
    n_control: int


MARKS: Final[Mapping[str, pl.Expr]] = {
    "duplication": pl.col("duplication") >= DUPLICATE_SIMILARITY,
    "repetition": pl.col("repetition") > 0.0,
}
"""By feature that a source may be blamed for: which exposures of it are meant."""

Exposures = Callable[[int, int], pl.LazyFrame]
"""Exposures (``schema.EXPOSURES_JOINED``) of the steps from one to another, both included."""


def suspects_of(
    events: pl.DataFrame, composition: pl.DataFrame, exposures: Exposures
) -> tuple[pl.DataFrame, dict[int, float]]:
    """What stands out before each event (``schema.SUSPECTS``), and the least p each could give.

    Sources are tested first; clusters, shards and samples are named, by effect size only, inside
    sources that are blamed.
    """
    rows: list[dict[str, Any]] = []
    smallest: dict[int, float] = {}
    if composition.is_empty():
        return pl.DataFrame(schema=polars_schema(schema.SUSPECTS)), smallest
    steps, totals, shares = shares_of(composition)
    trained = _Trained(exposures)
    for event in events.iter_rows(named=True):
        episode = events.filter(pl.col("episode") == event["episode"])
        windows = windows_of(event, int(episode["onset_low"].min()), steps)  # type: ignore[arg-type]
        if windows is None:
            continue
        found, least = compare_sources(shares, totals, windows)
        smallest[event["event"]] = least
        is_input_first = input_came_first(episode)
        begin = int(np.searchsorted(steps, steps[windows.n_control - 1] - CLUSTER_STEPS))
        span = int(steps[begin]), int(steps[windows.lookback[1] - 1])
        for one in found:
            place = one.pop("stretch_start")
            start = int(steps[place])
            one |= {"event": event["event"], "level": "source", "lag": event["onset_high"] - start}
            one["verdict"] = _verdict(one, is_input_first, start <= event["onset_high"])
            rows.append(one)
            if one["verdict"] == "blamed":
                rows += _named(
                    one, trained.of(*span), steps, totals, place, (begin, windows.n_control)
                )
    frame = pl.DataFrame(rows, schema=polars_schema(schema.SUSPECTS), orient="row")
    order = {"blamed": 0, "coincident": 1, "ranked": 2}
    levels = {"source": 0, "cluster": 1, "shard": 2, "sample": 3}
    return (
        frame.sort(
            pl.col("event"),
            pl.col("level").replace_strict(levels, return_dtype=pl.Int32),
            pl.col("verdict").replace_strict(order, return_dtype=pl.Int32),
            -pl.col("z").abs().fill_null(0.0),
            -pl.col("exposure"),
            pl.col("name"),
            maintain_order=True,
        ),
        smallest,
    )


def shares_of(
    composition: pl.DataFrame,
) -> tuple[NDArray[np.int64], NDArray[np.float64], dict[tuple[str, str], NDArray[np.float64]]]:
    """Steps i64 [S], samples per step f64 [S], and samples per step by (source, feature), f64 [S].

    Of a step that several attempts trained, the latest counts. Where no sample of a step was
    scored, its duplicates are unknown and taken as the source's mean.
    """
    latest = composition.filter(pl.col("attempt") == pl.col("attempt").max().over("step"))
    steps, places = np.unique(latest["step"].to_numpy(), return_inverse=True)

    def per_step(values: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        sums = np.bincount(places[chosen], values[chosen], len(steps))
        return sums.astype(np.float64)

    n_samples = latest["n_samples"].to_numpy()
    scored = latest["n_scored"].to_numpy()
    contents = {
        "duplication": latest["n_duplicate"].to_numpy(),
        "repetition": latest["repetition"].fill_null(0.0).to_numpy() * scored,
    }
    sources = latest["source"].to_numpy()
    shares: dict[tuple[str, str], NDArray[np.float64]] = {}
    for source in sorted(set(sources)):
        own = sources == source
        n, n_scored = per_step(n_samples, own), per_step(scored, own)
        shares[source, "share"] = n
        if n_scored.sum():
            for feature, counts in contents.items():
                values = per_step(counts, own)
                shares[source, feature] = values + values.sum() / n_scored.sum() * (n - n_scored)
    totals = per_step(n_samples, np.ones(len(places), np.bool_))
    return steps, totals, shares


def windows_of(
    event: Mapping[str, Any], episode_low: int, steps: NDArray[np.int64]
) -> Windows | None:
    """The lookback of an event and the history before it and its episode; None without enough.

    The lookback ends where the event shows itself: for a live signal the batch at the onset is
    measured on itself, and a second bad sample confirmed it, so it reaches one stretch further.
    """
    end = int(np.searchsorted(steps, event["onset_high"], side="right"))
    if event["measured"] == "live":
        end = min(end + STRETCH_STEPS, len(steps))
    start = int(np.searchsorted(steps, event["onset_low"] - LOOKBACK_STEPS, side="right"))
    # Neither the lookback nor anything of the episode is among its own controls.
    n_control = min(start, int(np.searchsorted(steps, episode_low, side="right")))
    length = end - start
    if length < STRETCH_STEPS or n_control - length < MIN_CONTROL_WINDOWS:
        return None
    return Windows((start, end), n_control)


def compare_sources(
    shares: Mapping[tuple[str, str], NDArray[np.float64]],
    totals: NDArray[np.float64],
    windows: Windows,
) -> tuple[list[dict[str, Any]], float]:
    """One row per source and feature, and the smallest p that the windows allow."""
    start, end = windows.lookback
    length, stretch = end - start, STRETCH_STEPS
    n_stretch = _sums(totals, stretch)
    rows: list[dict[str, Any]] = []
    # One extreme stretch is in this many of the shifted windows: p cannot be smaller.
    least = min(1.0, (length - stretch + 1) / end)
    for (source, feature), counts in shares.items():
        rate = _sums(counts, stretch) / n_stretch
        control = _extremes(rate[: windows.n_control - stretch + 1], length - stretch + 1)
        base = float(counts[: windows.n_control].sum() / totals[: windows.n_control].sum())
        best: tuple[float, float, int] | None = None
        for sign in (1.0, -1.0):
            scanned = sign * rate[start : end - stretch + 1]
            place = int(np.argmax(scanned))
            past = control[0] if sign > 0 else -control[1]
            median = float(np.median(past))
            deviation = 1.4826 * float(np.median(np.abs(past - median)))
            n = float(n_stretch[start + place])
            # At least one sample's worth of chance, so that a rate of zero has a deviation.
            p0 = min(max(base, 1.0 / n), 1.0 - 1.0 / n) if n > 2 else 0.5
            floor = math.sqrt(p0 * (1.0 - p0) / n)
            z = (float(scanned[place]) - median) / max(deviation, floor)
            if best is None or z > best[1]:
                best = (sign, z, place)
        assert best is not None
        sign, z, place = best
        first = start + place
        in_stretch = slice(first, first + stretch)
        rows.append(
            {
                "name": source,
                "feature": feature,
                "z": sign * z,
                "p": _shift_p(counts[:end], totals[:end], length, stretch, sign),
                "stretch_start": first,
                **_lift(
                    counts[in_stretch],
                    totals[in_stretch],
                    counts[: windows.n_control],
                    totals[: windows.n_control],
                ),
            }
        )
    for row, q in zip(rows, benjamini_hochberg([row["p"] for row in rows]), strict=True):
        row["q"] = q
    return rows, least


def _sums(values: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Sums over every run of ``length`` neighbours: [S - length + 1]."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[length:] - total[:-length]


def _extremes(rate: NDArray[np.float64], n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Highest and lowest of every n neighbouring stretches: [W] each."""
    windows = sliding_window_view(rate, n)
    return windows.max(axis=1), windows.min(axis=1)


def _shift_p(
    counts: NDArray[np.float64],
    totals: NDArray[np.float64],
    length: int,
    stretch: int,
    sign: float,
) -> float:
    """Share of the circular shifts whose last window is at least as extreme as the real one.

    Valid when the event's place is arbitrary under the null; neighbours of an extreme stretch are
    extreme themselves, which is what keeps p honest under autocorrelation.
    """
    wrapped = np.concatenate([counts, counts[: length - 1]])
    n = np.concatenate([totals, totals[: length - 1]])
    rate = sign * _sums(wrapped, stretch) / _sums(n, stretch)
    extremes = sliding_window_view(rate, length - stretch + 1).max(axis=1)
    observed = extremes[len(counts) - length]
    return float(np.mean(extremes >= observed - 1e-12))


def _lift(
    x1: NDArray[np.float64],
    n1: NDArray[np.float64],
    x0: NDArray[np.float64],
    n0: NDArray[np.float64],
) -> dict[str, float]:
    """Exposure in the stretch over exposure in the controls, half a sample added to each.

    The 95% interval is that of a ratio of proportions on the log scale (Katz), widened by the
    dispersion of the control's stretches where they vary more than chance.
    """
    a, n, b, m = float(x1.sum()), float(n1.sum()), float(x0.sum()), float(n0.sum())
    lift = ((a + 0.5) / (n + 0.5)) / ((b + 0.5) / (m + 0.5))
    variance = max(0.0, 1 / (a + 0.5) - 1 / (n + 0.5) + 1 / (b + 0.5) - 1 / (m + 0.5))
    blocks = len(x0) // STRETCH_STEPS
    if blocks >= 4 and 0.0 < b < m:
        cut = blocks * STRETCH_STEPS
        xs = x0[:cut].reshape(blocks, -1).sum(axis=1)
        ns = n0[:cut].reshape(blocks, -1).sum(axis=1)
        expected = ns * b / m
        chi2 = float(((xs - expected) ** 2 / (expected * (1 - b / m))).sum())
        variance *= max(1.0, chi2 / (blocks - 1))
    width = 1.96 * math.sqrt(variance)
    return {
        "exposure": a / n,
        "control": b / m,
        "lift": lift,
        "low": lift * math.exp(-width),
        "high": lift * math.exp(width),
    }


def benjamini_hochberg(p: Sequence[float]) -> list[float]:
    """Adjusted p values (Benjamini and Hochberg 1995)."""
    values = np.asarray(p, dtype=np.float64)
    n = len(values)
    if n == 0:
        return []
    order = np.argsort(values)[::-1]
    scaled = values[order] * n / np.arange(n, 0, -1)
    q = np.empty(n)
    q[order] = np.minimum.accumulate(np.minimum(scaled, 1.0))
    return [float(value) for value in q]


def blamed_sources(suspects: pl.DataFrame) -> pl.DataFrame:
    """The sources that are blamed: earliest event first, and there the most evidence first."""
    return suspects.filter((pl.col("level") == "source") & (pl.col("verdict") == "blamed")).sort(
        "event", "z", descending=[False, True], maintain_order=True
    )


def input_came_first(episode: pl.DataFrame) -> bool:
    """Whether the episode's input went poor before its model did: the order gate.

    A fault of the data shows in the input first and in the model later; a fault of the optimizer
    shows in the model. Both at the same sample cannot be told apart.
    """
    first_input = episode.filter(pl.col("kind").is_in(INPUT_SIDE))["onset_high"].min()
    first_model = episode.filter(pl.col("kind").is_in(MODEL_SIDE))["onset_high"].min()
    if first_input is None:
        return False
    return bool(first_model is None or first_input < first_model)  # type: ignore[operator]


def _verdict(row: Mapping[str, Any], is_input_first: bool, is_before: bool) -> str:
    if abs(row["z"]) < BLAME_DEVIATIONS:
        return "ranked"
    is_content = row["feature"] != "share" and row["z"] > 0
    return "blamed" if is_content and is_input_first and is_before else "coincident"


# -- inside a blamed source ------------------------------------------------------------------


def _named(
    row: Mapping[str, Any],
    trained: pl.DataFrame,
    steps: NDArray[np.int64],
    totals: NDArray[np.float64],
    place: int,
    controls: tuple[int, int],
) -> list[dict[str, Any]]:
    """Clusters, shards and samples of a blamed source in its strongest stretch, by exposure.

    ``place`` is where the stretch begins among the steps; controls, half-open places as well, are
    the last ``CLUSTER_STEPS`` of the history before the episode, which may lie long before a late
    event's stretch.
    """
    in_stretch = slice(place, place + STRETCH_STEPS)
    in_control = slice(*controls)
    window, control = ((int(steps[s][0]), int(steps[s][-1])) for s in (in_stretch, in_control))
    own = trained.filter(
        (pl.col("source") == row["name"]) & pl.col("step").is_between(control[0], window[1])
    )
    own = own.with_columns(cluster=clusters_of(own))
    implicated = MARKS[row["feature"]]
    levels = [("cluster", "cluster"), ("shard", "shard"), ("sample", "sample_id")]
    named = []
    for level, column in levels:
        counted = (
            own.filter(implicated & pl.col(column).is_not_null())
            .group_by(column)
            .agg(
                x1=pl.col("step").is_between(*window).sum(),
                x0=pl.col("step").is_between(*control).sum(),
            )
            .filter(pl.col("x1") >= MIN_EXPOSURES)
            .sort(["x1", column], descending=[True, False])
            .head(N_NAMED)
        )
        for one in counted.iter_rows(named=True):
            lift = _lift(
                np.asarray([one["x1"]]), totals[in_stretch],
                np.asarray([one["x0"]]), totals[in_control],
            )  # fmt: skip
            named.append(
                {
                    "event": row["event"],
                    "level": level,
                    "name": str(one[column]),
                    "feature": row["feature"],
                    **lift,
                    "z": None,
                    "p": None,
                    "q": None,
                    "lag": row["lag"],
                    "verdict": "ranked",
                }
            )
    return named


def trained_with_source(exposures: pl.LazyFrame) -> pl.LazyFrame:
    """Those that were trained, each with the name of a source."""
    trained = exposures.filter(pl.col("state") == "trained")
    return trained.with_columns(pl.col("source").fill_null(UNKNOWN_SOURCE))


class _Trained:
    """Trained exposures as far as naming needs them, read once for the events of an episode."""

    def __init__(self, exposures: Exposures) -> None:
        self._exposures = exposures
        self._span = (0, -1)
        self._rows = pl.DataFrame()

    def of(self, low: int, high: int) -> pl.DataFrame:
        """Those of steps ``low`` to ``high``, and of others."""
        if low < self._span[0] or high > self._span[1]:
            self._span = (low, max(high, low + CLUSTER_STEPS + READ_AHEAD_STEPS))
            self._rows = (
                trained_with_source(self._exposures(*self._span))
                .select(
                    *("step", "key", "sample_id", "source", "shard"),
                    *("dup_of", "duplication", "repetition"),
                )
                .collect()
            )
        return self._rows


def clusters_of(rows: pl.DataFrame) -> pl.Series:
    """The cluster of each exposure, named by the sample id of its first member, str [N].

    Clusters are the connected components of the links from a sample to the one it repeated.
    """
    names = dict(zip(rows["key"].reverse(), rows["sample_id"].reverse(), strict=True))
    parent: dict[int, int] = {}

    def root(key: int) -> int:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    order: dict[int, int] = {}
    for key, other in zip(rows["key"], rows["dup_of"], strict=True):
        order.setdefault(key, len(order))
        if other is None or other not in names:
            continue
        a, b = root(key), root(other)
        if a != b:
            order.setdefault(other, len(order))
            first, later = sorted((a, b), key=lambda k: order.get(k, len(order)))
            parent[later] = first
    return pl.Series([names[root(key)] for key in rows["key"]], dtype=pl.String)
