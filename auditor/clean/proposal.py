"""What to change about the data, from what the report implicates; suggested, never applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from auditor.clean.mixes import cap_repetition
from auditor.schema import DUPLICATE_SIMILARITY, UNKNOWN_SOURCE


@dataclass(frozen=True)
class Proposal:
    """A change of the data, or none.

    ``deduplicate`` and the weights are proposed only where a source is blamed. Weights are shares
    of the samples and sum to one; ``projected_epochs`` is how often each distinct content would be
    seen in a run as long as this one.
    """

    summary: str
    deduplicate: bool
    weights_now: Mapping[str, float]
    weights: Mapping[str, float]
    epochs_now: Mapping[str, float]
    projected_epochs: Mapping[str, float]


NO_CHANGE = "No change proposed: no data cause was found."


def propose(suspects: pl.DataFrame, exposures: pl.LazyFrame) -> Proposal:
    """Propose deduplication and weights within the repetition budget where a source is blamed.

    Args:
        suspects: columns of ``schema.SUSPECTS``.
        exposures: columns of ``schema.EXPOSURES_JOINED``; distinct contents are those exposures
            that repeat nothing seen before, so unscored exposures count as distinct.
    """
    blamed = suspects.filter((pl.col("level") == "source") & (pl.col("verdict") == "blamed"))
    if blamed.is_empty():
        return Proposal(NO_CHANGE, False, {}, {}, {}, {})
    is_new = pl.col("dup_run").fill_null(0) == 0
    is_near = pl.col("duplication").fill_null(0) >= DUPLICATE_SIMILARITY
    seen = (
        exposures.filter(pl.col("state") == "trained")
        .with_columns(pl.col("source").fill_null(UNKNOWN_SOURCE))
        .group_by("source")
        .agg(
            pl.len().alias("n"),
            (is_new & ~is_near).sum().alias("n_distinct"),
        )
        .sort("source")
        .collect()
    )
    n = int(seen["n"].sum())
    distinct = dict(zip(seen["source"], seen["n_distinct"], strict=True))
    now = {row["source"]: row["n"] / n for row in seen.iter_rows(named=True)}
    mix = cap_repetition(now, distinct, n)
    names = ", ".join(dict.fromkeys(blamed["name"]))
    summary = f"Deduplicate, starting with {names}, and keep every source within 4 epochs."
    if not mix.feasible:
        summary += " All sources together hold too few distinct samples for that: add data."
    return Proposal(
        summary,
        True,
        now,
        mix.weights,
        {name: now[name] * n / max(1, distinct[name]) for name in now},
        mix.projected_epochs,
    )
