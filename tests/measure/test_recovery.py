"""The plan after a drop, against histories whose answer is known by construction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.measure.grading import Grade, Grader, grade_of
from auditor.measure.recovery import (
    Checkpoint,
    choose_checkpoint,
    find_drop,
    grade_at,
    plan,
    verify,
)

EVERY = 5


def graded(ratios: Sequence[float], first_step: int = 0) -> list[Grade]:
    """The monitor's own grades of these ratios, sampled every 5 steps.

    The raw ratio is kept at its best, so that the graded ratio is the column ratio as given.
    """
    grader = Grader()
    return [
        grader.update(first_step + EVERY * place, {0: 1.0}, {0: ratio})
        for place, ratio in enumerate(ratios)
    ]


def course(*parts: tuple[float, int]) -> list[Grade]:
    """Grades of a course of (ratio, until step)."""
    ratios: list[float] = []
    for ratio, until in parts:
        ratios += [ratio] * ((until - EVERY * len(ratios)) // EVERY)
    return graded(ratios)


HEALTHY = [(0.75, 300)]
RATES = dict.fromkeys(range(1000), 0.002)


def test_a_healthy_run_has_nothing_to_recover_from() -> None:
    found = plan(course((0.75, 600)), [Checkpoint("a", 100)], learning_rates=RATES)
    assert found.state == "none"
    assert found.steps == ()
    assert found.summary.startswith("No drop found: nothing to recover from.")
    assert found.drop is None and found.checkpoint is None and found.skip_steps is None


@pytest.mark.parametrize("grades", [[], course((0.1, 60))], ids=["none", "warm-up"])
def test_what_is_not_judged_is_not_called_healthy(grades: list[Grade]) -> None:
    found = plan(grades)
    assert found.state == "none"
    assert found.summary.startswith("Not judged")


def test_one_odd_sample_is_no_drop() -> None:
    assert find_drop(course(*HEALTHY, (0.15, 305), (0.75, 400))) is None


def test_one_sample_without_a_defined_ratio_is_a_severe_drop() -> None:
    drop = find_drop(course(*HEALTHY, (math.nan, 305)))
    assert drop is not None and drop.severe
    assert (drop.onset_low, drop.onset_high, drop.trough.grade) == (295, 300, None)


def test_a_severe_drop_in_numbers() -> None:
    """From .75 to .05 after step 295, lowest at 320, still low at the end."""
    grades = course(*HEALTHY, (0.3, 310), (0.2, 320), (0.05, 325), (0.12, 500))
    checkpoints = [Checkpoint(f"step_{step}", step) for step in (100, 200, 290, 295, 300, 400)]
    rates = {**RATES, 298: 1e-2, 299: 2e-2}
    found = plan(grades, checkpoints, learning_rates=rates)
    assert found.state == "danger"
    assert found.drop is not None
    assert (found.drop.onset_low, found.drop.onset_high) == (295, 300)
    assert (found.drop.trough.step, found.drop.trough.grade) == (320, 0)
    assert found.drop.severe and found.drop.recovery_step is None
    assert found.checkpoint == checkpoints[2] and found.checkpoint_is_good
    assert found.usual_learning_rate == 2e-3
    assert found.learning_rate == pytest.approx(2e-3 / 3)
    assert found.lowest_learning_rate == pytest.approx(0.6e-3)
    assert found.skip_steps == (255, 320)
    assert found.reset_optimizer and found.verify_steps == 1000 and not found.qk_norm
    text = "\n".join(f"{step.title}: {step.detail}" for step in found.steps)
    for told in (
        "Roll back to step_290",
        "Step 290, S7",
        "steps 255 to 290, of those suspected, are in it",
        "to a third: It was 0.002 before the onset: set the schedule to 0.000667",
        "It rose 10 times at the onset",
        "Skip the batches of steps 255 to 320",
        "--from-step 255 --to-step 320",
        "Verify for 1,000 steps",
    ):
        assert told in text
    assert [step.title for step in found.steps][-1] == "Verify for 1,000 steps"


@given(
    ratios=st.lists(
        st.one_of(st.floats(0, 1), st.just(math.nan), st.sampled_from([0.75, 0.15])),
        min_size=20,
        max_size=120,
    )
)
def test_any_course_gives_a_plan_whose_numbers_are_in_order(ratios: list[float]) -> None:
    grades = graded([0.75] * 21 + ratios)
    found = plan(grades, [Checkpoint("a", 50), Checkpoint("b", 200)], learning_rates=RATES)
    assert str(found).startswith(found.summary)
    drop = found.drop
    if drop is None:
        assert found.state == "none" and not found.steps
        return
    assert drop.onset_low < drop.onset_high <= drop.trough.step
    assert drop.recovery_step is None or drop.recovery_step > drop.trough.step
    steps = {one.step for one in grades}
    assert {drop.onset_low, drop.onset_high, drop.trough.step} <= steps
    if drop.trough.grade is None:
        assert found.state in ("danger", "recovered") and drop.severe
    if found.checkpoint_is_good:
        assert found.checkpoint is not None and found.checkpoint.step < drop.onset_low
    assert found.learning_rate is not None and found.lowest_learning_rate is not None
    assert 0 < found.lowest_learning_rate <= found.learning_rate <= 1e-3


def test_danger_at_s2_is_a_cut_of_50_to_70_percent() -> None:
    found = plan(course(*HEALTHY, (0.25, 400)), learning_rates=RATES)
    assert found.drop is not None and found.drop.level == "danger" and not found.drop.severe
    assert found.learning_rate == pytest.approx(1e-3)
    assert found.lowest_learning_rate == pytest.approx(0.6e-3)
    assert any("by 50% to 70%" in step.title for step in found.steps)


def test_a_watched_run_is_not_rolled_back() -> None:
    """A slow fall to S4: never two grades within 100 steps."""
    parts = [(0.75 - 0.01 * i, 200 + 25 * i) for i in range(1, 31)]
    found = plan(course((0.75, 200), *parts), [Checkpoint("a", 150)], learning_rates=RATES)
    assert found.state == "watch"
    assert found.learning_rate == found.lowest_learning_rate == pytest.approx(1e-3)
    assert not found.reset_optimizer and found.skip_steps is None
    titles = [step.title for step in found.steps]
    assert titles == [
        "Cut the learning rate by half",
        "Observe",
        "Keep a checkpoint from before the onset",
    ]


def test_a_drop_that_recovered_is_told_as_one() -> None:
    grades = course(*HEALTHY, (0.15, 330), (0.7, 600))
    found = plan(grades, [Checkpoint("a", 250)])
    assert found.state == "recovered"
    assert found.drop is not None and found.drop.recovery_step == 330
    assert "came back by itself by step 330" in found.steps[0].detail
    assert "recovered" in found.summary


def test_of_two_drops_the_one_that_lasts_is_planned_for() -> None:
    lasting_first = course(*HEALTHY, (0.15, 330), (0.7, 600), (0.15, 620), (0.7, 800))
    drop = find_drop(lasting_first)
    assert drop is not None and drop.onset_low == 595  # both recovered: the latest
    drop = find_drop(course(*HEALTHY, (0.15, 330), (0.7, 600), (0.15, 620)))
    assert drop is not None and drop.onset_low == 595 and drop.recovery_step is None


def test_a_grade_that_was_low_since_the_warm_up_has_not_dropped() -> None:
    """It is watched all the same, but there is no better time to go back to."""
    rising = course((0.2, 100), *[(0.2 + 0.005 * i, 100 + 5 * i) for i in range(1, 50)])
    assert rising[-1].alert == "watch, stable"
    found = plan(rising)
    assert found.state == "none"
    assert "low and was never better since the warm-up" in found.summary


def test_a_fall_from_a_level_that_was_watched_begins_at_the_fall() -> None:
    """Stable at S4 for long, then S1: the checkpoint to go back to is of S4, not of S7."""
    slowly = [(0.75 - 0.01 * i, 300 + 25 * i) for i in range(1, 31)]
    grades = course(*HEALTHY, *slowly, (0.45, 1500), (0.15, 1550))
    found = plan(grades, [Checkpoint("healthy", 250), Checkpoint("stable", 1450)])
    assert found.drop is not None and found.drop.onset_low == 1495
    assert found.checkpoint is not None and found.checkpoint.path == "stable"


def test_a_gradual_fall_begins_where_it_left_the_level() -> None:
    """Alarm at S4, onset a quarter of the way down: at .60 of .75 to .15."""
    ratios = [0.75] * 60 + [0.75 - 0.05 * i for i in range(1, 13)] + [0.15] * 10
    drop = find_drop(graded(ratios))
    assert drop is not None
    assert drop.onset_high == EVERY * (60 + 2)  # .65, .60: the line is .60
    assert drop.onset_low == drop.onset_high - EVERY


def test_other_signals_may_tell_the_onset() -> None:
    found = plan(course(*HEALTHY, (0.15, 400)), [Checkpoint("a", 250)], onset=(200, 210))
    assert found.drop is not None and found.drop.onset_low == 200
    assert found.skip_steps is not None and found.skip_steps[0] == 160
    assert not found.checkpoint_is_good  # of after that onset


def test_without_checkpoints_the_plan_says_so() -> None:
    titles = [step.title for step in plan(course(*HEALTHY, (0.15, 400))).steps]
    assert "Roll back: no checkpoint is known" in titles


def test_without_a_good_checkpoint_the_best_is_named_as_such() -> None:
    grades = course(*HEALTHY, (0.15, 400), (0.35, 500))
    found = plan(grades, [Checkpoint("early", 350), Checkpoint("late", 490)])
    assert found.checkpoint is not None and found.checkpoint.path == "late"
    assert not found.checkpoint_is_good
    (step,) = [step for step in found.steps if step.title.startswith("Roll back")]
    assert "None of 2 checkpoints" in step.detail
    assert "late, step 490, S3, after the onset" in step.detail


def test_without_learning_rates_the_factor_is_told() -> None:
    found = plan(course(*HEALTHY, (0.25, 400)), learning_rates={10: math.nan})
    assert found.learning_rate is None and found.learning_rate_factor == 0.5
    assert any("No learning rate was recorded" in step.detail for step in found.steps)


def test_a_learning_rate_from_long_before_is_better_than_none() -> None:
    assert plan(course(*HEALTHY, (0.25, 400)), learning_rates={3: 0.1}).learning_rate == 0.05


def test_collapsed_attention_asks_for_normalised_queries_and_keys() -> None:
    found = plan(course(*HEALTHY, (0.25, 400)), entropy_collapsed=True)
    assert found.qk_norm
    assert any("QKNorm" in step.detail for step in found.steps)


@given(
    grades=st.lists(st.sampled_from([0.05, 0.25, 0.45, 0.65, 0.75]), min_size=1, max_size=60),
    steps=st.lists(st.integers(0, 300), max_size=6),
    onset=st.integers(0, 300),
)
def test_the_chosen_checkpoint_is_what_the_rule_says(
    grades: list[float], steps: list[int], onset: int
) -> None:
    """Against the rule by brute force: the last at S4 or better and from before the onset."""
    history = [Grade(EVERY * i, ratio, grade_of(ratio), 0, "") for i, ratio in enumerate(grades)]
    found, is_good = choose_checkpoint([Checkpoint(str(s), s) for s in steps], history, onset)

    def at(step: int) -> int:
        grade = history[min(step // EVERY, len(history) - 1)].grade
        assert grade is not None
        return grade

    fitting = [step for step in steps if step < onset and at(step) >= 4]
    assert is_good == bool(fitting)
    assert (found is None) == (not steps)
    if fitting:
        assert found is not None and found.step == max(fitting)
    elif found is not None and any(step < onset for step in steps):
        assert found.step < onset
        assert at(found.step) == max(at(step) for step in steps if step < onset)


def test_the_grade_of_a_step_is_that_of_the_sample_before_it() -> None:
    grades = course((0.75, 20))
    assert grade_at(grades, -1) is None
    assert [getattr(grade_at(grades, step), "step", None) for step in (0, 4, 5, 99)] == [
        0,
        0,
        5,
        15,
    ]
    assert grade_at([], 5) is None


@pytest.mark.parametrize(
    ("parts", "state"),
    [
        ([(0.7, 500)], "running"),
        ([(0.7, 1100)], "passed"),
        ([(0.45, 990), (0.6, 1100)], "passed"),
        ([(0.45, 1100)], "failed"),
        ([(0.7, 900), (0.15, 950), (0.7, 1100)], "failed"),
        ([(0.7, 20)], "running"),
        ([], "running"),
    ],
)
def test_a_recovery_is_verified_by_its_grades(parts: list[tuple[float, int]], state: str) -> None:
    assert verify(course(*parts), since=0).state == state
