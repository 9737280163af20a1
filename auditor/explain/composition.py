"""What the model saw per step and source: the table that reports and the join read."""

from __future__ import annotations

from typing import Final

import polars as pl

from auditor import schema
from auditor.schema import DUPLICATE_SIMILARITY, UNKNOWN_SOURCE

REPETITIVE_SHARE: Final = 0.3
"""Share of a sample covered by repeated n-grams from which it counts as repetitive."""


def composition_of(exposures: pl.LazyFrame) -> pl.DataFrame:
    """Trained exposures summed per attempt, step and source, over ranks: ``schema.COMPOSITION``."""
    scored = pl.col("duplication").is_not_null()
    return (
        exposures.filter(pl.col("state") == "trained")
        .with_columns(pl.col("source").fill_null(UNKNOWN_SOURCE))
        .group_by("attempt", "step", "source")
        .agg(
            n_samples=pl.len().cast(pl.Int64),
            n_scored=scored.sum().cast(pl.Int64),
            n_duplicate=(pl.col("duplication") >= DUPLICATE_SIMILARITY).sum().cast(pl.Int64),
            n_repetitive=(pl.col("repetition") >= REPETITIVE_SHARE).sum().cast(pl.Int64),
            n_tokens=pl.col("n_tokens").sum().cast(pl.Int64),
            repetition=pl.col("repetition").cast(pl.Float64).mean(),
        )
        .sort("step", "attempt", "source")
        .select(list(schema.COMPOSITION))
        .collect()
    )
