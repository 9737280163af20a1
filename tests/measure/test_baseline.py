"""Signals against their own past: what is normal, and what never becomes so."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.measure.baseline import (
    HISTORY_SAMPLES,
    MIN_SAMPLES,
    Baseline,
    Deviations,
    HeadBaselines,
    fell_from_median,
    memorisation,
)


@given(st.lists(st.floats(-1e3, 1e3), min_size=MIN_SAMPLES, max_size=100))
def test_normal_is_median_and_robust_deviation_of_the_last_samples(values: list[float]) -> None:
    baseline = Baseline(HISTORY_SAMPLES)
    for value in values:
        baseline.judge(value, lambda *_: False, keep=True)
    last = np.asarray(values[-HISTORY_SAMPLES:])
    middle, deviation, lowest = baseline.normal()
    assert middle == pytest.approx(np.median(last))
    assert deviation == pytest.approx(1.4826 * np.median(np.abs(last - np.median(last))))
    assert lowest == last.min()


def test_bad_samples_never_become_normal() -> None:
    baseline = Baseline(HISTORY_SAMPLES)
    is_bad = fell_from_median(0.1, 3.0)
    for _ in range(20):
        assert not baseline.judge(0.8, is_bad, keep=True)[0]
    for _ in range(500):
        assert baseline.judge(0.3, is_bad, keep=True) == (True, 0.8)


def test_nothing_is_bad_before_there_is_a_past_and_what_is_not_finite_is_not_judged() -> None:
    baseline = Baseline(HISTORY_SAMPLES)
    for _ in range(MIN_SAMPLES - 1):
        baseline.judge(0.8, lambda *_: True, keep=True)
    assert baseline.judge(0.0, lambda *_: True, keep=True)[0] is False
    assert baseline.judge(math.nan, lambda *_: True, keep=True)[0] is False


def test_heads_fall_each_against_its_own_past() -> None:
    """A head that is always low has not fallen; one that was high and is low has."""
    heads = HeadBaselines()
    for _ in range(20):
        assert heads.share_fallen("probe", 0, [3.0, 0.1, 2.0, 2.5], warm=True) == 0.0
    assert heads.share_fallen("probe", 0, [1.4, 0.1, 0.9, 2.5], warm=True) == 0.5
    assert heads.share_fallen("live", 0, [1.4, 0.1, 0.9, 2.5], warm=True) == 0.0  # another series


def rows(**changed: float) -> list[dict[str, object]]:
    values = {
        ("sample_rank", "live", -1): 0.7,
        ("entropy_mean", "probe", 0): 3.0,
        ("value_rank", "probe", 0): 0.8,
        ("max_logit", "probe", 0): 8.0,
        ("probe_loss", "probe", None): 2.5,
        ("memorisation", "probe", None): 0.1,
        ("heads_fallen", "probe", 0): 0.0,
        ("non_finite", "live", 0): 0.0,
    }
    return [
        {"signal": signal, "kind": kind, "layer": layer, "value": changed.get(signal, value)}
        for (signal, kind, layer), value in values.items()
    ]


@pytest.mark.parametrize(
    ("signal", "value"),
    [
        ("sample_rank", 0.55),
        ("entropy_mean", 1.4),
        ("value_rank", 0.6),
        ("max_logit", 80.0),
        ("probe_loss", 2.7),
        ("memorisation", 0.7),
        ("heads_fallen", 0.5),
        ("non_finite", 1e-4),
    ],
)
def test_each_signal_deviates_by_its_own_rule(signal: str, value: float) -> None:
    deviations = Deviations()
    for _ in range(20):
        assert not list(deviations.of(rows(), "probe", warm=True))
    (found,) = deviations.of(rows(**{signal: value}), "probe", warm=True)
    assert (found.signal, found.value) == (signal, value)
    assert signal in str(found)


def test_memorisation_is_the_gap_of_probe_loss_over_training_loss() -> None:
    assert memorisation(5.8, [0.04, 0.05, 9.0, math.nan]) == pytest.approx(5.75)
    assert math.isnan(memorisation(5.8, []))
