"""The steps whose batches a report implicates, and the batches of these steps: a skip list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from auditor.explain.attribution import (
    LOOKBACK_STEPS,
    Exposures,
    blamed_sources,
    features_of,
    windows_of,
)
from auditor.explain.contrast import STRETCH_STEPS

N_STRONGEST: Final = 5
"""Steps named of a lookback."""


@dataclass(frozen=True, kw_only=True)
class SkipList:
    """Batches to leave out.

    ``stretches`` are the ranges of steps, both ends included, that ``batches`` are of: ordinals of
    the loader, from 0, counted from the first batch of ``from_step``, or of the attempt where that
    is None. They are the same for all ranks, since ranks step together.
    """

    stretches: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    from_step: int | None

    @property
    def steps(self) -> list[int]:
        return [step for low, high in self.stretches for step in range(low, high + 1)]


def blamed_stretches(
    events: pl.DataFrame, suspects: pl.DataFrame, composition: pl.DataFrame
) -> list[tuple[int, int]]:
    """Ranges of steps, both ends included, in which a blamed source stood out around its event.

    From ``LOOKBACK_STEPS`` before the last healthy sample to the trough, those windows of
    ``STRETCH_STEPS`` in which what is blamed is at least half of the way from what it was before
    to its strongest; single steps at the ends that are not are cut off.

    Args:
        events, suspects, composition: columns of their tables in :mod:`auditor.schema`.
    """
    blamed = blamed_sources(suspects)
    if blamed.is_empty() or composition.is_empty():
        return []
    steps, features = features_of(composition)
    is_in = np.zeros(len(steps), np.bool_)
    for row in blamed.iter_rows(named=True):
        event = events.row(by_predicate=pl.col("event") == row["event"], named=True)
        start = event["onset_high"] - row["lag"]  # of the change
        last = max(event["trough_step"], start + STRETCH_STEPS - 1)
        low = int(np.searchsorted(steps, min(event["onset_low"] - LOOKBACK_STEPS + 1, start)))
        high = int(np.searchsorted(steps, last, side="right"))
        rate = features[row["name"], row["feature"]].rates[low:high]
        half = 0.5 * (row["control"] + row["exposure"])
        is_in[low:high] |= _stretched(rate, half)
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], is_in.view(np.int8), [0]])))
    return [
        (int(steps[a]), int(steps[b - 1])) for a, b in zip(bounds[::2], bounds[1::2], strict=True)
    ]


def strongest_steps(
    events: pl.DataFrame, suspects: pl.DataFrame, composition: pl.DataFrame
) -> dict[int, list[int]]:
    """By event, the steps of its lookback that hold most of what its first source stands for.

    Most first, of equal ones the earliest; of a feature that fell, least first.
    """
    if composition.is_empty():
        return {}
    steps, features = features_of(composition)
    found: dict[int, list[int]] = {}
    sources = suspects.filter(pl.col("level") == "source")
    for row in sources.unique("event", keep="first", maintain_order=True).iter_rows(named=True):
        event = events.row(by_predicate=pl.col("event") == row["event"], named=True)
        windows = windows_of(event, events, steps)
        counts = features.get((row["name"], row["feature"]))
        if windows is None or counts is None:
            continue
        inside = np.arange(*windows.lookback)
        inside = inside[counts.total[inside] > 0]
        rate = counts.rates[inside] * (1.0 if row["z"] >= 0 else -1.0)
        places = inside[np.argsort(-rate, kind="stable")[:N_STRONGEST]]
        found[row["event"]] = steps[places].tolist()
    return found


def _stretched(rate: np.ndarray, half: float) -> np.ndarray:
    """Which steps are in a window that is over ``half`` in the mean, its ends by themselves."""
    is_in = np.zeros(len(rate), np.bool_)
    for first in range(len(rate) - STRETCH_STEPS + 1):
        window = rate[first : first + STRETCH_STEPS]
        if window.mean() < half - 1e-12:
            continue
        over = np.flatnonzero(window >= half - 1e-12)
        is_in[first + over[0] : first + over[-1] + 1] = True
    return is_in


def skip_list(
    stretches: Sequence[tuple[int, int]], exposures: Exposures, from_step: int | None = None
) -> SkipList:
    """The batches of some steps, as a loader counts them that begins where the attempt began.

    Args:
        stretches: ranges of steps, both ends included.
        exposures: of the steps from one to another, columns of ``schema.EXPOSURES_JOINED``.
        from_step: the loader begins with the first batch of this step instead; stretches, or parts
            of them, before it are left out.

    Raises:
        ValueError: the steps are of several attempts, whose loaders count anew; no batch of
            ``from_step`` is recorded.
    """
    if from_step is not None:
        later = [(max(low, from_step), high) for low, high in stretches if high >= from_step]
        stretches = later
    if not stretches:
        return SkipList(stretches=(), batches=(), from_step=from_step)
    batches = pl.concat([_batches(exposures, *stretch) for stretch in stretches])
    begins = batches.select("rank", "attempt").unique().with_columns(first=pl.lit(0, pl.Int64))
    attempts = set(batches["attempt"])
    if from_step is not None:
        first = _batches(exposures, from_step, from_step)
        if first.is_empty():
            raise ValueError(f"no batch of step {from_step} was recorded")
        begins = first.group_by("rank", "attempt").agg(first=pl.col("batch").min())
        attempts |= set(begins["attempt"])
    if len(attempts) > 1:
        named = ", ".join(map(str, sorted(attempts)))
        raise ValueError(
            f"the batches lie in attempts {named} of the run, each of which counts its own: begin "
            "at a step of the last of them (--from-step), or skip steps instead of batches"
        )
    counted = batches.join(begins, on=["rank", "attempt"])
    ordinals = (counted["batch"] - counted["first"]).unique().sort()
    return SkipList(
        stretches=tuple(stretches),
        batches=tuple(int(one) for one in ordinals),
        from_step=from_step,
    )


def _batches(exposures: Exposures, low: int, high: int) -> pl.DataFrame:
    return (
        exposures(low, high)
        .filter(pl.col("state") == "trained")
        .select("rank", "attempt", "batch")
        .unique()
        .collect()
    )
