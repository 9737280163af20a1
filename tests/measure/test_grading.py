"""The grade scale and the table of alerts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.measure.grading import DEFAULT_POLICY, Grade, Grader, grade_of

SCALE = {1.2: 7, 0.7: 7, 0.6999: 6, 0.63: 6, 0.6: 6, 0.5: 5, 0.41: 4, 0.3: 3, 0.2: 2, 0.1: 1}
SCALE |= {0.0999: 0, 0.0: 0, 0.1 + 0.2: 3}


@pytest.mark.parametrize(("ratio", "grade"), SCALE.items())
def test_grade_follows_the_scale(ratio: float, grade: int) -> None:
    assert grade_of(ratio) == grade


@given(st.floats(0, 1), st.floats(0, 1))
def test_grade_is_monotonic(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert (grade_of(low) or 0) <= (grade_of(high) or 0)


def graded(values: list[tuple[float, float]], every: int = 10) -> list[Grade]:
    """Grades of one block from (raw, column) ratios."""
    grader = Grader()
    return [
        grader.update(i * every, {0: raw}, {0: column}) for i, (raw, column) in enumerate(values)
    ]


def test_nothing_alarms_during_warmup() -> None:
    dipping = [(0.9 - 0.08 * i, 0.9 - 0.08 * i) for i in range(10)]
    assert {grade.alert for grade in graded(dipping)} == {"warming"}


def test_healthy_run_is_at_s7_once_warm_and_outliers_do_not_matter() -> None:
    """A model with outlying dimensions holds its raw ratio low for ever; that is not collapse."""
    grades = graded([(0.08, 0.8)] * 60)
    assert {grade.grade for grade in grades[10:]} == {7}
    assert {grade.alert for grade in grades[10:]} == {"healthy"}
    assert grades[-1].ratio == pytest.approx(DEFAULT_POLICY.healthy_ratio)


def test_growing_common_direction_lowers_the_grade_though_the_column_ratio_stays() -> None:
    grades = graded([(0.7, 0.8)] * 20 + [(0.7 - 0.02 * i, 0.8) for i in range(20)])
    assert grades[19].grade == 7
    assert grades[-1].ratio == pytest.approx(DEFAULT_POLICY.healthy_ratio * (0.7 - 0.38) / 0.7)
    assert grades[-1].alert == "danger"


def test_two_grades_within_100_steps_ending_below_s5_is_danger() -> None:
    healthy = [(0.8, 0.8)] * 20
    assert graded([*healthy, (0.8, 0.45)])[-1].alert == "danger"
    assert graded([*healthy, (0.8, 0.55)])[-1].alert == "watch, falling"  # ends at S5


def test_s4_and_s3_are_watched_and_told_apart_by_whether_they_fall() -> None:
    slowly = [(0.8, 0.8 - 0.005 * i) for i in range(90)]
    falling = graded(slowly)
    first = next(grade for grade in falling if grade.grade == 4)
    assert first.alert == "watch, falling"
    flat = graded([(0.8, 0.45)] * 60)
    assert flat[-1].alert == "watch, stable"


def test_s2_and_lower_is_danger_however_slowly_it_came() -> None:
    assert graded([(0.8, 0.25)] * 60)[-1].alert == "danger"


def test_a_quick_fall_is_watched_at_any_grade() -> None:
    grades = graded([(0.95, 0.74)] * 20 + [(0.95, 0.62)])
    assert grades[-1].grade == 6
    assert grades[-1].alert == "watch, falling"


def test_the_lowest_block_sets_the_grade() -> None:
    grader = Grader()
    for step in range(0, 200, 10):
        grade = grader.update(step, {0: 0.8, 1: 0.8}, {0: 0.8, 1: 0.62})
    assert (grade.layer, grade.grade) == (1, 6)


def test_undefined_ratios_give_an_undefined_grade_and_do_not_enter_the_baseline() -> None:
    grades = graded([(0.8, 0.8)] * 20 + [(math.nan, math.nan)] + [(0.8, 0.8)])
    assert (grades[20].grade, grades[20].alert) == (None, "undefined")
    assert grades[21].grade == 7
