"""Killed and begun again, three times: no step is missing, none is there twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
from documents import exposures

from auditor import Run

PROGRAM = Path(__file__).with_name("killed.py")
N_STEPS = 120


def train(folder: Path, kill_after: int | None) -> dict[int, list[str]]:
    """Run the program, kill it after so many steps; what it said it received, by step."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder / "run"), str(folder / "saved"), str(N_STEPS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    log: dict[int, list[str]] = {}
    for line in process.stdout:
        if line == "done\n":
            break
        entry = json.loads(line)
        log[entry["step"]] = entry["ids"]
        if len(log) == kill_after:
            os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    return log


def test_every_step_is_read_once_after_three_kills(tmp_path: Path) -> None:
    moments = random.Random()
    truth: dict[int, list[str]] = {}
    for kill_after in [*(moments.randrange(3, 40) for _ in range(3)), None]:
        print("to be killed after", kill_after, "steps")  # shown when the test fails
        log = train(tmp_path, kill_after)
        first = min(log)
        truth = {step: ids for step, ids in truth.items() if step < first} | log
    assert sorted(truth) == list(range(N_STEPS))
    run = Run.open(tmp_path / "run")
    table = run.scan("exposures").filter(pl.col("state") == "trained").collect()
    assert len(run.attempts) == 4
    grouped = table.group_by("step", maintain_order=True).agg("sample_id", "attempt")
    assert {step: ids for step, ids, _ in grouped.iter_rows()} == truth
    assert all(len(set(attempts)) == 1 for _, _, attempts in grouped.iter_rows())
    assert sum("killed" in gap for gap in run.gaps()) == 3
    everything = exposures(tmp_path / "run")
    assert everything.height >= table.height
