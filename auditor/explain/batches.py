"""The batches around each event, step by step: what a person reads to see what happened."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from auditor import schema
from auditor.explain.attribution import features_of
from auditor.explain.explanation import Explanation
from auditor.explain.stretches import strongest_steps
from auditor.tables import polars_schema

AROUND_STEPS: Final = 200


def batches_around(explanation: Explanation, n_steps: int = AROUND_STEPS) -> pl.DataFrame:
    """Steps up to ``n_steps`` before and after each event's onset: ``schema.BATCHES``.

    ``suspect`` and ``feature`` are the first in the event's table of suspects; null where none was
    tested.
    """
    columns = polars_schema(schema.BATCHES)
    steps = _per_step(explanation)
    places, features = features_of(explanation.composition)
    sources = explanation.suspects.filter(pl.col("level") == "source")
    parts = [pl.DataFrame(schema=columns)]
    for event in explanation.events.iter_rows(named=True):
        onset = event["onset_high"]
        near = steps.filter(pl.col("step").is_between(onset - n_steps, onset + n_steps))
        near = near.with_columns(
            event=pl.lit(event["event"], pl.Int32),
            lag=pl.col("step") - onset,
            suspect=pl.lit(None, pl.String),
            feature=pl.lit(None, pl.String),
            exposure=pl.lit(None, pl.Float64),
            place=pl.lit(None, pl.Int32),
        )
        first = sources.filter(pl.col("event") == event["event"]).head(1)
        for row in first.iter_rows(named=True):
            counts = features.get((row["name"], row["feature"]))
            if counts is None:
                continue
            rates = np.where(counts.total > 0, counts.rates, np.nan)
            strongest = strongest_steps(row, explanation.events, places, features)
            near = (
                near.drop("exposure", "place")
                .join(
                    pl.DataFrame({"step": places, "exposure": rates}).with_columns(
                        pl.col("exposure").fill_nan(None)
                    ),
                    on="step",
                    how="left",
                )
                .join(
                    pl.DataFrame(
                        {"step": strongest, "place": range(1, len(strongest) + 1)},
                        schema={"step": pl.Int64, "place": pl.Int32},
                    ),
                    on="step",
                    how="left",
                )
                .with_columns(suspect=pl.lit(row["name"]), feature=pl.lit(row["feature"]))
            )
        parts.append(near.select(list(columns)).cast(columns))
    return pl.concat(parts)


def _per_step(explanation: Explanation) -> pl.DataFrame:
    """What was consumed at each step and what its signals were; of several attempts the latest."""
    scored = pl.col("n_scored").sum()
    latest = explanation.composition.filter(
        pl.col("attempt") == pl.col("attempt").max().over("step")
    )
    consumed = latest.group_by("step").agg(
        pl.col("attempt").first(),
        pl.col("n_samples", "n_tokens").sum(),
        duplication=pl.when(scored > 0).then(pl.col("n_duplicate").sum() / scored),
        repetition=pl.when(scored > 0).then(
            (pl.col("repetition").fill_null(0.0) * pl.col("n_scored")).sum() / scored
        ),
        largest_source=pl.col("source").sort_by("n_samples", "source").last(),
        largest_share=pl.col("n_samples").max() / pl.col("n_samples").sum(),
    )
    signals = explanation.signals.filter(
        pl.col("signal").is_in(["loss", "grad_norm", "lr"])
        & (pl.col("rank") == pl.col("rank").min())
    )
    wide = {
        name: signals.filter(pl.col("signal") == name)
        .group_by("step")
        .agg(pl.col("value").sort_by("attempt").last().alias(name))
        for name in ("loss", "grad_norm", "lr")
    }
    grades = explanation.grades.group_by("step").agg(pl.col("grade").sort_by("attempt").last())
    # A run that was imported from a log has signals and no exposures.
    steps = pl.concat([consumed.select("step"), *(one.select("step") for one in wide.values())])
    told = steps.unique().sort("step")
    for frame in (consumed, *wide.values(), grades):
        told = told.join(frame, on="step", how="left")
    return told
