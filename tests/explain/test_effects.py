"""Effects of a replay: against scipy, against effects that were built in, and against none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy import stats

from auditor.explain.arms import ARMS
from auditor.explain.effects import (
    BETTER,
    OUTCOMES,
    SIGNALS,
    Effect,
    effects_of,
    outcomes_of,
    signals_of,
    t_interval,
    t_quantile,
)


def outcomes(
    value: Callable[[str, int], float], n: int, signal: str = "probe_loss"
) -> pl.DataFrame:
    rows = [(arm, seed, signal, value(arm, seed)) for seed in range(n) for arm in ARMS]
    return pl.DataFrame(rows, schema=dict(OUTCOMES), orient="row")


def against_random(table: pl.DataFrame, signal: str = "probe_loss", **better: str) -> Effect:
    found = effects_of(table, better or BETTER)
    return next(e for e in found if e.signal == signal and e.versus == "without_random")


def test_quantiles_are_those_of_scipy() -> None:
    for df in (1, 2, 3, 4, 7, 12, 29, 60):
        for p in (0.6, 0.9, 0.975, 0.99, 0.999):
            assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-9)


def test_interval_is_that_of_a_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=6), rng.normal(size=6)
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert t_interval(a - b, 0.95) == pytest.approx((expected.low, expected.high))

    def value(arm: str, seed: int) -> float:
        return float({"without_implicated": a, "without_random": b}.get(arm, b)[seed])

    effect = against_random(outcomes(value, 6))
    assert (effect.low, effect.high) == pytest.approx((expected.low, expected.high))
    assert effect.mean == pytest.approx(np.mean(a - b))


@pytest.mark.parametrize("n", [2, 5])
def test_without_an_effect_few_claims_are_made_and_intervals_cover_zero(n: int) -> None:
    """Two judged signals, whose noise is shared by the arms of a seed in part."""
    rng = np.random.default_rng(n)
    n_replays = 600
    n_claimed = n_covered = 0
    for _ in range(n_replays):
        tables = []
        for signal in BETTER:
            of_seed, own = rng.normal(size=n), rng.normal(size=(n, 3))
            noise = of_seed[:, None] + own
            tables.append(
                outcomes(lambda arm, seed, x=noise: float(x[seed, ARMS.index(arm)]), n, signal)
            )
        found = effects_of(pl.concat(tables), BETTER)
        judged = [e for e in found if e.versus == "without_random"]
        n_claimed += any(effect.finding == "better" for effect in judged)
        low, high = judged[0].low, judged[0].high
        assert low is not None and high is not None
        n_covered += low <= 0.0 <= high
    assert n_claimed <= stats.binom.ppf(0.999, n_replays, 0.05)
    assert stats.binom.ppf(0.001, n_replays, 0.95) <= n_covered
    assert n_covered <= stats.binom.ppf(0.999, n_replays, 0.95)


def test_many_judged_signals_share_the_rate_of_false_claims() -> None:
    rng = np.random.default_rng(9)
    better = {f"s{k}": "lower" for k in range(8)}
    n_claimed = 0
    for _ in range(300):
        x = rng.normal(size=(8, 4, 3))
        table = pl.concat(
            outcomes(lambda arm, seed, x=x[k]: float(x[seed, ARMS.index(arm)]), 4, f"s{k}")
            for k in range(8)
        )
        n_claimed += any(
            e.finding == "better" for e in effects_of(table, better) if e.versus == ARMS[2]
        )
    assert n_claimed <= stats.binom.ppf(0.999, 300, 0.05)


def test_a_built_in_effect_is_found_and_covered() -> None:
    rng = np.random.default_rng(1)
    n_found = n_covered = 0
    for _ in range(400):
        noise = rng.normal(scale=0.1, size=(5, 3))

        def value(arm: str, seed: int, noise: Any = noise) -> float:
            return float(noise[seed, ARMS.index(arm)]) - 0.5 * (arm == "without_implicated")

        effect = against_random(outcomes(value, 5))
        assert effect.low is not None and effect.high is not None
        n_found += effect.finding == "better"
        n_covered += effect.low <= -0.5 <= effect.high
    assert n_found >= 390
    assert n_covered >= stats.binom.ppf(0.001, 400, 0.95)


@pytest.mark.parametrize(
    ("direction", "shift", "finding"),
    [
        ("lower", -1.0, "better"),
        ("lower", 1.0, "worse"),
        ("higher", 1.0, "better"),
        ("higher", -1.0, "worse"),
        ("lower", 0.0, "none shown"),
    ],
)
def test_the_good_direction_decides_what_an_effect_means(
    direction: str, shift: float, finding: str
) -> None:
    wobble = [0.05, -0.04, 0.01, -0.02]

    def value(arm: str, seed: int) -> float:
        return (shift + wobble[seed]) * (arm == "without_implicated")

    assert against_random(outcomes(value, 4), probe_loss=direction).finding == finding


def test_one_seed_or_seeds_that_change_nothing_bear_no_interval() -> None:
    once = against_random(outcomes(lambda arm, _: float(ARMS.index(arm)), 1))
    assert (once.finding, once.low, once.mean) == ("no interval", None, -1.0)
    # The same training three times, up to the last bits, is one training.
    again = against_random(outcomes(lambda arm, s: ARMS.index(arm) + 1e-16 * s + 0.1 * s, 3))
    assert (again.finding, again.low) == ("no interval", None)
    nothing = against_random(outcomes(lambda _, seed: 1.5 * seed, 3))
    assert (nothing.finding, nothing.low, nothing.high) == ("none shown", 0.0, 0.0)


def test_values_that_are_not_finite_are_told_and_not_averaged_away() -> None:
    for bad in (math.nan, math.inf):
        table = outcomes(lambda arm, s, x=bad: x if arm == ARMS[2] and s == 1 else s + 0.5, 3)
        effect = against_random(table)
        assert (effect.finding, effect.low) == ("undefined", None)


def test_signals_without_a_direction_are_reported_and_not_judged() -> None:
    table = pl.concat(
        [
            outcomes(lambda a, s: s + (a == ARMS[1]) * 9.0, 3, name)
            for name in ("loss", "probe_loss")
        ]
    )
    found = effects_of(table, BETTER)
    assert [e.signal for e in found] == ["probe_loss"] * 2 + ["loss"] * 2
    assert {e.finding for e in found if e.signal == "loss"} == {"not judged"}


def test_outcome_is_the_mean_of_the_last_quarter() -> None:
    rows = [("as_it_was", 0, step, "probe_loss", float(step)) for step in range(100, 120)]
    rows += [("as_it_was", 0, step, "early", 1.0 * step) for step in (100, 105, 103)]
    rows += [("as_it_was", 0, None, "whole", 7.0)]
    table = pl.DataFrame(rows, schema=dict(SIGNALS), orient="row")
    found = dict(outcomes_of(table, 100, 119).select("signal", "value").iter_rows())
    # 20 steps: the last five are 115 to 119.
    assert found == {"probe_loss": 117.0, "early": 105.0, "whole": 7.0}


def test_signals_are_a_mapping_or_rows() -> None:
    assert signals_of({"probe_loss": 1, "x": np.float32(0.5)}) == [
        (None, "probe_loss", 1.0),
        (None, "x", 0.5),
    ]
    assert signals_of({"step": 3, "x": 1.0}) == [(3, "x", 1.0)]
    rows = ({"step": s, "x": s * 2, "y": None} for s in range(2))
    assert signals_of(rows) == [(0, "x", 0.0), (1, "x", 2.0)]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "NoneType"),
        (1.5, "float"),
        ("probe_loss", "str"),
        ([{"x": 1.0}], "row 0"),
        ([{"step": 1, "x": 1.0}, 3], "row 1"),
        ({"x": "high"}, "'x' is no number but str"),
        ([], "no signal"),
        ({}, "no signal"),
    ],
)
def test_other_returns_are_refused_in_words(returned: object, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        signals_of(returned)
