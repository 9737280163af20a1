"""Drift of the data: where what a run consumed changed, whether its signals moved or not.

Three kinds, each found in the composition alone:

- ``mix``: a source's share of the batches changed, and stayed for as long as is looked at;
- ``repeats``: the share of exposures whose content was seen before in the run changed, as at the
  boundary of an epoch;
- ``order``: a source comes in clumps, as when a shuffle broke: its counts vary between steps far
  more than draws of its share would.

A drift is a fact about the data and no alarm: many are meant.

Shapes: **S** steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor import schema
from auditor.explain.attribution import features_of
from auditor.explain.composition import latest
from auditor.explain.contrast import Counts, sums, turn
from auditor.tables import polars_schema

WINDOW_STEPS: Final = 40
"""A share is compared over so many steps before and after each step."""

DRIFT_SHARE: Final = 0.10
"""Least change of a share, in shares of the batch."""

DRIFT_DEVIATIONS: Final = 8.0
"""Least change in standard deviations of two proportions, widened as far as the run's own counts
vary more than chance."""

CLUMPED: Final = 3.0
"""Times that the variance of the counts over that of draws (index of dispersion) must be what is
usual in the run, or by chance, for an order to be clumped; in two windows running."""

_SAME_STEPS: Final = 5

_LEAST_EXPECTED: Final = 0.05
"""A source is looked at for clumps where its share, and what is left of the batch, is as large."""


def drifts_of(composition: pl.DataFrame) -> pl.DataFrame:
    """All drifts in order of onset: ``schema.DRIFTS``."""
    rows: list[dict[str, Any]] = []
    if not composition.is_empty():
        steps, features = features_of(composition)
        for (source, feature), counts in features.items():
            if feature != "share":
                continue
            rows += _changes("mix", source, counts, steps)
            rows += _clumps(source, counts, steps)
        rows += _changes("repeats", None, _repeats(composition, steps), steps)
    rows.sort(key=lambda row: (row["onset"], row["kind"], -abs(row["z"] or 0.0)))
    return pl.DataFrame(rows, schema=polars_schema(schema.DRIFTS), orient="row")


def _repeats(composition: pl.DataFrame, steps: NDArray[np.int64]) -> Counts:
    rows = latest(composition)
    place = np.searchsorted(steps, rows["step"].to_numpy())
    n, distinct, scored = (
        np.bincount(place, rows[name].to_numpy(), len(steps)).astype(np.float64)
        for name in ("n_samples", "n_distinct", "n_scored")
    )
    return Counts(n - distinct, scored)  # what was not scored counts as distinct


def _changes(
    kind: str, source: str | None, counts: Counts, steps: NDArray[np.int64]
) -> Iterator[dict[str, Any]]:
    """Steps at which the windows before and after differ most, one in any window."""
    w, n_steps = WINDOW_STEPS, len(steps)
    if n_steps < 2 * w:
        return
    amount, total = sums(counts.amount, w), np.maximum(sums(counts.total, w), 1.0)
    before, after = amount[:-w] / total[:-w], amount[w:] / total[w:]
    pooled = (amount[:-w] + amount[w:]) / (total[:-w] + total[w:])
    # At least one sample's worth of chance, as for a share of zero.
    least = 1.0 / (total[:-w] + total[w:])
    chance = np.clip(pooled, least, 1.0 - least)
    variance = chance * (1.0 - chance) * (1.0 / total[:-w] + 1.0 / total[w:])
    dispersion = max(1.0, float(np.median(_dispersion(counts))))
    z = (after - before) / np.sqrt(variance * dispersion)
    # Where little is known of a window, as of repeats that were not scored, nothing is told.
    known = np.minimum(total[:-w], total[w:]) >= 0.25 * np.median(total)
    strength = np.where(known & (np.abs(after - before) >= DRIFT_SHARE), np.abs(z), 0.0)
    while strength.max(initial=0.0) >= DRIFT_DEVIATIONS:
        i = int(np.argmax(strength))
        middle, sign = 0.5 * float(before[i] + after[i]), float(np.sign(z[i]))
        place = turn(counts, slice(i, i + 2 * w), middle, sign)
        yield {
            "kind": kind,
            "source": source,
            "onset": int(steps[place]),
            "end": None,
            "before": float(before[i]),
            "after": float(after[i]),
            "z": float(z[i]),
        }
        strength[max(0, i - w) : i + w + 1] = 0.0


def _clumps(source: str, counts: Counts, steps: NDArray[np.int64]) -> Iterator[dict[str, Any]]:
    """Stretches of windows in which a source's counts are clumped."""
    dispersion = _dispersion(counts)
    if not len(dispersion):
        return
    clumped = dispersion >= CLUMPED * max(1.0, float(np.median(dispersion)))
    clumped &= np.append(clumped[1:], False) | np.append([False], clumped[:-1])
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], clumped.view(np.int8), [0]])))
    usual = float(np.median(dispersion[~clumped])) if (~clumped).any() else 1.0
    for first, last in zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True):
        end = last * WINDOW_STEPS
        yield {
            "kind": "order",
            "source": source,
            "onset": int(steps[first * WINDOW_STEPS]),
            "end": int(steps[end - 1]) if end + WINDOW_STEPS <= len(steps) else None,
            "before": usual,
            "after": float(np.median(dispersion[first:last])),
            "z": None,
        }


def _dispersion(counts: Counts) -> NDArray[np.float64]:
    """Index of dispersion in consecutive windows, f64 [S // WINDOW_STEPS]; 1 by chance.

    Pearson's chi-square of the counts against the window's own share, over its degrees of freedom;
    1 where the share is too near to none or all.
    """
    n_windows = len(counts.total) // WINDOW_STEPS
    amount, total = (
        values[: n_windows * WINDOW_STEPS].reshape(n_windows, WINDOW_STEPS)
        for values in (counts.amount, counts.total)
    )
    share = amount.sum(axis=1) / np.maximum(total.sum(axis=1), 1e-12)
    is_told = (share >= _LEAST_EXPECTED) & (share <= 1.0 - _LEAST_EXPECTED)
    p = np.where(is_told, share, 0.5)[:, None]
    expected = np.maximum(total * p * (1.0 - p), 1e-12)
    squares = np.where(total > 0, (amount - total * p) ** 2 / expected, 0.0)
    free = np.maximum((total > 0).sum(axis=1) - 1, 1)
    return np.where(is_told, squares.sum(axis=1) / free, 1.0)


def sentences_of(drifts: pl.DataFrame) -> list[str]:
    """What ``schema.DRIFTS`` says, in order; changes of the mix at one place are one sentence."""
    sentences: list[str] = []
    groups: list[list[dict[str, Any]]] = []
    for row in drifts.iter_rows(named=True):
        mix = next((one for one in reversed(groups) if one[0]["kind"] == "mix"), None)
        if row["kind"] == "mix" and mix and row["onset"] - mix[0]["onset"] <= _SAME_STEPS:
            mix.append(row)
        else:
            groups.append([row])
    for group in groups:
        row = group[0]
        if row["kind"] == "mix":
            group.sort(key=lambda one: -one["z"])
            moved = ", ".join(
                f"{one['source']} from {one['before']:.0%} to {one['after']:.0%}" for one in group
            )
            sentences.append(f"At step {row['onset']} the mix changed: {moved}.")
        elif row["kind"] == "repeats":
            sentences.append(
                f"At step {row['onset']} what had been seen before in the run went from "
                f"{row['before']:.0%} to {row['after']:.0%} of the samples."
            )
        else:
            until = "" if row["end"] is None else f" to {row['end']}"
            factor = row["after"] / max(1.0, row["before"])
            sentences.append(
                f"From step {row['onset']}{until} {row['source']} came in clumps: its number in a "
                f"batch varied {factor:.0f} times as much as before, or as by chance."
            )
    return sentences
