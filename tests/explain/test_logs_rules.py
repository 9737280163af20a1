"""Rules of events on what logs have and recordings have not: sparse steps, lone jumps, gaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest

from auditor import schema
from auditor.explain.events import _against_history, _Series, events_of
from auditor.explain.grades import grades_of
from auditor.measure.baseline import Baseline
from auditor.tables import polars_schema


def events(
    values: Sequence[float] | np.ndarray,
    *,
    every: int = 1,
    signal: str = "loss",
    steps: Sequence[int] | np.ndarray | None = None,
) -> pl.DataFrame:
    kind = "probe" if signal == "probe_loss" else "step"
    at = np.arange(len(values)) * every if steps is None else np.asarray(steps)
    frame = pl.DataFrame(
        {"step": at, "value": np.asarray(values, np.float64)},
    ).with_columns(attempt=0, rank=0, kind=pl.lit(kind), site=pl.lit(""), signal=pl.lit(signal))
    empty = pl.DataFrame(schema=polars_schema(schema.SIGNALS))
    whole = pl.concat([empty, frame], how="diagonal_relaxed")
    return events_of(whole, grades_of(whole))


def falling(n: int = 1000, sd: float = 0.1, seed: int = 0) -> np.ndarray:
    """A loss that falls from 4 to 3 with noise."""
    return 3 + np.exp(-np.arange(n) / 300) + np.random.default_rng(seed).normal(scale=sd, size=n)


@pytest.mark.parametrize("every", [1, 10, 400])
def test_lone_jump_is_an_event_that_ends_with_the_next_record(every: int) -> None:
    loss = falling()
    loss[500] += 1.7
    (row,) = events(loss, every=every).iter_rows(named=True)
    assert row["kind"] == "loss_spike"
    assert (row["onset_low"], row["onset_high"]) == (499 * every, 500 * every)
    assert (row["trough_step"], row["recovery_step"]) == (500 * every, 501 * every)


def test_two_lone_jumps_are_two_events_of_one_episode() -> None:
    loss = falling()
    loss[[500, 528]] += 1.7
    found = events(loss)
    assert found["onset_high"].to_list() == [500, 528]
    assert found["episode"].to_list() == [0, 0]


def test_jump_that_stays_is_one_event_however_large() -> None:
    loss = falling()
    loss[500:520] += 1.7
    (row,) = events(loss).iter_rows(named=True)
    assert (row["onset_high"], row["recovery_step"]) == (500, 520)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("jump", [0.6, 0.85])
def test_lone_jump_of_a_hard_batch_is_none(seed: int, jump: float) -> None:
    """8 deviations; and a loss so even that a small jump is many deviations."""
    loss = falling(sd=0.1 if jump > 0.7 else 0.01, seed=seed)
    loss[500] += jump
    assert events(loss).is_empty()


@pytest.mark.parametrize("every", [1, 5, 401])
@pytest.mark.parametrize("seed", range(2))
def test_quiet_run_has_no_event_however_sparse_the_log(every: int, seed: int) -> None:
    assert events(falling(seed=seed), every=every).is_empty()


def test_records_at_uneven_steps() -> None:
    """Exports are thinned: dense at first, then a record now and then."""
    steps = np.unique(np.r_[np.arange(0, 200), np.geomspace(200, 40_000, 600).astype(int)])
    loss = falling(n=len(steps))
    loss[[400, 401, 700, 701]] += 1.2
    found = events(loss, steps=steps)
    assert found["onset_high"].to_list() == [int(steps[400]), int(steps[700])]
    assert found["episode"].to_list() == [0, 1]


def test_norms_of_zero_are_not_what_is_normal() -> None:
    norm = np.zeros(300)
    norm[250:] = 1.5
    assert events(norm, signal="grad_norm").is_empty()


def test_probe_loss_that_is_not_finite_is_an_event() -> None:
    loss = np.linspace(4, 3, 60)
    loss[40] = np.nan
    (row,) = events(loss, every=100, signal="probe_loss").iter_rows(named=True)
    assert (row["kind"], row["measured"], row["onset_high"]) == ("non_finite", "probe", 4000)
    assert row["recovery_step"] == 4100


def test_divergence_at_the_first_step_needs_no_baseline() -> None:
    (row,) = events([1.6e24, np.nan, np.nan, np.inf]).iter_rows(named=True)
    assert (row["kind"], row["onset_low"], row["onset_high"]) == ("non_finite", 0, 1)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_judge_as_one_after_another(seed: int) -> None:
    """Spikes alone and in runs, gaps of nan, a change of level: as ``Baseline`` has it."""
    generator = np.random.default_rng(seed)
    loss = falling(n=1500, seed=seed)
    loss[generator.integers(0, 1500, 25)] += generator.exponential(1.0, 25)
    loss[700:740] += 1.0
    loss[generator.integers(0, 1500, 10)] = np.nan
    loss[1200:] += generator.choice([0.0, 0.4])
    series = _Series("loss_spike", "loss", "step", None, np.arange(1500), loss)

    def is_bad(value: float, median: float, deviation: float, lowest: float) -> bool:
        return value - median >= 4 * deviation or value < lowest - 2 * deviation

    baseline = Baseline(100)
    warm = [step >= 100 for step in range(1500)]  # and 10 records
    expected = [
        baseline.judge(float(value), is_bad, keep=keep)
        for value, keep in zip(loss, warm, strict=True)
    ]
    bad, normal = _against_history(series, 100, is_bad)
    assert bad.tolist() == [one for one, _ in expected]
    assert bad.sum() > 20
    np.testing.assert_array_equal(normal, [one for _, one in expected])
