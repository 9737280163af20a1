"""Several ranks, graded offline: each by itself, none averaged."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import torch
from click.testing import CliRunner

from auditor import GradeMonitor, Run
from auditor.cli import main
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.explain.grades import judgements_of, step_alerts_of
from auditor.measure.grading import Policy

EARLY = Policy(warmup_samples=1, warmup_steps=10)
STEPS, BAD_STEP = 60, 40


def train_rank(run: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> GradeMonitor:
    """One rank of two; from ``BAD_STEP`` on rank 1 reads two samples again and again."""
    monkeypatch.setattr("auditor.record.recorder.rank_and_world", lambda: (rank, 2))
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=16, width=32, n_heads=2))
    monitor = GradeMonitor(model, run=run, every=2, policy=EARLY)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        batch = torch.randint(0, 256, (8, 17), generator=generator)
        if rank == 1 and step >= BAD_STEP:
            batch = batch[:2].repeat(4, 1)
        loss = next_byte_loss(model, batch)
        loss.backward()
        model.zero_grad()
        monitor.step(loss if (rank, step) != (1, 33) else loss * float("nan"))
    monitor.close()
    assert not monitor._recorder.failures
    return monitor


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[GradeMonitor]]:
    run = tmp_path / "run"
    return run, [train_rank(run, rank, monkeypatch) for rank in range(2)]


def test_each_rank_is_graded_as_it_was_live(ranks: tuple[Path, list[GradeMonitor]]) -> None:
    run, monitors = ranks
    signals = Run.open(run).scan("signals").collect()
    assert signals["rank"].unique().sort().to_list() == [0, 1]
    for rank, monitor in enumerate(monitors):
        judged = [one for _, one in judgements_of(signals, EARLY, rank)]
        assert [one.grade for one in judged] == monitor.grades
        again = {alert.message for one in judged for alert in one.alerts}
        again |= {alert.message for _, alert in step_alerts_of(signals, EARLY, rank)}
        assert again == {alert.message for alert in monitor.alerts}
    first = [one.grade for _, one in judgements_of(signals, EARLY)]
    assert first == monitors[0].grades  # by default the first rank's


def test_what_one_rank_alone_saw_is_told_with_its_number(
    ranks: tuple[Path, list[GradeMonitor]],
) -> None:
    run, monitors = ranks
    own = {(alert.signal, alert.step) for alert in monitors[1].alerts}
    assert ("loss", 33) in own
    assert "sample_rank" in {signal for signal, _ in own}
    assert "sample_rank" not in {alert.signal for alert in monitors[0].alerts}
    found = CliRunner().invoke(main, ["grade", str(run)])
    assert found.exit_code == 0, found.output
    assert "Graded on the live batch of rank 0, 30 sampled steps." in found.output
    assert "Rank 1: 30 sampled steps, lowest S" in found.output
    assert "rank 1, step 33: danger: loss is nan" in found.output
    told = json.loads(CliRunner().invoke(main, ["grade", str(run), "--json"]).output)
    assert told["rank"] == 0
    (other,) = told["other_ranks"]
    assert (other["rank"], other["sampled_steps"]) == (1, 30)
    assert {(one["signal"], one["step"]) for one in other["alerts"]} == own
    assert len(told["grades"]) == 30


def test_rows_of_each_rank_are_stated(ranks: tuple[Path, list[GradeMonitor]]) -> None:
    signals = Run.open(ranks[0]).scan("signals").collect()
    rows = signals.filter((pl.col("signal") == "sample_rank") & (pl.col("layer") == -1))
    assert rows.group_by("rank").agg(pl.col("n_rows").unique()).sort("rank").rows() == [
        (0, [8]),
        (1, [8]),
    ]
