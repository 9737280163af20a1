"""Who notices first that training goes wrong? The monitor and rules on the loss, on real trainings.

Small GPTs on real text, with a fault from a random step on, or none. *Harm* is where the held-out
loss is .3 nats above that of the run of the same seed without the fault; an alarm is in time from
the onset to the harm, and its lead is the steps between. Every detector reads the same records.
Thresholds are chosen on development seeds, for the same rate of false alarms, and scored once on
others. Finished trainings are kept in ``--runs`` and not repeated.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from detection_rules import LOSS_RULES, Detector, monitor, replay
from detection_scores import Caught, Rate, caught, false_alarms, harm_step, held_out_rise
from detection_trainings import (
    CLEAN,
    EVERY,
    FAULTS,
    NO_PRECURSOR,
    PAIRED,
    STEPS,
    Training,
    load,
    path_of,
    record,
)
from rich.console import Console
from rich.table import Table
from side_by_side import train

Key = tuple[str, int]
Runs = Mapping[Key, Training]
Alarms = dict[Key, list[int]]

RATES: Final = (10, 20)
"""Steps between samples at which the monitor is replayed as well."""
BUDGETS: Final = (5.0, 15.0, 30.0)
"""False alarms per 10,000 clean steps of the development seeds."""


class Plan:
    """Which trainings there are: kinds and seeds, for choosing thresholds and for scoring."""

    def __init__(self, quick: bool) -> None:
        self.steps = 300 if quick else STEPS
        self.faults = ["lr ramp"] if quick else list(FAULTS)
        self.clean = ["constant"] if quick else list(CLEAN)
        self.development = _keys(self.clean, range(1 if quick else 4))
        self.development_faulty = _keys(self.faults, range(0 if quick else 2))
        self.scored = _keys(self.clean, range(10, 11 if quick else 28))
        self.faulty = _keys(self.faults, range(10, 11 if quick else 15))

    @property
    def all(self) -> list[Key]:
        faulty = [*self.development_faulty, *self.faulty]
        paired = [(PAIRED[kind], seed) for kind, seed in faulty]
        return list(dict.fromkeys([*self.development, *paired, *faulty, *self.scored]))


def _keys(kinds: Iterable[str], seeds: Iterable[int]) -> list[Key]:
    kinds = list(kinds)
    return [(kind, seed) for seed in seeds for kind in kinds]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    folder = Path(tempfile.gettempdir()) / "auditor-detection"
    parser.add_argument("--runs", type=Path, default=folder, help=f"records (default {folder})")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default 1)")
    parser.add_argument("--quick", action="store_true", help="a smoke test of about a minute")
    arguments = parser.parse_args()
    plan = Plan(arguments.quick)
    begun = time.monotonic()
    calls = [(arguments.runs, *key, plan.steps, EVERY) for key in plan.all]
    train(record, calls, arguments.jobs)
    runs = {key: load(path_of(arguments.runs, *key, plan.steps, EVERY)) for key in plan.all}
    console = Console(width=140 if not sys.stdout.isatty() else None, highlight=False)
    _print(console, plan, runs)
    console.print(f"took {time.monotonic() - begun:.0f} s, trainings that were there not counted")
    return 0


# -- scoring -----------------------------------------------------------------------------------


class Scores:
    """One detector at one threshold: alarms of all runs, each computed once."""

    def __init__(self, plan: Plan, runs: Runs, detector: Detector, threshold: float) -> None:
        self.name, self.threshold = detector.name, threshold
        self._plan, self._runs = plan, runs
        self._detector = detector
        self._alarms: Alarms = {}

    def of(self, keys: Iterable[Key]) -> list[list[int]]:
        for key in keys:
            if key not in self._alarms:
                self._alarms[key] = self._detector.alarms(self._runs[key], self.threshold)
        return [self._alarms[key] for key in keys]

    def false_alarms(self, keys: Sequence[Key]) -> Rate:
        return false_alarms(self.of(keys), self._plan.steps)

    def caught(self, keys: Sequence[Key], harms: Mapping[Key, int | None]) -> Caught:
        self.of([*keys, *((PAIRED[kind], seed) for kind, seed in keys)])
        return caught([self._runs[key] for key in keys], harms, self._alarms, PAIRED)


def within(plan: Plan, runs: Runs, detector: Detector, budget: float) -> Scores:
    """The most sensitive threshold that keeps to the budget on the development seeds."""
    for threshold in detector.thresholds:
        scores = Scores(plan, runs, detector, threshold)
        if scores.false_alarms(plan.development).per_10k <= budget:
            return scores
    return scores


def _print(console: Console, plan: Plan, runs: Runs) -> None:
    harms = {
        key: harm_step(runs[key], runs[PAIRED[key[0]], key[1]])
        for key in [*plan.development_faulty, *plan.faulty]
    }
    _print_trainings(console, plan, runs, harms)
    ours = monitor(EVERY)
    as_is = Scores(plan, runs, ours, 1.0)
    own = as_is.false_alarms(plan.development).per_10k
    matched = [within(plan, runs, rule, own) for rule in LOSS_RULES]
    danger = Scores(plan, runs, monitor(EVERY, "monitor, danger only", levels=("danger",)), 1.0)
    title = f"At the monitor's own rate of false alarms on development seeds, {own:.1f} per 10,000"
    _print_classes(console, plan, harms, [as_is, danger, *matched], title)
    published = [
        Scores(plan, runs, rule, rule.published)
        for rule in LOSS_RULES
        if rule.published is not None
    ]
    parts = [
        Scores(plan, runs, detector, 1.0)
        for detector in (
            *(monitor(every, f"monitor, every {every}") for every in RATES),
            monitor(EVERY, "probe loss only", counts=lambda signal: signal == "probe_loss"),
            monitor(EVERY, "no probe loss", counts=lambda signal: signal != "probe_loss"),
        )
    ]
    title = "The monitor with fewer samples and in parts, and rules with thresholds as published"
    _print_classes(console, plan, harms, [*parts, *published], title)
    _print_budgets(console, plan, runs, harms)
    _print_signals(console, plan, runs, harms)
    worst = max(len({*alarms}) for alarms in danger.of(plan.scored))
    n_runs = sum(bool(alarms) for alarms in danger.of(plan.scored))
    console.print(
        f"danger alerts: in {n_runs} of {len(plan.scored)} clean runs, {worst} at most in one"
    )
    same = sum(sorted(replay(run, EVERY)) == sorted(run.alerts) for run in runs.values())
    console.print(f"alerts replayed from the record equal those raised live: {same} of {len(runs)}")


def _print_trainings(
    console: Console, plan: Plan, runs: Runs, harms: Mapping[Key, int | None]
) -> None:
    n_steps = len(plan.scored) * plan.steps
    n_scored = false_alarms([[] for _ in plan.scored], plan.steps).steps
    console.print(
        f"{len(runs)} trainings of {plan.steps} steps; clean and scored: {n_steps} steps, "
        f"{n_scored} of them after the warm-up of 100"
    )
    table = Table(title="Scored trainings")
    for name in ("kind", "what", "harmed", "harm, steps after onset", "held-out rise"):
        table.add_column(name)
    for kind in [*plan.clean, *plan.faults]:
        keys = [key for key in (*plan.scored, *plan.faulty) if key[0] == kind]
        rise = f"{max(held_out_rise(runs[key]) for key in keys):.2f}"
        found = [(runs[key].onset, harms.get(key)) for key in keys]
        after = [harm - onset for onset, harm in found if harm is not None]
        harmed = f"{len(after)}/{len(keys)}" if kind in FAULTS else "-"
        steps = f"{median(after):.0f} ({min(after)}..{max(after)})" if after else "-"
        what = {**CLEAN, **FAULTS}[kind]
        table.add_row(kind, what, harmed, steps, "-" if kind in FAULTS else rise)
    console.print(table)


def _print_classes(
    console: Console,
    plan: Plan,
    harms: Mapping[Key, int | None],
    scores: Sequence[Scores],
    title: str,
) -> None:
    """Of each class and detector, runs caught in time, and steps from alarm to harm."""
    table = Table(title=f"{title}\nin time, median lead (range); \\[n]: paired run alarmed as well")
    table.add_column("class")
    for one in scores:
        table.add_column(f"{one.name}\nat {one.threshold:.3g}")
    for kind in plan.faults:
        keys = [key for key in plan.faulty if key[0] == kind]
        found = [one.caught(keys, harms) for one in scores]
        name = f"{kind} *" if kind in NO_PRECURSOR else kind
        table.add_row(name, *map(_cell, found))
    table.add_section()
    for name, kinds in (
        ("all", plan.faults),
        ("with a precursor", [kind for kind in plan.faults if kind not in NO_PRECURSOR]),
    ):
        keys = [key for key in plan.faulty if key[0] in kinds]
        table.add_row(name, *(_cell(one.caught(keys, harms)) for one in scores))
    table.add_row("false alarms", *(str(one.false_alarms(plan.scored)) for one in scores))
    for kind in plan.clean:
        keys = [key for key in plan.scored if key[0] == kind]
        rates = [one.false_alarms(keys) for one in scores]
        table.add_row(f"  {kind}", *(f"{rate.n} in {len(keys)} runs" for rate in rates))
    console.print(table)
    console.print(
        "*: named beforehand as having no precursor. False alarms: per 10,000 clean steps"
    )


def _cell(found: Caught) -> str:
    chance = rf" \[{found.by_chance}]" if found.by_chance else ""
    return f"{found.recall}  {found.lead}{chance}" if found.leads else "no harm"


def _print_budgets(
    console: Console, plan: Plan, runs: Runs, harms: Mapping[Key, int | None]
) -> None:
    """All classes with a precursor together, against the false alarms allowed."""
    table = Table(
        title="Classes with a precursor, by the false alarms allowed on development seeds"
    )
    for name in ("detector", "allowed", "threshold", "false alarms", "in time", "median lead"):
        table.add_column(name)
    keys = [key for key in plan.faulty if key[0] not in NO_PRECURSOR]
    for detector in (monitor(EVERY), *LOSS_RULES):
        for budget in BUDGETS:
            one = within(plan, runs, detector, budget)
            found = one.caught(keys, harms)
            rate = str(one.false_alarms(plan.scored))
            table.add_row(
                one.name, f"{budget:.0f}", f"{one.threshold:.3g}", rate, found.recall, found.lead
            )
        table.add_section()
    console.print(table)


def _print_signals(
    console: Console, plan: Plan, runs: Runs, harms: Mapping[Key, int | None]
) -> None:
    """What the monitor's first alert was about, and when each signal raised one."""
    table = Table(title="Alerts of the monitor by signal: runs in which it was first, in time")
    signals = sorted({signal for run in runs.values() for _, _, signal in run.alerts})
    table.add_column("class")
    for signal in signals:
        table.add_column(signal)
    for kind in plan.faults:
        first, timely = collections.Counter[str](), collections.Counter[str]()
        for key in (key for key in plan.faulty if key[0] == kind and harms[key] is not None):
            run, harm = runs[key], harms[key]
            assert harm is not None
            since = [
                (step, signal)
                for step, level, signal in replay(run, EVERY)
                if level != "recovered" and step >= run.onset
            ]
            start = min((step for step, _ in since), default=None)
            first.update({signal for step, signal in since if step == start})
            timely.update({signal for step, signal in since if step <= harm})
        table.add_row(kind, *(f"{first[s]}, {timely[s]}" for s in signals))
    false = collections.Counter(
        signal
        for key in plan.scored
        for step, level, signal in replay(runs[key], EVERY)
        if level != "recovered" and step >= 100
    )
    table.add_section()
    table.add_row("false alerts, clean", *(str(false[s]) for s in signals))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
