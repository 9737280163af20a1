"""Grades of a recorded run: the monitor's own definition, applied to the recorded ratios."""

from __future__ import annotations

import math

import polars as pl

from auditor import schema
from auditor.measure.grading import Grader
from auditor.run import polars_schema


def graded_kind(signals: pl.DataFrame) -> str:
    """``probe`` where the run has a probe, else ``live``."""
    ranks = signals.filter(pl.col("signal") == "token_rank")
    return "probe" if (ranks["kind"] == "probe").any() else "live"


def grades_of(signals: pl.DataFrame) -> pl.DataFrame:
    """Grade every sampled step: ``schema.GRADES``. Of several ranks, the first is graded.

    Each attempt is graded on its own, as it was live.
    """
    kind = graded_kind(signals)
    ranks = signals.filter(
        (pl.col("signal") == "token_rank")
        & (pl.col("kind") == kind)
        & (pl.col("rank") == pl.col("rank").min())
    )
    rows = []
    for attempt in ranks["attempt"].unique().sort():
        grader = Grader()
        own = ranks.filter(pl.col("attempt") == attempt)
        for (step,), sample in own.sort("step").group_by("step", maintain_order=True):
            grade = grader.update(
                int(str(step)), _by_layer(sample, "raw"), _by_layer(sample, "column")
            )
            rows.append(
                {
                    "attempt": attempt,
                    "step": grade.step,
                    "kind": kind,
                    "layer": grade.layer,
                    "ratio": grade.ratio if math.isfinite(grade.ratio) else None,
                    "grade": grade.grade,
                    "alert": grade.alert,
                }
            )
    return pl.DataFrame(rows, schema=polars_schema(schema.GRADES), orient="row").sort(
        "step", "attempt"
    )


def _by_layer(sample: pl.DataFrame, variant: str) -> dict[int, float]:
    own = sample.filter(pl.col("variant") == variant)
    return {
        layer: math.nan if value is None else value
        for layer, value in zip(own["layer"], own["value"], strict=True)
    }
