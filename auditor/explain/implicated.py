"""Which samples a report implicates: those that make a blamed source stand out before an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import polars as pl

from auditor import schema
from auditor.explain.attribution import (
    LOOKBACK_STEPS,
    Exposures,
    blamed_sources,
    marked,
    trained_with_source,
)
from auditor.run import Run
from auditor.tables import polars_schema

SCHEMA: Final[Mapping[str, Any]] = {
    "sample_id": pl.String,
    "source": pl.String,
    "shard": pl.String,
    "row": pl.Int64,
    "events": pl.List(pl.Int32),
    "n_exposures": pl.Int64,
    "first_step": pl.Int64,
    "last_step": pl.Int64,
    "duplication": pl.Float64,
    "repetition": pl.Float64,
    "preview": pl.String,
}


def implicated_exposures(
    events: pl.DataFrame, suspects: pl.DataFrame, exposures: Exposures
) -> pl.LazyFrame:
    """Trained exposures of blamed sources that are what these are blamed for, around an event.

    From ``LOOKBACK_STEPS`` before the last healthy sample to the trough. Columns of
    ``schema.EXPOSURES_JOINED``, and ``event`` (i32): an exposure between two events is there twice.
    """
    parts = []
    for row in blamed_sources(suspects).iter_rows(named=True):
        event = events.filter(pl.col("event") == row["event"]).row(0, named=True)
        inside = exposures(event["onset_low"] - LOOKBACK_STEPS + 1, event["trough_step"])
        of_source = trained_with_source(inside).filter(
            (pl.col("source") == row["name"]) & marked(row)
        )
        parts.append(of_source.with_columns(event=pl.lit(row["event"], pl.Int32)))
    columns = pl.Schema({**polars_schema(schema.EXPOSURES_JOINED), "event": pl.Int32()})
    if not parts:
        return pl.LazyFrame(schema=columns)
    return pl.concat(parts).unique(
        ["attempt", "rank", "batch", "position", "part", "event"], maintain_order=True
    )


def implicated_samples(run: Run, events: pl.DataFrame, suspects: pl.DataFrame) -> pl.DataFrame:
    """A row for each implicated sample, columns of ``SCHEMA``, most exposures first.

    ``duplication`` and ``repetition`` are the highest of its implicated exposures; ``preview`` is
    null where the run has none.
    """
    samples = (
        implicated_exposures(events, suspects, run.exposures)
        .group_by("sample_id")
        .agg(
            pl.first("source", "shard", "row"),
            events=pl.col("event").unique().sort(),
            n_exposures=pl.struct("attempt", "rank", "batch", "position", "part").n_unique(),
            first_step=pl.min("step"),
            last_step=pl.max("step"),
            duplication=pl.max("duplication"),
            repetition=pl.max("repetition"),
        )
        .collect()
    )
    previews = (
        run.scan("samples")
        .filter(pl.col("sample_id").is_in(samples["sample_id"].implode()))
        .select("sample_id", "preview")
        .unique("sample_id", keep="first")
        .collect()
    )
    return (
        samples.join(previews, on="sample_id", how="left")
        .sort("n_exposures", "sample_id", descending=[True, False])
        .select(pl.col(name).cast(kind) for name, kind in SCHEMA.items())
    )
