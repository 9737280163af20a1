"""The grade scale and the table of alerts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.measure.grading import (
    DEFAULT_POLICY,
    Alert,
    Alerts,
    Grade,
    Grader,
    Policy,
    grade_of,
)

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
    slowly = [0.75 - 0.0005 * i for i in range(1000)]  # .05 within 1,000 steps
    by_grade = {grade.grade: grade.alert for grade in graded([(0.8, value) for value in slowly])}
    assert by_grade[5] == "healthy"
    assert by_grade[4] == by_grade[3] == "watch, stable"  # less than .02 within 200 steps
    assert by_grade[2] == "danger"


SMALL = [0.96, 0.42, 0.22, 0.22, 0.25, 0.29, 0.32, 0.33, 0.34, 0.35, 0.37, 0.40, 0.42, 0.45, 0.47]
"""Ratios of a small model that trains well, every 10 steps, as recorded: the dip of its warm-up is
not over when the warm-up is."""


def test_a_run_that_is_still_low_after_the_warmup_and_recovers_alarms_nobody() -> None:
    well = [*SMALL, *(min(0.75, 0.48 + 0.02 * i) for i in range(60))]
    assert told(well) == []
    grades = graded([(0.8, value) for value in well])
    assert {grade.alert for grade in grades if grade.step < 150} == {"warming"}
    assert {grade.alert for grade in grades if grade.step > 170} == {"healthy"}


def test_a_run_that_is_low_from_the_start_is_watched_once_it_had_time_to_settle() -> None:
    """There is nothing that it fell from; but somebody should know."""
    (watch,) = told([0.14] * 60)
    assert (watch.level, watch.step) == ("watch", 310)  # 100 of warm-up, 200 to settle, confirmed
    assert {grade.alert for grade in graded([(0.8, 0.45)] * 60)[30:]} == {"watch, stable"}


def test_a_run_that_stays_at_s2_or_lower_for_long_is_in_danger_though_it_never_was_better() -> None:
    assert [(a.level, a.step) for a in told([0.14] * 200)] == [("watch", 310), ("danger", 1110)]
    sooner = told([0.14] * 200, policy=Policy(low_steps=400))
    assert [(a.level, a.step) for a in sooner] == [("watch", 310), ("danger", 510)]
    rising = [0.14] * 60 + [0.14 + 0.005 * i for i in range(140)]  # at S3 from step 920 on
    assert [a.level for a in told(rising)] == ["watch", "recovered"]


def test_a_fall_is_told_though_a_run_has_not_settled() -> None:
    """It was better since the warm-up."""
    low = [(0.8, 0.45)] * 15
    assert graded([*low, (0.8, 0.34)])[-1].alert == "watch, falling"
    assert graded([*low, (0.8, 0.27)])[-1].alert == "danger"


def test_a_low_ratio_that_wavers_has_not_fallen() -> None:
    """A small model as recorded: between .27 and .38, S2 and S3, for 500 steps."""
    wavering = [0.28, 0.30, 0.34, 0.34, 0.32, 0.36, 0.38, 0.34, 0.33, 0.34, 0.30, 0.28, 0.27] * 8
    assert [alert.level for alert in told([0.3] * 10 + wavering)] == ["watch"]


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


def test_a_block_that_loses_its_ratio_is_danger_and_named_though_the_others_are_well() -> None:
    grader, alerts = Grader(), Alerts()
    well, dead = {0: 0.8, 1: 0.8, 2: 0.8}, {0: 0.8, 1: math.nan, 2: 0.3}
    for step in range(0, 200, 10):
        assert alerts.of_grade(grader.update(step, well, well)) is None
    grade = grader.update(200, dead, dead)  # block 2 is lower, for what it is given is zero
    assert (grade.layer, grade.grade, grade.alert) == (1, None, "undefined")
    alert = alerts.of_grade(grade)
    assert alert is not None and (alert.level, alert.layer) == ("danger", 1)
    assert "block 1 has no rank ratio" in alert.message
    back = grader.update(210, well, well)
    assert (back.grade, back.alert) == (7, "healthy")


def test_a_block_that_never_had_a_ratio_is_left_out() -> None:
    grader = Grader()
    for step in range(0, 200, 10):
        grade = grader.update(step, {0: math.nan, 1: 0.8}, {0: math.nan, 1: 0.8})
    assert (grade.layer, grade.grade, grade.alert) == (1, 7, "healthy")


# -- alerts: what a person is told -----------------------------------------------------------


def told(values: list[float], every: int = 10, policy: Policy = DEFAULT_POLICY) -> list[Alert]:
    """Alerts of a run whose column ratio goes through these values."""
    grader, alerts = Grader(policy), Alerts(policy=policy)
    found = [
        alerts.of_grade(grader.update(i * every, {0: 0.8}, {0: v})) for i, v in enumerate(values)
    ]
    return [alert for alert in found if alert is not None]


def test_one_odd_sample_alarms_nobody_and_the_second_does() -> None:
    assert told([0.8] * 20 + [0.45] + [0.8] * 20) == []
    (alert, *_) = told([0.8] * 20 + [0.45] * 2)
    assert (alert.level, alert.step, alert.grade, alert.layer) == ("danger", 210, 4, 0)
    assert alert.message == "step 210: danger: grade S4, ratio 0.45 in block 0"


def test_a_ratio_that_hovers_at_a_threshold_alarms_once() -> None:
    hovering = [0.8] * 20 + [0.8 - 0.002 * i for i in range(150)] + [0.49, 0.49, 0.51, 0.51] * 50
    levels = [alert.level for alert in told(hovering)]
    assert levels == ["watch"]


def test_an_alert_is_taken_back_once_the_run_is_well_again() -> None:
    falling = [0.8 - 0.005 * i for i in range(70)]
    levels = [alert.level for alert in told([0.8] * 20 + falling + [0.8] * 30)]
    assert levels == ["watch", "recovered"]


def test_the_same_level_is_not_raised_again_within_the_cool_down() -> None:
    wave = [0.8] * 20 + ([0.45] * 4 + [0.8] * 6) * 8
    raised = [alert.step for alert in told(wave) if alert.level == "danger"]
    assert len(raised) == 2
    assert raised[1] - raised[0] >= DEFAULT_POLICY.cooldown_steps


def test_undefined_ratios_alarm_at_once() -> None:
    (alert,) = told([0.8] * 20 + [math.nan])
    assert (alert.level, alert.grade) == ("danger", None)


def test_every_threshold_is_a_setting_that_is_checked() -> None:
    early = Policy.of({"warmup_samples": 2, "warmup_steps": 20, "confirm_samples": 1})
    assert told([0.8] * 5 + [0.45], policy=early)[0].step == 50
    with pytest.raises(ValueError, match=r"'danger'.*danger_grade"):
        Policy.of({"danger": 1})
    with pytest.raises(ValueError, match=r"warmup_steps must be a whole number, got 1\.5"):
        Policy.of({"warmup_steps": 1.5})
    with pytest.raises(ValueError, match=r"quick_fall must be from 0\.0 to 1\.0, got -0\.1"):
        Policy(quick_fall=-0.1)


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [
        ("watch_grade", 9, "from 0 to 7"),
        ("danger_grade", -1, "from 0 to 7"),
        ("danger_grade", 5, "not be above watch_grade"),
        ("quick_grades", 0, "from 1 to 7"),  # every sample would have lost none
        ("baseline_samples", 0, "at least 1"),
        ("confirm_samples", 0, "at least 1"),
        ("recover_samples", 0, "at least 1"),
        ("settle_steps", -1, "at least 0"),
        ("healthy_ratio", math.nan, "from 0.0 to 1.0"),
        ("healthy_ratio", 1.5, "from 0.0 to 1.0"),
    ],
)
def test_threshold_out_of_range_is_refused_with_its_range(
    setting: str, value: float, wanted: str
) -> None:
    with pytest.raises(ValueError, match=rf"{setting} must .*{wanted}.*{value}"):
        Policy.of({setting: value})


def test_the_table_of_three_levels_on_the_log_that_goes_with_it() -> None:
    """A run that is well, is watched while it falls through S4 and S3, and is in danger at S2."""
    log = [0.78] * 20 + [0.72, 0.66, 0.63, 0.58, 0.52, 0.47, 0.44, 0.41, 0.38, 0.34, 0.31, 0.24]
    grades = []
    grader = Grader()
    for i, value in enumerate(log):
        grades.append(grader.update(i * 200, {0: 0.8}, {0: value}))
    by_grade = {g.grade: g.alert for g in grades if g.step > 200 * 19}
    assert by_grade[7] == by_grade[6] == by_grade[5] == "healthy"
    assert by_grade[4] == by_grade[3] == "watch, falling"
    assert by_grade[2] == "danger"
    assert grade_of(0.63) == 6


def test_a_run_that_falls_much_further_is_told_again_whatever_was_told_before() -> None:
    sliding = [0.8] * 20 + [0.45] * 20 + [0.05] * 3
    assert [(a.level, a.grade) for a in told(sliding)] == [("danger", 4), ("danger", 0)]


def test_recovery_is_told_when_the_run_is_well_and_not_when_danger_turns_to_watch() -> None:
    """Within the cool-down a return to danger is not told either, so what was told holds."""
    slowly = [0.8] * 20 + [0.55] * 3 + [0.25] * 3 + [0.42] * 40 + [0.25] * 3 + [0.75] * 5
    assert [alert.level for alert in told(slowly)] == ["watch", "danger", "recovered"]
    assert told(slowly)[-1].grade == 7
