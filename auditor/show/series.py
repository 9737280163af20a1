"""What the panels draw: series out of an explanation's tables, few enough points to open quickly.

Shapes: **S** steps of a series.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor.explain.explanation import Explanation

POINTS: Final = 4000
"""Most points of a trace."""

LAYERS: Final = 12
"""Most blocks drawn one by one; of deeper models the extremes and the median are."""

BINS: Final = 150
SAMPLES_PER_BIN: Final = 64
"""A bin of the composition holds about this many samples, or its shares are mostly chance."""

SOURCES: Final = 7
"""Most sources drawn by name; the smallest ones are summed."""

OTHER_SOURCES: Final = "all other sources"


@dataclass(frozen=True)
class Line:
    """A named series: steps i64 [S] or bin centres f64 [S], values f64 [S], NaN where undefined."""

    name: str
    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    @property
    def is_defined(self) -> bool:
        return bool(np.isfinite(self.values).any())


@dataclass(frozen=True)
class Composition:
    """What the batches were made of, in bins of ``width`` steps.

    ``shares`` sum to one in every bin; ``duplicates`` are shares of the scored samples that are
    near-duplicates from the source. Both in the same order of sources.
    """

    width: int
    shares: list[Line]
    duplicates: list[Line]
    repetition: Line


def thin(
    steps: NDArray[np.float64], values: NDArray[np.float64], limit: int = POINTS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most ``limit`` points of a series: of each bin its minimum, its maximum and any gap."""
    n = len(steps)
    if n <= limit:
        return steps, values
    edges = np.linspace(0, n, (limit - 2) // 3 + 1).astype(np.int64)
    kept = {0, n - 1}
    for start, end in itertools.pairwise(edges):
        own = values[start:end]
        finite = np.isfinite(own)
        if finite.any():
            kept.add(int(start + np.argmin(np.where(finite, own, np.inf))))
            kept.add(int(start + np.argmax(np.where(finite, own, -np.inf))))
        if not finite.all():
            kept.add(int(start + np.argmin(finite)))
    places = np.asarray(sorted(kept))
    return steps[places], values[places]


def kind_of(signals: pl.DataFrame, signal: str) -> str:
    """``probe`` where the signal was taken on a probe, else ``live``."""
    own = signals.filter(pl.col("signal") == signal)
    return "probe" if (own["kind"] == "probe").any() else "live"


def of_signal(
    signals: pl.DataFrame,
    signal: str,
    kind: str,
    variant: str | None = None,
    *,
    is_of_one_head: bool = False,
) -> pl.DataFrame:
    """Step, layer and value of a signal over the whole sequence.

    Values are over all heads, unless the signal is that of one head, which it then names. Ranks
    are averaged; of a step that several attempts trained, the latest counts.
    """
    own = signals.filter(
        (pl.col("signal") == signal)
        & (pl.col("kind") == kind)
        & pl.col("segment").is_null()
        & (pl.lit(is_of_one_head) | pl.col("head").is_null())
        & (pl.lit(True) if variant is None else pl.col("variant") == variant)
    )
    return (
        own.filter(pl.col("attempt") == pl.col("attempt").max().over("step"))
        .group_by("step", "layer")
        .agg(pl.col("value").mean())
        .sort("step", "layer")
    )


def line(frame: pl.DataFrame, name: str) -> Line:
    """A frame with step and value as a line."""
    values = frame["value"].cast(pl.Float64).to_numpy().astype(np.float64)
    values = np.where(np.isfinite(values), values, np.nan)
    return Line(name, frame["step"].to_numpy().astype(np.float64), values)


def by_layer(frame: pl.DataFrame) -> list[Line]:
    """A line per block, or lowest, median and highest of them and the block most often lowest."""
    blocks = frame.filter(pl.col("layer") >= 0)
    layers: list[int] = blocks["layer"].unique().sort().to_list()
    if len(layers) <= LAYERS:
        return [line(blocks.filter(pl.col("layer") == layer), f"block {layer}") for layer in layers]
    finite = blocks.filter(pl.col("value").is_finite())
    if finite.is_empty():
        return []
    lines = [
        over_layers(finite, "min", f"lowest of {len(layers)} blocks"),
        over_layers(finite, "median", "median block"),
        over_layers(finite, "max", "highest block"),
    ]
    lowest = finite.filter(pl.col("value") == pl.col("value").min().over("step"))
    layer = int(lowest["layer"].mode().min())  # type: ignore[arg-type]
    own = blocks.filter(pl.col("layer") == layer)
    return [*lines, line(own, f"block {layer}, lowest most often")]


def over_layers(frame: pl.DataFrame, how: str, name: str) -> Line:
    """The ``min``, ``mean``, ``median`` or ``max`` over blocks at each step."""
    value = pl.col("value").filter(pl.col("value").is_finite())
    reduced = {
        "min": value.min(),
        "mean": value.mean(),
        "median": value.median(),
        "max": value.max(),
    }[how]
    return line(frame.group_by("step").agg(value=reduced).sort("step"), name)


def composition_of(explanation: Explanation) -> Composition | None:
    """The composition in bins; None where no exposures were recorded."""
    frame = explanation.composition
    frame = frame.filter(pl.col("attempt") == pl.col("attempt").max().over("step"))
    n_samples = int(frame["n_samples"].sum()) if len(frame) else 0
    if n_samples == 0:
        return None
    first, last = int(frame["step"].min()), int(frame["step"].max())  # type: ignore[arg-type]
    n_steps = last - first + 1
    per_step = n_samples / frame["step"].n_unique()
    width = max(-(-n_steps // BINS), min(round(SAMPLES_PER_BIN / per_step), n_steps // 4), 1)
    sizes = frame.group_by("source").agg(pl.col("n_samples").sum())
    sizes = sizes.sort(["n_samples", "source"], descending=[True, False])
    named = sizes["source"].to_list()
    if len(named) > SOURCES + 1:
        named = named[:SOURCES]
    binned = (
        frame.with_columns(
            bin=(pl.col("step") - first) // width,
            source=pl.when(pl.col("source").is_in(named))
            .then("source")
            .otherwise(pl.lit(OTHER_SOURCES)),
            repeated=pl.col("repetition").fill_null(0.0) * pl.col("n_scored"),
        )
        .group_by("bin", "source")
        .agg(pl.col("n_samples", "n_scored", "n_duplicate", "repeated").sum())
    )
    totals = (
        binned.group_by("bin")
        .agg(pl.col("n_samples", "n_scored", "repeated").sum())
        .sort("bin")
        .with_columns(step=first + pl.col("bin") * width + (width - 1) / 2)
    )
    # The last bin may be shorter than the rest.
    steps = np.minimum(totals["step"].to_numpy(), float(last))
    scored = totals["n_scored"].to_numpy().astype(np.float64)
    scored[scored == 0] = np.nan
    shares, duplicates = [], []
    for source in [*named, *([OTHER_SOURCES] if len(named) < len(sizes) else [])]:
        own = binned.filter(pl.col("source") == source)
        counts = totals.select("bin").join(own, on="bin", how="left", maintain_order="left")
        n = counts["n_samples"].fill_null(0).to_numpy()
        repeats = counts["n_duplicate"].fill_null(0).to_numpy()
        shares.append(Line(source, steps, n / totals["n_samples"].to_numpy()))
        duplicates.append(Line(source, steps, repeats / scored))
    repetition = Line("mean repetition", steps, totals["repeated"].to_numpy() / scored)
    return Composition(width, shares, duplicates, repetition)


def reach(explanation: Explanation) -> tuple[int, int]:
    """The first and the last step that any table knows, at least one step apart."""
    frames = (explanation.signals, explanation.grades, explanation.composition)
    steps = pl.concat(frame.select(pl.col("step").cast(pl.Int64)) for frame in frames)["step"]
    first, last = steps.min(), steps.max()
    if first is None or last is None:
        return 0, 1
    return int(first), max(int(last), int(first) + 1)  # type: ignore[arg-type]


def warm_ups(grades: pl.DataFrame) -> list[tuple[int, int]]:
    """First and last step of each attempt that were not judged, of the steps that count."""
    own = grades.filter(
        (pl.col("attempt") == pl.col("attempt").max().over("step")) & (pl.col("alert") == "warming")
    )
    spans = own.group_by("attempt").agg(first=pl.min("step"), last=pl.max("step"))
    return list(spans.sort("attempt").select("first", "last").iter_rows())


def ends(explanation: Explanation) -> Mapping[int, int]:
    """The step until which each event lasts, the run's last where it did not recover."""
    _, last = reach(explanation)
    return {
        event["event"]: last if event["recovery_step"] is None else event["recovery_step"]
        for event in explanation.events.iter_rows(named=True)
    }
