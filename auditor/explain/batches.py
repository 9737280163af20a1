"""The batches around each event, step by step: what a person reads to see what happened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import polars as pl

from auditor import schema
from auditor.explain.attribution import features_of
from auditor.explain.composition import latest
from auditor.explain.explanation import Explanation
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
        first = sources.filter(pl.col("event") == event["event"]).head(1).to_dicts()
        name, feature = (first[0]["name"], first[0]["feature"]) if first else (None, None)
        counts = features.get((name or "", feature or ""))
        if counts is None:
            name = feature = None
        strongest = explanation.strongest.get(event["event"], [])
        exposure = (
            np.zeros(0)
            if counts is None
            else counts.amount / np.where(counts.total > 0, counts.total, np.nan)
        )
        parts.append(
            near.join(_column("exposure", places[: len(exposure)], exposure), on="step", how="left")
            .join(_column("place", strongest, range(1, len(strongest) + 1)), on="step", how="left")
            .with_columns(
                event=pl.lit(event["event"]),
                lag=pl.col("step") - onset,
                exposure=pl.col("exposure").fill_nan(None),
                suspect=pl.lit(name, pl.String),
                feature=pl.lit(feature, pl.String),
            )
            .select(list(columns))
            .cast(columns)
        )
    return pl.concat(parts)


def _column(name: str, steps: Sequence[int] | np.ndarray, values: Iterable[Any]) -> pl.DataFrame:
    """A column of ``schema.BATCHES`` by step."""
    kind = polars_schema(schema.BATCHES)[name]
    return pl.DataFrame({"step": steps, name: list(values)}, schema={"step": pl.Int64, name: kind})


def _per_step(explanation: Explanation) -> pl.DataFrame:
    """What was consumed at each step and what its signals were; of several attempts the latest."""
    scored = pl.col("n_scored").sum()
    consumed = (
        latest(explanation.composition)
        .group_by("step")
        .agg(
            pl.col("attempt").first(),
            pl.col("n_samples", "n_tokens").sum(),
            duplication=pl.when(scored > 0).then(pl.col("n_duplicate").sum() / scored),
            repetition=pl.when(scored > 0).then(
                (pl.col("repetition").fill_null(0.0) * pl.col("n_scored")).sum() / scored
            ),
            largest_source=pl.col("source").sort_by("n_samples", "source").last(),
            largest_share=pl.col("n_samples").max() / pl.col("n_samples").sum(),
        )
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
