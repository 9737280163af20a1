"""The report's JSON: stable names, strict values."""

from __future__ import annotations

import json
import math
from typing import Any

import explanations
import pytest

from auditor import schema
from auditor.show.report import report_of

TOP = {
    "schema_version", "run_id", "verdict", "culprit", "steps", "every", "lowest_grade",
    "lowest_ratio", "alerts", "events", "drifts", "proposal", "gaps",
}  # fmt: skip
EVENT = {
    "event", "episode", "kind", "signal", "measured", "layer", "onset_step", "onset_low",
    "onset_high", "trough_step", "recovery_step", "before", "after", "grade_before",
    "grade_after", "diagnosis", "smallest_p", "suspects",
}  # fmt: skip
SUSPECT = {
    "level", "name", "feature", "exposure", "control", "lift", "low", "high", "z", "p", "q",
    "lag", "verdict",
}  # fmt: skip


def test_report_has_the_stable_names() -> None:
    report = report_of(explanations.explanation(), explanations.proposal())
    assert set(report) == TOP
    assert report["schema_version"] == schema.REPORT_VERSION
    assert [set(one) for one in report["events"]] == [EVENT, EVENT]
    assert set(report["events"][0]["diagnosis"]) == {"cause", "reason", "action"}
    assert set(report["events"][0]["suspects"][0]) == SUSPECT


def test_report_onset_is_the_first_bad_sample() -> None:
    report = report_of(explanations.explanation(), explanations.proposal())
    assert report["events"][0]["onset_step"] == report["events"][0]["onset_high"] == 150


def test_report_gives_each_event_its_own_suspects() -> None:
    report = report_of(explanations.explanation(), explanations.proposal())
    assert [len(one["suspects"]) for one in report["events"]] == [5, 1]


def test_report_leaves_the_warm_up_out_of_the_lowest_grade() -> None:
    report = report_of(explanations.explanation(), explanations.proposal())
    assert report["lowest_grade"] == 4
    assert report["lowest_ratio"] == pytest.approx(0.43)
    assert report["alerts"] == {"watch, falling": 29, "healthy": 21, "warming": 10}


def test_report_is_strict_json_where_values_are_undefined() -> None:
    bad = explanations.suspect(lift=math.inf, low=math.nan, high=-math.inf, z=math.nan)
    event = explanations.event(before=math.nan, after=math.inf, grade_before=None)
    made = explanations.explanation(
        suspects=explanations.frame(schema.SUSPECTS, [bad]),
        events=explanations.frame(schema.EVENTS, [event]),
        smallest_p={0: math.nan},
        diagnoses={},
    )
    report = report_of(made, explanations.proposal())
    text = json.dumps(report, allow_nan=False)
    assert json.loads(text, parse_constant=_refuse) == report
    assert report["events"][0]["suspects"][0]["lift"] is None
    assert report["events"][0]["diagnosis"] is None
    assert report["events"][0]["smallest_p"] is None


def test_report_of_an_empty_run() -> None:
    made = explanations.without_events(**explanations.EMPTY)
    report = report_of(made, explanations.NOTHING_PROPOSED)
    assert report["events"] == []
    assert report["lowest_grade"] is None
    assert report["alerts"] == {}
    json.dumps(report, allow_nan=False)


def test_report_keeps_names_as_the_data_has_them() -> None:
    report = report_of(*explanations.hostile())
    text = json.dumps(report, allow_nan=False)
    assert json.loads(text)["culprit"] == explanations.HOSTILE[0]


def _refuse(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")
