"""Sums per step and source, and exposures of some steps, are those of the whole table of rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from compositions import composition_of_rows
from polars.testing import assert_frame_equal

from auditor import schema
from auditor.explain.composition import composition_of
from auditor.ledger import NULL, Frame, LedgerWriter
from auditor.record.duplication import Scores
from auditor.record.exposures import ExposureBuffer
from auditor.record.identity import Parts
from auditor.run import Run
from auditor.tables import polars_schema

SOURCES = ("books", "code", None)


def write_run(path: Path, seed: int) -> Run:
    """A run of some ranks that restart, discard, renumber, skip, pack rows, score some rows, and
    tell the losses of some steps."""
    rng = np.random.default_rng(seed)
    path.mkdir()
    facts = {"run_id": "r", "schema_version": schema.RUN_VERSION, "created": "", "world_size": 1}
    (path / "run.json").write_text(json.dumps(facts))
    hashed = bool(rng.random() < 0.4)
    pool = rng.integers(0, 2**62, 60) if hashed else np.arange(60)
    for rank in range(int(rng.integers(1, 4))):
        step = 0
        for attempt in range(int(rng.integers(1, 4))):
            step = int(rng.integers(0, step + 1))
            name = f"rank-{rank:05d}/attempt-{attempt:04d}.ledger"
            exposures = LedgerWriter(path / "exposures" / name)
            buffer, waiting, seen = ExposureBuffer(), [], set()
            batch, sizes = 0, {}
            for _ in range(int(rng.integers(1, 30))):
                batch += 1 + int(rng.random() < 0.1)
                keys = rng.choice(pool, int(rng.integers(1, 5)))
                seen |= set(keys.tolist())
                parts = None
                if rng.random() < 0.2:
                    n = len(keys)
                    parts = Parts(np.arange(n, dtype=np.int64) // 2, rng.integers(1, 50, n))
                if rng.random() < 0.95:
                    state = "skipped" if rng.random() < 0.1 else "delivered"
                    buffer.add_batch(batch, state, keys, parts)
                if rng.random() < 0.8:
                    buffer.add_scores(batch, scores(rng, keys))
                waiting.append(batch)
                sizes[batch] = len(keys)
                if rng.random() < 0.5:
                    if rng.random() < 0.7:
                        losses = rng.random(sum(map(sizes.get, waiting))).astype(np.float32)
                        losses[rng.random(len(losses)) < 0.1] = np.nan
                        buffer.add_losses(waiting, losses)
                    if rng.random() < 0.9:
                        buffer.add_step(step, "trained", waiting)
                        if rng.random() < 0.1:
                            buffer.add_renumbered(step, step + 1)
                            step += 1
                        step += 1
                    else:
                        buffer.add_step(step, "discarded", waiting)
                    waiting = []
                if rng.random() < 0.2:
                    for frame in buffer.take():
                        exposures.append(frame)
            for frame in buffer.take():
                exposures.append(frame)
            exposures.close()
            described = sorted(key for key in seen if rng.random() < 0.8)
            samples = LedgerWriter(path / "samples" / name)
            samples.append(
                Frame(
                    "samples",
                    {},
                    {
                        "key": np.asarray(described, np.int64),
                        "row": np.full(len(described), NULL),
                        "n_tokens": rng.choice([NULL, 7, 9], len(described)),
                    },
                    {
                        "sample_id": [f"s{key}" for key in described],
                        "source": [SOURCES[key % 3] for key in described],
                    },
                )
            )
            samples.close()
    return Run.open(path)


def scores(rng: np.random.Generator, keys: np.ndarray) -> Scores:
    n = len(keys)
    return Scores(
        known=rng.random(n) < 0.9,
        n_equal_batch=rng.integers(0, 129, n),
        n_equal_window=rng.integers(0, 129, n),
        dup_run=rng.integers(0, 3, n),
        dup_of=np.where(rng.random(n) < 0.5, keys, -1),
        repetition=rng.random(n).astype(np.float32),
    )


@pytest.mark.parametrize("seed", range(40))
def test_sums_over_ledgers_are_those_over_rows(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # else all batches at a time
        monkeypatch.setattr("auditor.explain.composition._BATCHES_AT_A_TIME", 1 + seed % 5)
    run = write_run(tmp_path / "run", seed)
    found = composition_of(run)
    assert dict(found.schema) == dict(polars_schema(schema.COMPOSITION))
    assert_frame_equal(found, composition_of_rows(run.scan("exposures")), abs_tol=1e-7)


@pytest.mark.parametrize("seed", range(40))
def test_exposures_of_some_steps_are_those_of_the_whole_table(tmp_path: Path, seed: int) -> None:
    run = write_run(tmp_path / "run", seed)
    for low, high in ((0, 3), (2, 2), (5, 400), (900, 901)):
        for view in ("effective", "all"):
            whole = run.scan("exposures", view).filter(pl.col("step").is_between(low, high))
            some = run.scan("exposures", view, steps=(low, high))
            assert_frame_equal(some.collect(), whole.collect())
    with pytest.raises(ValueError, match="exposures"):
        run.scan("signals", steps=(0, 1))


def test_a_run_without_exposures_is_composed_of_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0)
    for ledger in (tmp_path / "run" / "exposures").rglob("*.ledger"):
        ledger.unlink()
    assert composition_of(Run.open(run.path)).is_empty()
