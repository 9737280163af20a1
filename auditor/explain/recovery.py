"""The recovery plan of a recorded run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import polars as pl

from auditor.explain.checkpoints import Course, Scored, onset_by_events, score
from auditor.explain.grades import policy_of
from auditor.measure.grading import Policy
from auditor.measure.recovery import (
    Drop,
    RecoveryPlan,
    Verification,
    find_drop,
    plan,
    verify,
)
from auditor.run import Run


@dataclass(frozen=True)
class Recovery:
    """A plan, and the checkpoints it chose from.

    ``verification`` is of the last attempt where that went back behind a drop of the one before it,
    at ``resumed_step``; both are None elsewhere.
    """

    run_id: str
    plan: RecoveryPlan
    scored: Scored
    resumed_step: int | None
    verification: Verification | None


def recovery_of(run: Run, pattern: str | None = None) -> Recovery:
    """Plan the recovery of a run, from the grades as they are computed again.

    Raises:
        RunError: nothing matches the pattern of checkpoints.
        ValueError: the pattern holds ``{step}`` more than once.
    """
    scored, policy = score(run, pattern), policy_of(run)
    onset, collapsed = None, scored.heads_fell
    drop = find_drop(scored.grades, policy)
    if drop is not None:
        onset = onset_by_events(scored.events, drop.onset_low, drop.onset_high)
        collapsed |= "entropy_fall" in scored.events["kind"]
    signals = run.scan("signals", view="all").collect()
    resumed = _resumed_behind_a_drop(signals, policy)
    found = plan(
        scored.grades,
        scored.candidates,
        learning_rates=_learning_rates(run),
        entropy_collapsed=collapsed,
        onset=onset,
        policy=policy,
    )
    if drop is not None:
        found = replace(found, summary=f"{found.summary} {_onset_told(drop, onset)}")
    return Recovery(
        run_id=run.run_id,
        plan=found,
        scored=scored,
        resumed_step=resumed,
        verification=None if resumed is None else verify(scored.grades, resumed, policy),
    )


def _onset_told(drop: Drop, onset: tuple[int, int] | None) -> str:
    """By what the onset was told, which the monitor's own plan cannot always know."""
    if onset in (None, (drop.onset_low, drop.onset_high)):
        return "The onset is that of the grade: no other signal of the model fell before it."
    return (
        "The onset is that of a signal that fell before the grade, see auditor report; by the "
        "grade alone, as monitor.recovery_plan() has it, it lies after step "
        f"{drop.onset_low}, by step {drop.onset_high}."
    )


def _learning_rates(run: Run) -> dict[int, float]:
    rates = run.scan("signals").filter(pl.col("signal") == "lr").collect()
    return {
        step: value
        for step, value in zip(rates["step"], rates["value"], strict=True)
        if value is not None and math.isfinite(value)
    }


def _resumed_behind_a_drop(signals: pl.DataFrame, policy: Policy) -> int | None:
    """The first step of the last attempt, where the one before it had dropped and was left."""
    attempts = signals["attempt"].unique().sort().to_list()
    if len(attempts) < 2:
        return None
    drop = find_drop(Course(signals, attempts[-2], policy).grades, policy)
    first_step = signals.filter(pl.col("attempt") == attempts[-1])["step"].min()
    assert isinstance(first_step, int)
    return first_step if drop is not None and first_step <= drop.trough.step else None
