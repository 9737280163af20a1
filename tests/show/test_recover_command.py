"""``auditor recover`` and ``auditor checkpoints``, on a training whose learning rate was raised."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.cells import cell_len
from rich.console import Console
from torch.utils.data import DataLoader

from auditor import AuditedSampler, GradeMonitor, Run
from auditor.clean.mixes import MixSampler
from auditor.cli import main
from auditor.demo.corpus import BATCH_SAMPLES, WEIGHTS, WINDOW_BYTES, ShardRows, build, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.explain.checkpoints import score
from auditor.record.checkpoints import append_checkpoint
from auditor.show.recovery import print_checkpoints

SPIKE_STEP = 200
STEPS = 260
SAVED_EVERY = 40
RATE, SPIKE_FACTOR = 2e-3, 15.0


def run_command(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # a traceback is a bug
    return result


def as_json(*arguments: object) -> dict[str, Any]:
    result = run_command(*arguments, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output, parse_constant=lambda name: pytest.fail(name))
    assert isinstance(document, dict)
    return document


def train(
    folder: Path, *, first_step: int, steps: int, spike_step: int | None, resume: Path | None = None
) -> list[float]:
    """The demo's model with a checkpoint every 40 steps, registered; returns the losses."""
    corpus = build(folder / "data", seed=0, steps=STEPS, plant=False)
    torch.manual_seed(first_step)
    model = GPT(GPTConfig(n_positions=WINDOW_BYTES - 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    if resume is not None:
        model.load_state_dict(torch.load(resume)["model"])
    dataset = ShardRows(corpus.shards)
    sampler = MixSampler(dataset.sources, WEIGHTS, first_step, steps * BATCH_SAMPLES)
    plain = DataLoader(dataset, batch_size=BATCH_SAMPLES, sampler=sampler, collate_fn=collate)
    run = folder / "run"
    loader = AuditedSampler(plain, run=run, start_step=first_step)
    monitor = GradeMonitor(model, run=run, every=5, probe=corpus.probe, probe_loss=next_byte_loss)
    attempt = 0 if resume is None else 1
    losses = []
    for step, batch in enumerate(loader, first_step):
        rate = RATE * min(1.0, (step + 1) / 20)
        if spike_step is not None and step >= spike_step:
            rate *= SPIKE_FACTOR
        optimizer.param_groups[0]["lr"] = rate
        loss = next_byte_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.step(loss, optimizer=optimizer, step=step, grad_norm=grad_norm)
        optimizer.step()
        losses.append(loss.item())
        if step % SAVED_EVERY == 0 and step:
            path = folder / f"saved/attempt{attempt}/step={step}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict()}, path)
            append_checkpoint(run, path, step, attempt=attempt, rank=0)
        if step + 1 == first_step + steps:
            break
    monitor.close()
    return losses


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("spiked")
    return folder, train(folder, first_step=0, steps=STEPS, spike_step=SPIKE_STEP)


def test_the_plan_goes_back_before_the_learning_rate_rose(spiked: tuple[Path, list[float]]) -> None:
    """The spike is planted: onset, checkpoint and rates are known from the loop."""
    folder, _ = spiked
    document = as_json("recover", folder / "run")
    assert document["state"] == "danger"
    assert document["drop"]["onset_low"] == SPIKE_STEP  # measured before that step's update
    assert document["drop"]["onset_high"] == SPIKE_STEP + 5
    # That of step 200 was saved after the first update at the raised rate.
    assert document["checkpoint"]["step"] == 160
    assert document["checkpoint_is_good"]
    assert Path(document["checkpoint"]["path"]).is_file()
    assert document["usual_learning_rate"] == pytest.approx(RATE)
    factor = 1 / 3 if document["drop"]["severe"] else 0.5
    assert document["learning_rate"] == pytest.approx(RATE * factor)
    low, high = document["skip_steps"]
    assert low == document["drop"]["onset_low"] - 40
    assert high == document["drop"]["trough_step"]
    assert document["reset_optimizer"] and document["verify_steps"] == 1000
    assert document["verification"] is None

    text = " ".join(run_command("recover", folder / "run").output.split())
    assert "It rose 15 times at the onset" in text
    assert f"Skip the batches of steps {low} to {high}" in text
    assert "Verify for 1,000 steps" in text


def test_checkpoints_are_scored_against_what_the_loop_saw(
    spiked: tuple[Path, list[float]],
) -> None:
    folder, losses = spiked
    document = as_json("checkpoints", folder / "run")
    rows = document["checkpoints"]
    assert [row["step"] for row in rows] == list(range(SAVED_EVERY, STEPS, SAVED_EVERY))
    for row in rows:
        step = row["step"]
        recent = sorted(losses[max(0, step - 49) : step + 1])
        n = len(recent)
        median = (recent[(n - 1) // 2] + recent[n // 2]) / 2
        assert row["loss"] == pytest.approx(median, abs=1e-5)
        assert row["graded_step"] == step  # sampled every 5 steps
        assert row["exists"] and row["attempt"] == 0
        assert row["probe_loss"] is not None
    by_step = {row["step"]: row for row in rows}
    assert by_step[240]["verdict"] == "after onset"
    assert by_step[200]["verdict"] == "suspect"  # holds the first update at the raised rate
    assert by_step[160]["verdict"] == "good"
    assert by_step[160]["lowest_after"] < by_step[160]["lowest_before"]
    best = as_json("recover", folder / "run")["checkpoint"]["path"]
    assert document["best"] == best
    assert [row["path"] for row in rows if row["best"]] == [best]

    printed = run_command("checkpoints", folder / "run").output
    assert re.findall(r"^ *\* +\S+ +(\d+) ", printed, re.MULTILINE) == ["160"]


def test_patterns_find_the_same_checkpoints(spiked: tuple[Path, list[float]]) -> None:
    folder, _ = spiked
    registered = as_json("checkpoints", folder / "run")
    for pattern in ("saved/attempt0/*.pt", "saved/*/step={step}.pt"):
        found = as_json("checkpoints", folder / "run", "--checkpoints", folder / pattern)
        assert found["best"] == registered["best"]
        for one, other in zip(found["checkpoints"], registered["checkpoints"], strict=True):
            assert {**one, "attempt": 0} == other
    result = run_command("checkpoints", folder / "run", "--checkpoints", folder / "none-*")
    assert result.exit_code == 1 and "no checkpoint matches" in result.output
    result = run_command("recover", folder / "run", "--checkpoints", "{step}/{step}")
    assert result.exit_code == 2 and "once" in result.output


def test_a_checkpoint_that_is_gone_is_not_chosen(
    spiked: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder, _ = spiked
    best = Path(as_json("recover", folder / "run")["checkpoint"]["path"])
    moved = best.rename(tmp_path / "moved.pt")
    try:
        document = as_json("recover", folder / "run")
        assert document["checkpoint"]["step"] == 160 - SAVED_EVERY
        assert "not there any more" in run_command("checkpoints", folder / "run").output
    finally:
        shutil.move(moved, best)


def test_following_the_plan_recovers_and_is_verified(
    spiked: tuple[Path, list[float]], tmp_path: Path
) -> None:
    """Resumed from the checkpoint at the cut rate: no drop any more, verification under way."""
    folder = tmp_path / "resumed"
    shutil.copytree(spiked[0], folder)
    plan = as_json("recover", folder / "run")
    step = plan["checkpoint"]["step"]
    train(
        folder, first_step=step + 1, steps=140, spike_step=None,
        resume=Path(plan["checkpoint"]["path"]),
    )  # fmt: skip
    document = as_json("recover", folder / "run")
    assert document["state"] == "none"
    assert document["verification"]["state"] == "running"
    assert document["verification"]["resumed_step"] == step + 1
    assert document["verification"]["n_steps"] > 100
    text = " ".join(run_command("recover", folder / "run").output.split())
    assert "No drop found: nothing to recover from" in text
    assert "running: resumed at step" in text
    # What the first attempt saved after the onset is as harmed as it was.
    verdicts = {
        (row["attempt"], row["step"]): row["verdict"]
        for row in as_json("checkpoints", folder / "run")["checkpoints"]
    }
    assert verdicts[0, 240] == "after onset"
    assert verdicts[1, 280] == "good"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_is_printed_keeps_to_the_width(spiked: tuple[Path, list[float]], width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False)
    print_checkpoints(console, score(Run.open(spiked[0] / "run")))
    assert all(cell_len(line) <= width for line in out.getvalue().splitlines())


def test_a_run_without_checkpoints_says_how_to_name_them(tmp_path: Path) -> None:
    model = GPT(GPTConfig(n_positions=16, width=16, n_blocks=1))
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1)
    monitor.step(math.nan)
    monitor.close()
    assert "--checkpoints" in run_command("checkpoints", tmp_path / "run").output
    assert "Not judged" in run_command("recover", tmp_path / "run").output
    document = as_json("recover", tmp_path / "run")
    assert document["state"] == "none" and document["steps"] == []
    assert as_json("checkpoints", tmp_path / "run")["checkpoints"] == []


def test_hostile_names_are_printed_inert(tmp_path: Path) -> None:
    model = GPT(GPTConfig(n_positions=16, width=16, n_blocks=1))
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1)
    monitor.step(1.0)
    monitor.close()
    name = "\x1b[31m[bold]evil\u202e"
    append_checkpoint(tmp_path / "run", tmp_path / f"{name}.pt", 0, attempt=0, rank=0)
    (tmp_path / f"{name}.ckpt").touch()
    arguments = ["--checkpoints", tmp_path / "*.ckpt"]
    for command in (["checkpoints"], ["checkpoints", *arguments], ["recover", *arguments]):
        printed = run_command(command[0], tmp_path / "run", *command[1:]).output
        assert "\x1b" not in printed and "\u202e" not in printed
        if command != ["checkpoints"]:
            assert "No step in the name" in printed
