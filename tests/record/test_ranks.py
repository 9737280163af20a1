"""Several ranks, real processes over gloo: they write apart and are read together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner
from documents import exposures

from auditor import Run
from auditor.cli import main
from auditor.explain.grades import judgements_of

PROGRAM = Path(__file__).with_name("ranks.py")
Log = dict[tuple[int, int], list[str]]
"""Sample ids by rank and step."""


def start(folder: Path, rank: int, world_size: int, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable, str(PROGRAM), str(folder / "run"), str(folder / f"log-{rank}.jsonl"),
            str(rank), str(world_size), *options,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def logs(folder: Path, world_size: int) -> Log:
    found: Log = {}
    for rank in range(world_size):
        for line in (folder / f"log-{rank}.jsonl").read_text().splitlines():
            entry = json.loads(line)
            found[rank, entry["step"]] = entry["ids"]
    return found


def recorded(folder: Path) -> Log:
    trained = exposures(folder / "run").filter(pl.col("state") == "trained")
    grouped = trained.group_by("rank", "step", maintain_order=True).agg("sample_id")
    return {(row[0], row[1]): row[2] for row in grouped.iter_rows()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_records_what_it_received_padding_included(
    world_size: int, tmp_path: Path
) -> None:
    ranks = [start(tmp_path, rank, world_size) for rank in range(world_size)]
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        assert "does not divide the data" not in errors
    log = logs(tmp_path, world_size)
    assert recorded(tmp_path) == log
    run = Run.open(tmp_path / "run")
    assert run.facts["world_size"] == world_size
    assert run.gaps() == []
    per_epoch = [
        name for (_, step), ids in log.items() for name in ids if step < len(log) // world_size // 2
    ]
    assert len(per_epoch) > len(set(per_epoch)) == 71  # the sampler padded, and it shows
    assert set(run.scan("exposures").collect()["source"]) == {"a", "b"}


def test_rank_that_died_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    dying, surviving = start(tmp_path, 0, 2, "--die-at", "4"), start(tmp_path, 1, 2)
    dying.communicate(timeout=240)
    surviving.communicate(timeout=240)  # gloo tells it that its peer is gone
    log = logs(tmp_path, 2)
    table = recorded(tmp_path)
    assert {key: ids for key, ids in table.items() if key[0] == 0} == {
        key: ids for key, ids in log.items() if key[0] == 0
    }
    assert any(
        "rank 0: still running, or killed" in gap for gap in Run.open(tmp_path / "run").gaps()
    )


def test_rank_of_which_nothing_was_written_is_reported(tmp_path: Path) -> None:
    ranks = [start(tmp_path, rank, 2) for rank in range(2)]
    for process in ranks:
        process.communicate(timeout=240)
    for table in ("attempts", "exposures", "samples", "signals"):
        folder = tmp_path / "run" / table / "rank-00001"
        folder.rename(tmp_path / f"lost-{table}")
    assert "no record of ranks [1] of 2" in Run.open(tmp_path / "run").gaps()


def test_ranks_that_all_see_the_same_data_are_warned_of(tmp_path: Path) -> None:
    ranks = [start(tmp_path, rank, 2, "--undivided") for rank in range(2)]
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        assert "does not divide the data" in errors
    log = logs(tmp_path, 2)
    assert all(log[0, step] == log[1, step] for _, step in log)
    assert recorded(tmp_path) == log


def test_each_rank_is_graded_by_itself_offline_as_it_was_live(tmp_path: Path) -> None:
    ranks = [start(tmp_path, rank, 2) for rank in range(2)]
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    for rank in range(2):
        live = signals.filter((pl.col("signal") == "grade") & (pl.col("rank") == rank))
        judged = [one.grade for _, one in judgements_of(signals, rank=rank)]
        assert len(judged) > 2
        assert [one.grade for one in judged] == live.sort("step")["value"].to_list()
    rows = signals.filter((pl.col("signal") == "sample_rank") & (pl.col("layer") == -1))
    assert set(rows["n_rows"]) <= {8, 4, 3}  # of one rank's batch, never of both
    found = CliRunner().invoke(main, ["grade", str(tmp_path / "run")])
    assert "of rank 0" in found.output
    assert f"Rank 1: {len(judged)} sampled steps" in found.output
