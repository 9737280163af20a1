"""The recovery plan of a recorded run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import polars as pl

from auditor.explain.checkpoints import Course, Scored, onset_by_events, score
from auditor.measure.recovery import (
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
    scored = score(run, pattern)
    onset, collapsed = None, False
    drop = find_drop(scored.grades)
    if drop is not None:
        onset = onset_by_events(scored.events, drop.onset_low, drop.onset_high)
        # Of all heads and blocks together; a fall that was over before this drop is another matter.
        lasting = pl.col("recovery_step").is_null() | (pl.col("recovery_step") > drop.onset_low)
        collapsed = not scored.events.filter(
            (pl.col("kind") == "entropy_fall") & lasting
        ).is_empty()
    signals = run.scan("signals", view="all").collect()
    resumed = _resumed_behind_a_drop(signals)
    return Recovery(
        run_id=run.run_id,
        plan=plan(
            scored.grades,
            scored.candidates,
            learning_rates=_learning_rates(run),
            entropy_collapsed=collapsed,
            onset=onset,
        ),
        scored=scored,
        resumed_step=resumed,
        verification=None if resumed is None else verify(scored.grades, resumed),
    )


def _learning_rates(run: Run) -> dict[int, float]:
    rates = run.scan("signals").filter(pl.col("signal") == "lr").collect()
    return {
        step: value
        for step, value in zip(rates["step"], rates["value"], strict=True)
        if value is not None and math.isfinite(value)
    }


def _resumed_behind_a_drop(signals: pl.DataFrame) -> int | None:
    """The first step of the last attempt, where the one before it had dropped and was left."""
    attempts = signals["attempt"].unique().sort().to_list()
    if len(attempts) < 2:
        return None
    drop = find_drop(Course(signals, attempts[-2]).grades)
    first_step = signals.filter(pl.col("attempt") == attempts[-1])["step"].min()
    assert isinstance(first_step, int)
    return first_step if drop is not None and first_step <= drop.trough.step else None
