"""Scores of ``detection.py``: harm by the paired run, false alarms, recall and lead time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from detection_trainings import STEPS, Training
from scipy import stats

HARM_NATS: Final = 0.3
SCORED_FROM: Final = 100
"""Alarms of the first steps are not counted: the monitor's warm-up, and the loss rules' windows."""
SAME_ALARM_STEPS: Final = 100


def harm_step(faulty: Training, paired: Training) -> int | None:
    """First step at which the faulty run's held-out loss is .3 nats above the paired run's."""
    for step, loss in faulty.held_out.items():
        if step >= faulty.onset and not loss - paired.held_out[step] < HARM_NATS:  # NaN is harm
            return step
    return None


def held_out_rise(training: Training) -> float:
    """Nats by which the held-out loss rose above its lowest so far, at most."""
    lowest, rise = math.inf, 0.0
    for loss in training.held_out.values():
        lowest = min(lowest, loss)
        rise = max(rise, loss - lowest)
    return rise


def n_alarms(alarms: Sequence[int]) -> int:
    """Alarms from step 100 on; one within 100 steps of the one before is the same."""
    counted = sorted(step for step in set(alarms) if step >= SCORED_FROM)
    return sum(n == 0 or step - counted[n - 1] > SAME_ALARM_STEPS for n, step in enumerate(counted))


@dataclass(frozen=True)
class Rate:
    """False alarms in so many clean steps."""

    n: int
    steps: int

    @property
    def per_10k(self) -> float:
        return 1e4 * self.n / self.steps if self.steps else math.nan

    def __str__(self) -> str:
        """With the exact 95% interval of a Poisson count."""
        low = stats.chi2.ppf(0.025, 2 * self.n) / 2 if self.n else 0.0
        high = stats.chi2.ppf(0.975, 2 * self.n + 2) / 2
        scale = 1e4 / self.steps
        return f"{self.per_10k:.1f} ({low * scale:.1f}-{high * scale:.1f})"


def false_alarms(alarms: Sequence[Sequence[int]], steps: int = STEPS) -> Rate:
    """``alarms``: of each clean run."""
    return Rate(sum(map(n_alarms, alarms)), len(alarms) * (steps - SCORED_FROM))


@dataclass(frozen=True)
class Caught:
    """How a detector did on the runs of one class that were harmed.

    ``leads``: steps from the first alarm since the onset to the harm, of each run; negative where
    the alarm came after, None without one. ``by_chance``: runs whose paired run alarmed, too,
    between onset and harm.
    """

    leads: tuple[int | None, ...]
    by_chance: int

    @property
    def in_time(self) -> list[int]:
        return [lead for lead in self.leads if lead is not None and lead >= 0]

    @property
    def recall(self) -> str:
        return f"{len(self.in_time)}/{len(self.leads)}"

    @property
    def lead(self) -> str:
        """Median and range over all runs with an alarm, late ones included."""
        known = [lead for lead in self.leads if lead is not None]
        return f"{median(known):.0f} ({min(known)}..{max(known)})" if known else "-"


def caught(
    faulty: Sequence[Training],
    harms: Mapping[tuple[str, int], int | None],
    alarms: Mapping[tuple[str, int], Sequence[int]],
    paired: Mapping[str, str],
) -> Caught:
    """``harms`` and ``alarms`` by kind and seed; runs without harm are left out."""
    leads, by_chance = [], 0
    for run in faulty:
        harm = harms[run.kind, run.seed]
        if harm is None:
            continue
        first = min((a for a in alarms[run.kind, run.seed] if a >= run.onset), default=None)
        leads.append(None if first is None else harm - first)
        by_chance += any(run.onset <= a <= harm for a in alarms[paired[run.kind], run.seed])
    return Caught(tuple(leads), by_chance)
