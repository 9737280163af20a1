"""Sharded models: forwards run collectives, so all ranks have to do the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl

from auditor import Run

PROGRAM = Path(__file__).with_name("sharded.py")


def trained(folder: Path, *options: str) -> list[dict[str, Any]]:
    """What each of two ranks wrote: losses, weights, failures of ours."""
    folder.mkdir()
    ranks = [
        subprocess.Popen(
            [
                sys.executable, str(PROGRAM), str(folder / "run"), str(folder / f"{rank}.json"),
                str(rank), "2", *options,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def sampled(folder: Path, rank: int, kind: str) -> list[int]:
    ranks = (
        Run.open(folder / "run")
        .scan("signals")
        .filter(
            (pl.col("signal") == "token_rank") & (pl.col("kind") == kind) & (pl.col("rank") == rank)
        )
    )
    return ranks.collect()["step"].unique().sort().to_list()


def test_sharded_training_is_identical_with_the_monitor_and_measured_on_both_ranks(
    tmp_path: Path,
) -> None:
    plain = trained(tmp_path / "plain")
    audited = trained(tmp_path / "audited", "--monitor")
    for one, other in zip(plain, audited, strict=True):
        assert one["losses"] == other["losses"]
        assert one["weights"] == other["weights"]
        assert not other["failures"]
    for rank in range(2):
        for kind in ("live", "probe"):
            assert sampled(tmp_path / "audited", rank, kind) == [0, 60]
    norms = (
        Run.open(tmp_path / "audited" / "run").scan("signals")
        .filter((pl.col("signal") == "grad_norm") & (pl.col("step") == 60)).collect()
    )  # fmt: skip
    assert len(set(norms["value"].to_list())) == 1  # of the whole gradient, on both ranks


def test_fault_and_suspicion_on_one_rank_leave_the_collectives_in_step(tmp_path: Path) -> None:
    """A rank that skipped a forward, or ran one more, would leave the other waiting for ever."""
    plain = trained(tmp_path / "plain")
    audited = trained(tmp_path / "audited", "--monitor", "--fault")
    for one, other in zip(plain, audited, strict=True):
        assert one["losses"] == other["losses"]
        assert one["weights"] == other["weights"]
    assert audited[1]["failures"]
    # Rank 1 became suspicious after step 0: both sample at 30; its probe fails there on both.
    assert sampled(tmp_path / "audited", 0, "live") == [0, 30, 60, 90]
    assert sampled(tmp_path / "audited", 0, "probe") == [0, 60, 90]
