"""Grades of a recorded run: the monitor's own definition, applied to the recorded ratios."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import polars as pl

from auditor import schema
from auditor.measure.grading import DEFAULT_POLICY, Alert, Policy
from auditor.measure.judging import JUDGED, STEP_SIGNALS, Judge, Judgement, StepJudge, graded_of
from auditor.run import Run
from auditor.tables import polars_schema


def graded_kind(signals: pl.DataFrame) -> str:
    """``probe`` or ``live``: what the first attempt of the first rank among these is graded on."""
    ranks = signals.filter(pl.col("signal") == "token_rank").select(
        "rank", "attempt", "step", "kind", "signal"
    )
    sample = ["rank", "attempt", "step"]
    first = ranks.select(sample).sort(sample).head(1)
    return graded_of(ranks.join(first, on=sample).to_dicts()) or "live"


def policy_of(run: Run) -> Policy:
    """The thresholds that the run was recorded with; the defaults where it does not say."""
    for attempt in reversed(run.attempts):
        settings = attempt.get("monitor", {}).get("policy")
        if settings:
            with contextlib.suppress(ValueError):  # of another version
                return Policy.of(settings)
    return DEFAULT_POLICY


def judgements_of(
    signals: pl.DataFrame, policy: Policy = DEFAULT_POLICY, rank: int | None = None
) -> Iterator[tuple[int, Judgement]]:
    """Every sampled step of a rank (None: the first) judged, with its attempt, in order.

    Each attempt is judged on its own, as it was live.
    """
    wanted = signals.filter(pl.col("signal").is_in(list(JUDGED)) & _of_rank(rank)).select(
        "attempt", "step", "kind", "layer", "variant", "signal", "value"
    )
    wanted = wanted.with_columns(pl.col("value").fill_null(math.nan))
    for (attempt,), own in wanted.sort("attempt", "step").group_by("attempt", maintain_order=True):
        judge = Judge(policy)
        for (step,), sample in own.group_by("step", maintain_order=True):
            judgement = judge.update(int(str(step)), sample.to_dicts())
            if judgement is not None:
                yield int(str(attempt)), judgement


def step_alerts_of(
    signals: pl.DataFrame, policy: Policy = DEFAULT_POLICY, rank: int | None = None
) -> Iterator[tuple[int, Alert]]:
    """Alerts of losses and gradient norms of a rank (None: the first), with their attempt."""
    of_steps = signals.filter(
        (pl.col("kind") == "step") & pl.col("signal").is_in(STEP_SIGNALS) & _of_rank(rank)
    ).with_columns(pl.col("value").fill_null(math.nan))
    for (attempt,), own in of_steps.sort("attempt").group_by("attempt", maintain_order=True):
        if own["value"].is_finite().all():
            continue
        judge = StepJudge(policy)
        wide = own.pivot("signal", index="step", values="value").sort("step")
        for row in wide.iter_rows(named=True):
            step, values = row.pop("step"), {n: v for n, v in row.items() if v is not None}
            for alert in judge.update(step, values):
                yield int(str(attempt)), alert
        for alert in judge.end():
            yield int(str(attempt)), alert


def alerts_of(
    judged: Iterable[tuple[int, Judgement]], of_steps: Iterable[tuple[int, Alert]]
) -> list[Alert]:
    """All alerts in order of attempts and steps; those of a sample before those of its step."""
    sampled = ((attempt, alert) for attempt, one in judged for alert in one.alerts)
    numbered = sorted([*sampled, *of_steps], key=lambda one: (one[0], one[1].step))
    return [alert for _, alert in numbered]


def _of_rank(rank: int | None) -> pl.Expr:
    return pl.col("rank") == (pl.col("rank").min() if rank is None else rank)


def grades_of(signals: pl.DataFrame, policy: Policy = DEFAULT_POLICY) -> pl.DataFrame:
    """Grades of all sampled steps: ``schema.GRADES``."""
    return grades_table(judgements_of(signals, policy))


def grades_table(judgements: Iterable[tuple[int, Judgement]]) -> pl.DataFrame:
    """Grades of judged steps: ``schema.GRADES``."""
    rows = [
        {
            "attempt": attempt,
            "step": judgement.grade.step,
            "kind": judgement.kind,
            "layer": judgement.grade.layer,
            "ratio": judgement.grade.ratio if math.isfinite(judgement.grade.ratio) else None,
            "grade": judgement.grade.grade,
            "alert": judgement.grade.alert,
        }
        for attempt, judgement in judgements
    ]
    return pl.DataFrame(rows, schema=polars_schema(schema.GRADES), orient="row").sort(
        "step", "attempt"
    )
