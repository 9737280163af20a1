"""What the panels draw."""

from __future__ import annotations

import math

import explanations
import numpy as np
import polars as pl

from auditor import schema
from auditor.show import series


def test_thin_keeps_extremes_ends_and_gaps() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(1_000_000, dtype=np.float64)
    values = rng.normal(size=len(steps))
    values[123_456], values[654_321], values[500_000] = 50.0, -50.0, np.nan
    x, y = series.thin(steps, values)
    assert len(x) <= series.POINTS
    assert {0.0, 123_456.0, 500_000.0, 654_321.0, 999_999.0} <= set(x)
    assert np.nanmax(y) == 50.0
    assert np.nanmin(y) == -50.0
    assert np.isnan(y[x == 500_000.0]).all()
    assert (np.diff(x) > 0).all()


def test_thin_keeps_the_extremes_of_every_bin() -> None:
    steps = np.arange(50_000, dtype=np.float64)
    values = np.sin(steps / 7.0)
    x, y = series.thin(steps, values)
    for start in range(0, 50_000, 1000):
        own = (x >= start) & (x < start + 1000)
        assert y[own].max() > 0.999
        assert y[own].min() < -0.999


def test_thin_leaves_short_series_alone() -> None:
    steps = np.arange(series.POINTS, dtype=np.float64)
    x, _ = series.thin(steps, steps)
    assert len(x) == series.POINTS


def test_thin_of_nothing_but_gaps() -> None:
    steps = np.arange(10_000, dtype=np.float64)
    x, y = series.thin(steps, np.full(10_000, np.nan))
    assert len(x) <= series.POINTS
    assert np.isnan(y).all()


def test_by_layer_draws_few_blocks_one_by_one_and_many_by_extremes() -> None:
    few = series.of_signal(explanations.signals(n_layers=12), "token_rank", "probe", "raw")
    assert [one.name for one in series.by_layer(few)] == [f"block {i}" for i in range(12)]
    many = series.of_signal(explanations.signals(n_layers=13), "token_rank", "probe", "raw")
    lines = series.by_layer(many)
    assert len(lines) == 4
    low, middle, high, own = (one.values for one in lines)
    assert (low <= middle).all()
    assert (middle <= high).all()
    assert (low <= own).all()


def test_of_signal_takes_the_latest_attempt_and_the_mean_of_ranks() -> None:
    common = {"step": 5, "kind": "step", "site": "", "signal": "loss"}
    rows = [
        {**common, "attempt": 0, "rank": 0, "value": 100.0},
        {**common, "attempt": 1, "rank": 0, "value": 1.0},
        {**common, "attempt": 1, "rank": 1, "value": 3.0},
    ]
    frame = series.of_signal(explanations.frame(schema.SIGNALS, rows), "loss", "step")
    assert frame["value"].to_list() == [2.0]


def test_line_makes_undefined_values_gaps() -> None:
    frame = pl.DataFrame({"step": [0, 1, 2, 3], "value": [1.0, None, math.inf, math.nan]})
    values = series.line(frame, "x").values
    assert np.isnan(values).tolist() == [False, True, True, True]


def test_composition_shares_sum_to_one_and_duplicates_are_of_scored() -> None:
    composed = series.composition_of(explanations.explanation())
    assert composed is not None
    assert np.allclose(sum(one.values for one in composed.shares), 1.0)
    by_name = {one.name: one.values for one in composed.duplicates}
    assert by_name["novels"][0] == 0.0
    assert np.isclose(by_name["novels"][-1], 7 / 24)
    assert np.isclose(by_name["speeches"][0], 1 / 24)
    assert np.allclose(composed.repetition.values, 0.05)


def test_composition_sums_the_smallest_of_many_sources() -> None:
    names = tuple(f"source-{i:02d}" for i in range(30))
    made = explanations.explanation(composition=explanations.composition(sources=names))
    composed = series.composition_of(made)
    assert composed is not None
    assert len(composed.shares) == series.SOURCES + 1
    assert composed.shares[-1].name == series.OTHER_SOURCES
    assert np.allclose(sum(one.values for one in composed.shares), 1.0)


def test_composition_without_scores_has_gaps_not_zeros() -> None:
    frame = explanations.composition().with_columns(
        n_scored=pl.lit(0, pl.Int64), n_duplicate=pl.lit(0, pl.Int64)
    )
    composed = series.composition_of(explanations.explanation(composition=frame))
    assert composed is not None
    assert not any(one.is_defined for one in composed.duplicates)
    assert not composed.repetition.is_defined


def test_reach_is_from_the_first_step_to_the_last_and_never_empty() -> None:
    assert series.reach(explanations.explanation()) == (0, 299)
    late = explanations.explanation(**explanations.resumed(1000, n_steps=1))
    assert series.reach(late) == (1000, 1001)
    assert series.reach(explanations.explanation(**explanations.EMPTY)) == (0, 1)


def test_composition_of_nothing_is_none() -> None:
    assert series.composition_of(explanations.explanation(**explanations.EMPTY)) is None
