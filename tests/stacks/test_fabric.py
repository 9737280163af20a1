"""Under Lightning Fabric, what is recorded is what the loop received; two ranks are tested with
Lightning's Trainer, in the same processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

pytest.importorskip("lightning", reason="Lightning is not installed")

import torch
from lightning.fabric import Fabric
from lightning_worker import Documents, under_fabric
from torch.utils.data import DataLoader

from auditor import AuditedSampler, Run

LOADERS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in 2 workers": {"workers": 2},
    "iterable": {"iterable": True},
    "iterable in 2 workers": {"iterable": True, "workers": 2},
}


@pytest.mark.parametrize("kind", LOADERS)
def test_record_is_the_loops_own_log_and_training_is_the_bare_one(
    kind: str, tmp_path: Path
) -> None:
    bare = under_fabric(None, **LOADERS[kind])
    audited = under_fabric(tmp_path / "run", **LOADERS[kind])
    assert audited == bare  # batches, steps, weights and random state
    table = Run.open(tmp_path / "run").scan("exposures", view="all").collect()
    assert set(table["state"]) == {"trained"}
    rows = table.sort("batch", "position").select("step", "sample_id").iter_rows()
    assert list(rows) == audited["log"]
    steps = table.group_by("step").agg(pl.col("batch").n_unique()).sort("step")
    per_epoch = [3, 3, 3, 1] if kind == "iterable in 2 workers" else [3, 3, 3]
    assert steps["batch"].to_list() == per_epoch * 2
    assert set(table["source"]) == {"a", "b"}
    assert table["duplication"].null_count() == 0
    assert Run.open(tmp_path / "run").gaps() == []


def test_what_fabric_set_up_is_reached_through_the_wrapper(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    dataset = Documents()
    prepared = fabric.setup_dataloaders(DataLoader(dataset, batch_size=8))
    loader = AuditedSampler(prepared, run=tmp_path / "run")
    assert loader.dataset is dataset
    assert loader.device == torch.device("cpu")
    assert len(loader) == len(prepared) == 9
    assert [len(batch["id"]) for batch in prepared] == [8] * 8 + [6]  # itself untouched
    loader.close()
    assert Run.open(tmp_path / "run").scan("exposures", view="all").collect().height == 0


@pytest.mark.parametrize("program", ["lightning_trainer.py", "fabric_loop.py"])
def test_example_runs_and_its_run_can_be_read(program: str, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "pipelines" / program
    finished = subprocess.run(
        [sys.executable, str(path), "--out", str(tmp_path), "--steps", "12"],
        capture_output=True, text=True, timeout=150, cwd=tmp_path,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    run = Run.open(tmp_path / "run")
    table = run.scan("exposures").collect()
    assert table["step"].unique().sort().to_list() == list(range(12))
    assert set(table["state"]) == {"trained"}
    signals = set(run.scan("signals").collect()["signal"])
    assert {"loss", "token_rank", "probe_loss"} <= signals
    assert run.gaps() == []
    assert "auditor report" in finished.stdout
