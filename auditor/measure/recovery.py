"""What to do after a drop, with numbers: a plan out of grades, checkpoints and learning rates.

The rules are those of the alerts in `docs/grades.md`; `docs/recovery.md` tells them in words. A
plan is a proposal: nothing here does anything.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from auditor.measure.grading import DEFAULT_POLICY, Grade, Policy

ROLLBACK_GRADE: Final = 4
"""The lowest grade of a checkpoint to go back to."""

VERIFIED_GRADE: Final = 5
VERIFY_STEPS: Final = 1000
"""After a recovery the grade must be back here within so many steps."""

OBSERVE_STEPS: Final = 500
"""How long a watched run trains at half its learning rate before it is judged again."""

WATCH_FACTOR: Final = 0.5
DANGER_FACTOR: Final = 0.5
LOWEST_FACTOR: Final = 0.3
SEVERE_FACTOR: Final = 1 / 3
"""Of the usual learning rate: watched; in danger, a cut of 50% to 70%; in danger at S1 or S0, or
with values that are not finite, a third at once."""

SEVERE_GRADE: Final = 1

LOOKBACK_STEPS: Final = 40
"""Steps before the onset whose batches are suspected with those up to the trough."""

REWARM_STEPS: Final = 100
"""Length of the warm-up that replaces the optimizer's reset moments."""

RATE_GAP_STEPS: Final = 10
RATE_STEPS: Final = 50
RATE_JUMP: Final = 2.0
"""The usual learning rate is the median of ``RATE_STEPS`` steps that end ``RATE_GAP_STEPS`` before
the onset; ``RATE_JUMP`` times as much at the onset is named."""

_DANGER: Final = frozenset({"danger", "undefined"})
_BAD: Final = _DANGER | {"watch, stable", "watch, falling"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: where, of which step; training loss, grade and attempt where they are known."""

    path: str
    step: int
    loss: float | None = None
    grade: int | None = None
    attempt: int | None = None


@dataclass(frozen=True)
class Drop:
    """A fall of the grade. The onset lies in (onset_low, onset_high].

    ``before`` and ``trough``: the graded samples before the onset and at the lowest ratio; the
    trough's grade is None where no ratio was defined. ``level``: watch or danger. ``recovery_step``
    is None where it has not recovered.
    """

    onset_low: int
    onset_high: int
    before: Grade | None
    trough: Grade
    level: str
    recovery_step: int | None

    @property
    def severe(self) -> bool:
        """In danger at S1 or S0, or nothing was finite."""
        grade = self.trough.grade
        return self.level == "danger" and (grade is None or grade <= SEVERE_GRADE)


@dataclass(frozen=True)
class Step:
    """One thing to do, and with which numbers and why."""

    title: str
    detail: str


@dataclass(frozen=True)
class RecoveryPlan:
    """A plan to recover from a drop.

    ``state``: none (no drop), recovered (by itself: the plan is what to do if it returns), watch
    (lower the learning rate and observe) or danger (roll back). ``checkpoint_is_good`` tells
    whether ``checkpoint`` is of S4 or better and from before the onset; else it is only the best
    there is. ``skip_steps``: first and last step whose batches to leave out. Learning rates are
    None where none was recorded; ``learning_rate`` is what to begin with, ``lowest_learning_rate``
    how far to go if that is not enough.
    """

    state: str
    summary: str
    drop: Drop | None = None
    checkpoint: Checkpoint | None = None
    checkpoint_is_good: bool = False
    usual_learning_rate: float | None = None
    learning_rate_factor: float = 1.0
    learning_rate: float | None = None
    lowest_learning_rate: float | None = None
    reset_optimizer: bool = False
    skip_steps: tuple[int, int] | None = None
    verify_steps: int = 0
    qk_norm: bool = False
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        """The plan in words, its steps numbered."""
        steps = [f"{i}. {step.title}\n   {step.detail}" for i, step in enumerate(self.steps, 1)]
        return "\n".join([self.summary, *steps])


@dataclass(frozen=True)
class Verification:
    """How a run does after a recovery: running, passed or failed, and why in words."""

    state: str
    n_steps: int
    reason: str


def plan(
    grades: Sequence[Grade],
    checkpoints: Sequence[Checkpoint] = (),
    *,
    learning_rates: Mapping[int, float] | None = None,
    entropy_collapsed: bool = False,
    onset: tuple[int, int] | None = None,
    lookback: int = LOOKBACK_STEPS,
    policy: Policy = DEFAULT_POLICY,
) -> RecoveryPlan:
    """Plan the recovery from the latest drop that has not recovered, else from the latest.

    Args:
        grades: of one course of training, by step; without what a later attempt rolled back.
        checkpoints: in any order. One without a grade has that of the sample at or before it.
        learning_rates: by step, as the schedule had them.
        entropy_collapsed: the attention entropy of all heads fell together.
        onset: (last healthy, first bad) step where other signals tell it more exactly.
        lookback: steps before the onset whose batches are suspected.
        policy: thresholds of the alerts.
    """
    drop = find_drop(grades, policy)
    if drop is None:
        return RecoveryPlan("none", _no_drop(grades))
    if onset is not None:
        low, high = onset
        drop = Drop(low, high, drop.before, drop.trough, drop.level, drop.recovery_step)
    danger = drop.level == "danger"
    factor = (SEVERE_FACTOR if drop.severe else DANGER_FACTOR) if danger else WATCH_FACTOR
    lowest = LOWEST_FACTOR if danger else WATCH_FACTOR
    usual, jump = _usual_rate(learning_rates or {}, drop)
    checkpoint, is_good = choose_checkpoint(checkpoints, grades, drop.onset_low)
    first_step = grades[0].step
    skip = (max(min(first_step, drop.onset_low), drop.onset_low - lookback), drop.trough.step)
    state = "recovered" if drop.recovery_step is not None else drop.level
    course = _course(drop, grades[-1].step)
    steps: list[Step] = []
    if state == "recovered":
        steps.append(
            Step(
                "Nothing has to be rolled back",
                f"The grade came back by itself by step {drop.recovery_step}. If it falls again, "
                "do what follows.",
            )
        )
    if danger:
        steps += [
            Step("Pause", f"Stop training before it goes on from a damaged model. {course}"),
            _roll_back(checkpoint, is_good, grades, checkpoints, drop, skip),
            _cut(drop, factor, usual, jump),
            Step(
                "Reset the optimizer",
                "Take the weights from the checkpoint and not the optimizer's state: its moments "
                f"were made on the way here. Warm up over {REWARM_STEPS} steps, since fresh "
                "moments make large first updates.",
            ),
            _skip(skip, drop, checkpoint if is_good else None),
        ]
    else:
        steps += [
            _cut(drop, factor, usual, jump),
            Step(
                "Observe",
                f"{course} Train {OBSERVE_STEPS} steps so, sampled at least every 50 steps, and "
                "save a checkpoint before. If the grade falls to S2 or lower, or by two grades "
                "within 100 steps, roll back. Whether data caused it is for auditor report to say: "
                "poor data is not mended by a lower learning rate.",
            ),
            _fallback(checkpoint, is_good, grades),
        ]
    if entropy_collapsed:
        steps.append(
            Step(
                "Normalise queries and keys",
                "The attention entropy of all heads fell together. "
                "auditor.record.qk_norm.QKNorm bounds the attention logits; put it in before "
                "training goes on.",
            )
        )
    if danger:
        steps.append(
            Step(
                f"Verify for {VERIFY_STEPS:,} steps",
                f"Sample at least every 50 steps. It worked if the grade is S{VERIFIED_GRADE} or "
                f"better at the end of them and never fell to S{policy.danger_grade}. The first "
                f"{policy.warmup_steps} steps and {policy.warmup_samples} samples of a new attempt "
                "are its warm-up and are not judged. If it failed, go back further and cut to the "
                "lowest learning rate.",
            )
        )
    return RecoveryPlan(
        state=state,
        summary=_summary(state, course),
        drop=drop,
        checkpoint=checkpoint,
        checkpoint_is_good=is_good,
        usual_learning_rate=usual,
        learning_rate_factor=factor,
        learning_rate=None if usual is None else usual * factor,
        lowest_learning_rate=None if usual is None else usual * lowest,
        reset_optimizer=danger,
        skip_steps=skip if danger else None,
        verify_steps=VERIFY_STEPS if danger else OBSERVE_STEPS,
        qk_norm=entropy_collapsed,
        steps=tuple(steps),
    )


def find_drop(grades: Sequence[Grade], policy: Policy = DEFAULT_POLICY) -> Drop | None:
    """The latest drop that has not recovered, else the latest; None where there is none.

    A drop is ``confirm_samples`` watched or endangered samples, or one whose ratio is undefined,
    after the warm-up; it is over after ``recover_samples`` good ones in a row. A grade that has
    been low ever since the warm-up has not dropped.
    """
    judged = [one for one in grades if one.alert != "warming"]
    found = [
        _drop(judged, first, last, policy)
        for first, last in _stretches(judged, policy)
        if _is_confirmed(judged[first : last + 1], policy)
    ]
    drops = [one for one in found if one is not None]
    lasting = [one for one in drops if one.recovery_step is None]
    chosen = lasting or drops
    return chosen[-1] if chosen else None


def grade_at(grades: Sequence[Grade], step: int) -> Grade | None:
    """The sample at the step or the nearest before it; None before the first."""
    place = bisect_right(grades, step, key=lambda one: one.step)
    return grades[place - 1] if place else None


def choose_checkpoint(
    checkpoints: Sequence[Checkpoint], grades: Sequence[Grade], onset_low: int | None
) -> tuple[Checkpoint | None, bool]:
    """The last checkpoint at S4 or better and from before ``onset_low``, and True.

    A sample shows the model before the update of its step, a checkpoint most often after it: one
    of ``onset_low`` itself may hold the first update that harmed.

    Where there is none, the best there is and False: rather from before the onset, of a higher
    grade, the latest. ``onset_low`` is None where nothing happened: any checkpoint is from before.
    """
    known = [(one, _grade_of(one, grades)) for one in checkpoints]
    before = [(one, grade) for one, grade in known if onset_low is None or one.step < onset_low]
    good = [one for one, grade in before if grade is not None and grade >= ROLLBACK_GRADE]
    if good:
        return max(good, key=lambda one: one.step), True
    if before:
        best = max(before, key=lambda pair: (-1 if pair[1] is None else pair[1], pair[0].step))
        return best[0], False
    # After the onset, the less of it was trained the better.
    best_after = max(
        known,
        key=lambda pair: (-1 if pair[1] is None else pair[1], -pair[0].step),
        default=None,
    )
    return (None if best_after is None else best_after[0]), False


def verify(grades: Sequence[Grade], since: int, policy: Policy = DEFAULT_POLICY) -> Verification:
    """Whether a recovery that resumed at step ``since`` worked, by the grades recorded so far."""
    judged = [one for one in grades if one.step >= since and one.alert != "warming"]
    steps = [one.step for one in grades if one.step >= since]
    n_steps = steps[-1] - since if steps else 0
    for one in judged:
        if one.alert in _DANGER:
            return Verification("failed", n_steps, f"step {one.step}: {_told(one)}, {one.alert}")
    if n_steps < VERIFY_STEPS:
        so_far = f"lowest {_told(min(judged, key=_severity))}" if judged else "none judged yet"
        return Verification("running", n_steps, f"{n_steps:,} of {VERIFY_STEPS:,} steps; {so_far}")
    end = [one for one in judged if one.step <= since + VERIFY_STEPS][-policy.recover_samples :]
    if not end:
        return Verification("running", n_steps, "none of its samples is past the warm-up")
    lowest = min(end, key=_severity)
    passed = lowest.grade is not None and lowest.grade >= VERIFIED_GRADE
    return Verification(
        "passed" if passed else "failed",
        n_steps,
        f"{_told(lowest)} at step {lowest.step}, the lowest of the last {len(end)} samples",
    )


# -- drops -----------------------------------------------------------------------------------


def _stretches(judged: Sequence[Grade], policy: Policy) -> Iterator[tuple[int, int]]:
    """First and last bad sample of each stretch, which ``recover_samples`` good ones end."""
    bad = [place for place, one in enumerate(judged) if one.alert in _BAD]
    first = last = -1
    for place in bad:
        if first < 0:
            first = place
        elif place - last > policy.recover_samples:
            yield first, last
            first = place
        last = place
    if first >= 0:
        yield first, last


def _is_confirmed(stretch: Sequence[Grade], policy: Policy) -> bool:
    n_bad = sum(one.alert in _BAD for one in stretch)
    return n_bad >= policy.confirm_samples or any(one.grade is None for one in stretch)


def _drop(judged: Sequence[Grade], first: int, last: int, policy: Policy) -> Drop | None:
    """The fall in a stretch of bad samples; None where it only never rose, as after a warm-up."""
    stretch = judged[first : last + 1]
    level = "danger" if any(one.alert in _DANGER for one in stretch) else "watch"
    called = _DANGER if level == "danger" else _BAD
    start, best = first, math.nan
    for place in range(first, last + 1):
        recent = _recent_best(judged, place, policy)
        fell = recent - judged[place].ratio >= policy.quick_fall or judged[place].grade is None
        if judged[place].alert in called and fell:
            start, best = place, recent
            break
    else:
        if not any(one.alert == "healthy" for one in judged[:first]):
            return None
        best = _recent_best(judged, first, policy)
    trough = min(judged[start : last + 1], key=_severity)
    # The first sample of the way down: past a quarter of the fall, and staying there.
    onset = start
    if math.isfinite(best) and math.isfinite(trough.ratio):
        line = best + 0.25 * (trough.ratio - best)
        while onset > 0 and judged[onset - 1].ratio <= line:
            onset -= 1
    before = judged[onset - 1] if onset else None
    after = judged[last + 1 :]
    return Drop(
        onset_low=before.step if before else judged[0].step - 1,
        onset_high=judged[onset].step,
        before=before,
        trough=trough,
        level=level,
        recovery_step=after[0].step if len(after) >= policy.recover_samples else None,
    )


def _recent_best(judged: Sequence[Grade], place: int, policy: Policy) -> float:
    """The best ratio of the ``quick_steps`` before a sample, or of the samples it takes for ten."""
    low = bisect_left(judged, judged[place].step - policy.quick_steps, key=lambda one: one.step)
    past = judged[max(0, min(low, place - policy.warmup_samples)) : place]
    return max((one.ratio for one in past if math.isfinite(one.ratio)), default=math.nan)


def _severity(one: Grade) -> float:
    return one.ratio if math.isfinite(one.ratio) else -math.inf


def _grade_of(checkpoint: Checkpoint, grades: Sequence[Grade]) -> int | None:
    if checkpoint.grade is not None:
        return checkpoint.grade
    sample = grade_at(grades, checkpoint.step)
    return None if sample is None else sample.grade


def _usual_rate(rates: Mapping[int, float], drop: Drop) -> tuple[float | None, float]:
    """The learning rate before the onset, and how many times that it was at the onset."""
    known = {step: rate for step, rate in rates.items() if math.isfinite(rate) and rate > 0}
    end = drop.onset_low - RATE_GAP_STEPS
    usual = [rate for step, rate in known.items() if end - RATE_STEPS <= step <= end]
    if not usual:
        earlier = [step for step in known if step <= drop.onset_low]
        if not earlier:
            return None, 1.0
        usual = [known[max(earlier)]]
    around = [rate for step, rate in known.items() if end < step <= drop.onset_high]
    return median(usual), max(around, default=median(usual)) / median(usual)


# -- words -----------------------------------------------------------------------------------


def _no_drop(grades: Sequence[Grade]) -> str:
    judged = [one for one in grades if one.alert != "warming"]
    if not judged:
        n = len(grades)
        return (
            f"Not judged: {n} sampled {'step' if n == 1 else 'steps'}, all in the warm-up. "
            "There may be something to recover from; it cannot be told yet."
        )
    last = judged[-1]
    now = f"Step {last.step}: {_told(last)}."
    if last.alert in _BAD:
        return (
            f"No drop found: the grade is low and was never better since the warm-up. {now} There "
            "is no better time to go back to."
        )
    return f"No drop found: nothing to recover from. {now}"


def _summary(state: str, course: str) -> str:
    head = {
        "recovered": "A drop that recovered by itself.",
        "watch": "The run is to be watched: lower the learning rate and observe.",
        "danger": "The run is in danger: roll back.",
    }[state]
    return f"{head} {course}"


def _course(drop: Drop, last_step: int) -> str:
    start = f"from {_told(drop.before)} " if drop.before is not None else ""
    where = "" if drop.trough.layer is None else f" in block {drop.trough.layer}"
    end = (
        f"it recovered by step {drop.recovery_step}"
        if drop.recovery_step is not None
        else f"it has not recovered by step {last_step}"
    )
    return (
        f"The grade fell {start}after step {drop.onset_low}, by step {drop.onset_high}; its lowest "
        f"was {_told(drop.trough)}{where} at step {drop.trough.step}; {end}."
    )


def _roll_back(
    checkpoint: Checkpoint | None,
    is_good: bool,
    grades: Sequence[Grade],
    checkpoints: Sequence[Checkpoint],
    drop: Drop,
    skip: tuple[int, int],
) -> Step:
    if checkpoint is None:
        return Step(
            "Roll back: no checkpoint is known",
            f"What is needed is the last checkpoint at S{ROLLBACK_GRADE} or better before step "
            f"{drop.onset_low}. Name yours with --checkpoints, or register them with "
            "monitor.checkpoint(path, step).",
        )
    grade = _name(_grade_of(checkpoint, grades))
    if is_good:
        inside = (
            f" The batches of steps {skip[0]} to {checkpoint.step}, of those suspected, are in it; "
            "if the grade falls again, take the one before."
            if checkpoint.step > skip[0]
            else ""
        )
        return Step(
            f"Roll back to {checkpoint.path}",
            f"Step {checkpoint.step}, {grade}: the last of {len(checkpoints)} checkpoints at "
            f"S{ROLLBACK_GRADE} or better and before the onset.{inside}",
        )
    side = "before" if checkpoint.step < drop.onset_low else "after"
    return Step(
        "Roll back: no good checkpoint",
        f"None of {len(checkpoints)} checkpoints is both at S{ROLLBACK_GRADE} or better and from "
        f"before step {drop.onset_low}. The best there is: {checkpoint.path}, step "
        f"{checkpoint.step}, {grade}, {side} the onset. Training again from an earlier point may "
        "be the better way.",
    )


def _fallback(checkpoint: Checkpoint | None, is_good: bool, grades: Sequence[Grade]) -> Step:
    if checkpoint is None:
        return Step(
            "Save a checkpoint", "None is known to go back to. Register it with monitor.checkpoint."
        )
    told = f"{checkpoint.path}, step {checkpoint.step}, {_name(_grade_of(checkpoint, grades))}"
    if is_good:
        return Step("Keep a checkpoint from before the onset", f"Do not delete {told}.")
    return Step(
        "Save a checkpoint",
        f"None is at S{ROLLBACK_GRADE} or better and from before the onset; the best there is: "
        f"{told}.",
    )


def _cut(drop: Drop, factor: float, usual: float | None, jump: float) -> Step:
    if drop.severe:
        share = "to a third"
    elif drop.level == "danger":
        share = f"by 50% to {1 - LOWEST_FACTOR:.0%}"
    else:
        share = "by half"
    if usual is None:
        return Step(
            f"Cut the learning rate {share}",
            "No learning rate was recorded before the onset: pass optimizer= to monitor.step. "
            f"Multiply the schedule's own by {factor:.3g}.",
        )
    further = (
        f", down to {usual * LOWEST_FACTOR:.3g} if that is not enough"
        if drop.level == "danger"
        else ""
    )
    jumped = (
        f" It rose {jump:.3g} times at the onset: remove that first, whatever else is done."
        if jump >= RATE_JUMP
        else ""
    )
    return Step(
        f"Cut the learning rate {share}",
        f"It was {usual:.3g} before the onset: set the schedule to {usual * factor:.3g}"
        f"{further}.{jumped}",
    )


def _skip(skip: tuple[int, int], drop: Drop, checkpoint: Checkpoint | None) -> Step:
    first, last = skip
    resumed = (
        f" Of these, steps up to {checkpoint.step} are in the checkpoint already."
        if checkpoint is not None and checkpoint.step >= first
        else ""
    )
    return Step(
        f"Skip the batches of steps {first} to {last}",
        f"From {drop.onset_low - first} steps before the onset to the lowest ratio.{resumed} "
        "Whether data caused the drop is for auditor report to say; they are "
        f"listed by auditor replay-order --from-step {first} --to-step {last}, and "
        "AuditedSampler(skip=) leaves them out.",
    )


def _told(one: Grade) -> str:
    return (
        "no defined ratio" if one.grade is None else f"{_name(one.grade)} (ratio {one.ratio:.2f})"
    )


def _name(grade: int | None) -> str:
    return "not graded" if grade is None else f"S{grade}"
