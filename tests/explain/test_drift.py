"""Drift is found where it was put, and nowhere in draws of a constant mix."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from auditor import schema
from auditor.explain.drift import drifts_of, sentences_of
from auditor.tables import polars_schema

SOURCES = ("books", "code", "web", "wiki")
MIX = (0.4, 0.3, 0.2, 0.1)
BATCH = 32


def composition(
    mixes: np.ndarray, seed: int = 0, seen_from: int | None = None, batch: int = BATCH
) -> pl.DataFrame:
    """Draws of a mix, f64 [steps, 4]; from a step on, nearly all contents were seen before."""
    rng = np.random.default_rng(seed)
    rows = []
    for step, mix in enumerate(mixes):
        seen = 0.95 if seen_from is not None and step >= seen_from else 0.02
        for source, n in zip(SOURCES, rng.multinomial(batch, mix).tolist(), strict=True):
            if n:
                distinct = int(rng.binomial(n, 1 - seen))
                row = dict.fromkeys(schema.COMPOSITION, 0) | {"attempt": 0, "step": step}
                rows.append(
                    row | {"source": source, "n_samples": n, "n_scored": n, "n_distinct": distinct}
                )
    return pl.DataFrame(rows, schema=polars_schema(schema.COMPOSITION))


def constant(n_steps: int) -> np.ndarray:
    return np.tile(MIX, (n_steps, 1))


@pytest.mark.parametrize("batch", [4, 32, 512])
@pytest.mark.parametrize("seed", range(10))
def test_draws_of_a_constant_mix_do_not_drift(seed: int, batch: int) -> None:
    assert drifts_of(composition(constant(600), seed, batch=batch)).is_empty()


@pytest.mark.parametrize("seed", range(5))
def test_a_change_of_the_mix_is_found_at_its_step(seed: int) -> None:
    mixes = constant(400)
    mixes[230:] = (0.1, 0.3, 0.2, 0.4)
    found = drifts_of(composition(mixes, seed))
    assert set(found["kind"]) == {"mix"}
    assert set(found["source"]) == {"books", "wiki"}
    for row in found.iter_rows(named=True):
        assert abs(row["onset"] - 230) <= 2
        before, after = (0.4, 0.1) if row["source"] == "books" else (0.1, 0.4)
        assert row["before"] == pytest.approx(before, abs=0.05)
        assert row["after"] == pytest.approx(after, abs=0.05)
    (sentence,) = sentences_of(found)
    assert sentence.startswith(f"At step {found['onset'].min()} the mix changed: wiki from ")


def test_a_source_that_is_new_drifts_from_none() -> None:
    mixes = constant(400)
    mixes[:200] = (0.5, 0.3, 0.2, 0.0)
    mixes[200:] = (0.3, 0.3, 0.2, 0.2)
    found = drifts_of(composition(mixes)).filter(pl.col("source") == "wiki")
    assert found.select("onset", "before").rows() == [(200, 0.0)]


def test_a_slow_ramp_is_no_drift() -> None:
    """A curriculum over thousands of steps changes nothing within a window."""
    weight = np.linspace(0.1, 0.6, 4000)[:, None]
    mixes = np.concatenate([weight, 0.3 * np.ones_like(weight), 0.7 - weight, 0 * weight], axis=1)
    assert drifts_of(composition(mixes)).is_empty()


def test_the_second_epoch_is_repeats() -> None:
    found = drifts_of(composition(constant(400), seen_from=200))
    assert found.select("kind", "source").rows() == [("repeats", None)]
    assert abs(found["onset"][0] - 200) <= 1
    assert found["before"][0] < 0.05 < 0.9 < found["after"][0]
    assert "seen before in the run went from 2% to 9" in sentences_of(found)[0]


def test_an_order_in_clumps_is_told_from_a_shuffle() -> None:
    """Batches of one source each for 160 steps; their shares over a window stay what they were."""
    rng = np.random.default_rng(1)
    mixes = constant(480)
    mixes[160:320] = np.eye(4)[rng.choice(4, 160, p=MIX)]
    found = drifts_of(composition(mixes)).filter(pl.col("kind") == "order")
    assert set(found["source"]) == set(SOURCES)
    for row in found.iter_rows(named=True):
        assert 160 <= row["onset"] <= 200
        assert row["end"] is None or 239 <= row["end"] <= 359
        assert row["before"] == pytest.approx(1.0, abs=0.4)
        assert row["after"] > 10  # of batches of 32, about 32
    assert "came in clumps" in " ".join(sentences_of(found))


@pytest.mark.parametrize("onset", [30, 575])
def test_a_change_near_an_end_is_told_at_its_step(onset: int) -> None:
    mixes = constant(600)
    mixes[onset:] = (0.1, 0.3, 0.2, 0.4)
    found = drifts_of(composition(mixes)).filter(pl.col("source") == "books")
    assert [abs(step - onset) <= 2 for step in found["onset"]] == [True]


def test_steps_that_were_not_scored_are_no_drift_of_repeats() -> None:
    table = composition(constant(400), seen_from=0)
    gap = pl.col("step").is_between(200, 280)
    table = table.with_columns(
        n_scored=pl.when(gap).then(0).otherwise("n_scored"),
        n_distinct=pl.when(gap).then("n_samples").otherwise("n_distinct"),
    )
    assert drifts_of(table).is_empty()
    assert drifts_of(table.with_columns(n_scored=0, n_distinct="n_samples")).is_empty()


def test_short_and_empty_runs_have_none() -> None:
    assert drifts_of(pl.DataFrame(schema=polars_schema(schema.COMPOSITION))).is_empty()
    assert drifts_of(composition(constant(30))).is_empty()
