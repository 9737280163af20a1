"""The composition of exposures by grouping their rows: what summing ledgers must come to."""

from __future__ import annotations

import polars as pl

from auditor import schema
from auditor.explain.composition import REPETITIVE_SHARE
from auditor.schema import DUPLICATE_SIMILARITY, SIMILAR, UNKNOWN_SOURCE


def composition_of_rows(exposures: pl.LazyFrame) -> pl.DataFrame:
    """``schema.COMPOSITION`` of a table with the columns of ``schema.EXPOSURES_JOINED``."""
    near = pl.col("duplication") >= DUPLICATE_SIMILARITY
    return (
        exposures.filter(pl.col("state") == "trained")
        .with_columns(pl.col("source").fill_null(UNKNOWN_SOURCE))
        .group_by("attempt", "step", "source")
        .agg(
            n_samples=pl.len().cast(pl.Int64),
            n_scored=pl.col("duplication").is_not_null().sum().cast(pl.Int64),
            n_duplicate=near.sum().cast(pl.Int64),
            n_similar=((pl.col("duplication") >= SIMILAR) & ~near).sum().cast(pl.Int64),
            n_repetitive=(pl.col("repetition") >= REPETITIVE_SHARE).sum().cast(pl.Int64),
            n_distinct=((pl.col("dup_run").fill_null(0) == 0) & ~near.fill_null(False))
            .sum()
            .cast(pl.Int64),
            n_tokens=pl.col("n_tokens").sum().cast(pl.Int64),
            n_losses=pl.col("loss").is_finite().sum().cast(pl.Int64),
            repetition=pl.col("repetition").cast(pl.Float64).mean(),
            loss=pl.col("loss").cast(pl.Float64).filter(pl.col("loss").is_finite()).mean(),
        )
        .sort("step", "attempt", "source")
        .select(list(schema.COMPOSITION))
        .collect()
    )
