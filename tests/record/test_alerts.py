"""From a damaged model to what a person is told, and what is done about it: a real monitor."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from auditor import AuditedSampler, GradeMonitor, Run
from auditor.cli import main
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.explain.grades import alerts_of, judgements_of, step_alerts_of
from auditor.measure.grading import Alert, Policy
from auditor.record.actions import StopTraining
from auditor.record.exporters import JSONLines
from auditor.record.monitor import NOT_KNOWN
from auditor.record.signals import scalars_frame

EARLY = Policy(warmup_samples=1, warmup_steps=10)
"""So that a short run can alarm."""

DAMAGE_STEP, STEPS = 130, 260


def windows(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n, 17), generator=torch.Generator().manual_seed(seed))


def damage(model: GPT) -> None:
    """One direction common to all positions drowns the others."""
    with torch.no_grad():
        model.blocks[1].mlp[2].bias += 300.0 * torch.randn(
            32, generator=torch.Generator().manual_seed(1)
        )


def train(run: Path, **options: Any) -> GradeMonitor:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=16, width=32, n_heads=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    options = {"every": 60, "budget": 1.0, "policy": EARLY, **options}
    monitor = GradeMonitor(
        model, run=run, probe=windows(8, seed=5), probe_loss=next_byte_loss, **options
    )
    for step in range(STEPS):
        if step == DAMAGE_STEP:
            damage(model)
        loss = next_byte_loss(model, windows(4, seed=step))
        optimizer.zero_grad()
        loss.backward()
        monitor.step(loss, optimizer=optimizer)
        optimizer.step()
        if step % 30 == 0:
            monitor.flush()  # a real step is slower than the analysis; this one is not
        if step == 100:
            (run.parent / "ckpt-100").mkdir()
            monitor.checkpoint(run.parent / "ckpt-100")
        if monitor.should_stop:
            break
    monitor.close()
    assert not monitor._recorder.failures
    return monitor


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GradeMonitor]:
    run = tmp_path_factory.mktemp("damaged") / "run"
    return run, train(run)


def test_suspicious_sample_brings_the_next_one_forward(damaged: tuple[Path, GradeMonitor]) -> None:
    _, monitor = damaged
    steps = [grade.step for grade in monitor.grades]
    assert steps[:4] == [0, 60, 120, 180]
    assert steps[4] == 210  # at every=60 it would have been 240


def test_damage_is_told_once_with_step_grade_and_block(damaged: tuple[Path, GradeMonitor]) -> None:
    _, monitor = damaged
    of_grade = [alert for alert in monitor.alerts if alert.signal == "grade"]
    assert [(alert.level, alert.step, alert.layer) for alert in of_grade] == [("danger", 210, 1)]


def test_alerts_of_a_finished_run_are_those_that_were_raised_live(
    damaged: tuple[Path, GradeMonitor],
) -> None:
    run, monitor = damaged
    signals = Run.open(run).scan("signals").collect()
    again = alerts_of(judgements_of(signals, EARLY), step_alerts_of(signals, EARLY))
    assert again == monitor.alerts


def probe_failing(at: Collection[int]) -> Callable[[], torch.Tensor]:
    """A probe for samples of which these, by number, fail."""
    samples = itertools.count()

    def probe() -> torch.Tensor:
        if next(samples) in at:
            raise FileNotFoundError("the held-out batch is gone")
        return windows(8, seed=5)

    return probe


@pytest.mark.parametrize(
    ("failing", "graded", "steps"),
    [
        (range(100), "live", range(0, 60, 5)),  # it never worked
        ([0], "live", range(0, 60, 5)),  # it stays what it was: the two are not compared
        ([3, 4], "probe", [*range(0, 15, 5), *range(25, 60, 5)]),  # those samples are left out
    ],
)
def test_failing_probe_silences_no_grade_and_live_is_graded_as_offline(
    failing: Collection[int], graded: str, steps: Sequence[int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    run, model = tmp_path / "run", GPT(GPTConfig(n_positions=16, width=32, n_heads=2))
    monitor = GradeMonitor(
        model, run=run, every=5, policy=EARLY, probe=probe_failing(failing),
        probe_loss=next_byte_loss,
    )  # fmt: skip
    for step in range(60):
        if step == 35:
            damage(model)
        loss = next_byte_loss(model, windows(4, seed=step))
        loss.backward()
        model.zero_grad()
        monitor.step(loss)
    monitor.close()
    assert [grade.step for grade in monitor.grades] == list(steps)
    assert ("grade", "danger") in {(alert.signal, alert.level) for alert in monitor.alerts}
    found = CliRunner().invoke(main, ["grade", str(run), "--json"])
    offline = json.loads(found.output)
    assert offline["kind"] == graded
    assert {row["kind"] for row in offline["grades"]} == {graded}
    assert [row["step"] for row in offline["grades"]] == list(steps)
    assert offline["live"] == {"sampled_steps": len(steps), "graded_otherwise": 0}
    assert sorted(alert["message"] for alert in offline["alerts"]) == sorted(
        alert.message for alert in monitor.alerts
    )


def test_training_that_goes_on_after_the_sampler_was_closed_is_judged_anew_live_and_offline(
    tmp_path: Path,
) -> None:
    """It is recorded as another attempt."""
    torch.manual_seed(0)
    run, model = tmp_path / "run", GPT(GPTConfig(n_positions=16, width=32, n_heads=2))
    loader = AuditedSampler(DataLoader(TensorDataset(windows(80)), batch_size=4), run=run)
    monitor = GradeMonitor(model, run=run, every=2, policy=EARLY)
    for (batch,) in loader:
        next_byte_loss(model, batch).backward()
        model.zero_grad()
        monitor.step(1.0)
    loader.close()
    for step in range(20):
        next_byte_loss(model, windows(4, seed=step)).backward()
        model.zero_grad()
        monitor.step(1.0)
    monitor.close()
    judged = list(judgements_of(Run.open(run).scan("signals").collect(), EARLY))
    assert [attempt for attempt, _ in judged] == [0] * 10 + [1] * 10
    assert [judgement.grade for _, judgement in judged] == monitor.grades
    assert [grade.alert for grade in monitor.grades[10:15]] == ["warming"] * 5


@pytest.mark.parametrize("layer", [1, 2])
def test_block_that_dies_is_danger_and_named_live_and_offline(layer: int, tmp_path: Path) -> None:
    """A block that puts out zeros from some step on; the blocks after it go on."""
    torch.manual_seed(0)
    run = tmp_path / "run"
    model = GPT(GPTConfig(n_positions=16, width=32, n_heads=2, n_blocks=3))
    monitor = GradeMonitor(
        model, run=run, every=5, policy=EARLY, probe=windows(8, seed=5), probe_loss=next_byte_loss
    )
    for step in range(45):
        if step == 28:
            model.blocks[layer].register_forward_hook(lambda *of_call: of_call[-1] * 0)
        loss = next_byte_loss(model, windows(4, seed=step))
        loss.backward()
        model.zero_grad()
        monitor.step(loss)
    monitor.close()
    (alert,) = [alert for alert in monitor.alerts if alert.signal == "grade"]
    assert (alert.step, alert.level, alert.layer) == (30, "danger", layer)
    assert f"block {layer} has no rank ratio" in alert.message
    grades = monitor.grades
    assert [(grade.grade, grade.layer) for grade in grades if grade.step >= 30] == [
        (None, layer)
    ] * 3
    signals = Run.open(run).scan("signals").collect()
    judged = [one for _, one in judgements_of(signals, EARLY)]
    assert [repr(one.grade) for one in judged] == [repr(grade) for grade in grades]
    assert [a.message for one in judged for a in one.alerts if a.signal == "grade"] == [
        alert.message
    ]


class SyncCounter(TorchDispatchMode):
    """Counts reads of single values, each of which makes the host wait for a device."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.n += 1
        return func(*args, **(kwargs or {}))


def train_on(
    run: Path,
    losses: Mapping[int, float] | None = None,
    norms: Mapping[int, float] | None = None,
    *,
    n: int = 120,
    skipped: Collection[int] = (),
    **options: Any,
) -> tuple[GradeMonitor, int]:
    """Steps of which some are told a loss or norm of our choice; updates that are skipped.

    Also how often an unsampled step read a value.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=16, width=32, n_heads=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = GradeMonitor(model, run=run, every=50, budget=0.0, **options)
    counter = SyncCounter()
    loader = AuditedSampler(DataLoader(TensorDataset(windows(4 * n)), batch_size=4), run=run)
    for number, (batch,) in enumerate(loader):
        loss = next_byte_loss(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        told_loss = loss.detach() * 0 + (losses or {}).get(number, 1.0)
        told_norm = norm * 0 + (norms or {}).get(number, 1.0)
        sampled = monitor._live.seen
        with contextlib.nullcontext() if sampled else counter:
            monitor.step(told_loss, optimizer=optimizer, grad_norm=told_norm)
        if number in skipped:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    return monitor, counter.n


def told(alerts: Sequence[Alert]) -> set[tuple[int, str, str]]:
    return {(alert.step, alert.signal, alert.level) for alert in alerts}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_is_danger_at_any_step_without_waiting_for_the_device(
    value: float, tmp_path: Path
) -> None:
    monitor, n_reads = train_on(tmp_path / "run", losses={37: value}, norms={52: value})
    assert n_reads == 0
    assert told(monitor.alerts) == {
        (37, "loss", "danger"),
        (52, "grad_norm", "danger"),
        (87, "loss", "recovered"),  # 50 finite steps later
        (102, "grad_norm", "recovered"),
    }
    assert not monitor._recorder.failures
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    again = alerts_of(judgements_of(signals), step_alerts_of(signals))
    assert [one.message for one in again] == [
        one.message for one in sorted(monitor.alerts, key=lambda one: one.step)
    ]
    command = CliRunner().invoke(main, ["grade", str(tmp_path / "run")])
    assert "step 37: danger: loss is" in command.output


def frames_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the frames of scalars that are sent from now on."""
    sent: list[int] = []

    def noted(columns: Mapping[str, Any]) -> Any:
        sent.append(len(columns["step"]))
        return scalars_frame(columns)

    monkeypatch.setattr("auditor.record.monitor.scalars_frame", noted)
    return sent


def test_last_step_is_judged_and_a_long_stretch_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, _ = train_on(tmp_path / "last", losses={19: math.nan}, n=20)
    assert told(last.alerts) == {(19, "loss", "danger")}
    stretch = dict.fromkeys(range(30, 120), math.nan)
    sent = frames_sent(monkeypatch)
    monitor, _ = train_on(tmp_path / "run", losses=stretch)
    assert told(monitor.alerts) == {(30, "loss", "danger")}
    # Copied in bulk again once it is told, not step by step for the rest of the run.
    assert len(sent) < 12


def test_overflow_of_a_step_that_is_tried_again_is_no_alert(tmp_path: Path) -> None:
    """Mixed precision does that every few thousand steps, and leaves the update out."""
    monitor, _ = train_on(
        tmp_path / "run", norms={0: math.inf, 33: math.inf, 34: math.nan}, skipped={0, 33, 34}
    )
    assert not monitor.alerts
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    assert not list(step_alerts_of(signals))


def test_loss_and_norm_that_are_not_known_are_no_alert_and_no_row(tmp_path: Path) -> None:
    """As of a Trainer that does not clip; any other NaN was measured."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=16, width=32, n_heads=2))
    monitor = GradeMonitor(model, run=tmp_path / "run", every=5)
    for step in range(20):
        next_byte_loss(model, windows(2, seed=step)).backward()
        known = step % 4 == 0
        monitor.step(
            1.0 if known else NOT_KNOWN,
            grad_norm=NOT_KNOWN if step != 13 else float("nan"),
        )
    monitor.close()
    assert told(monitor.alerts) == {(13, "grad_norm", "danger")}
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    losses = signals.filter(pl.col("signal") == "loss").sort("step")
    assert losses["step"].to_list() == [0, 4, 8, 12, 16]
    norms = signals.filter(pl.col("signal") == "grad_norm")
    assert norms.select("step", "value").rows() == [(13, math.inf)]
    assert [alert.step for _, alert in step_alerts_of(signals)] == [13]


def test_fault_in_judging_steps_is_counted_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("auditor.record.monitor.StepJudge.update", broken)
    monitor, _ = train_on(tmp_path / "run", losses={5: math.nan})
    assert sum(monitor._recorder.failures.values()) >= 1
    losses = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "loss").collect()
    assert len(losses) == 120  # recorded all the same


def test_actions_run_on_the_training_thread_and_what_they_raise_stays_there(
    tmp_path: Path,
) -> None:
    seen: list[tuple[Alert, str]] = []

    def note(alert: Alert, monitor: GradeMonitor) -> None:
        seen.append((alert, threading.current_thread().name))

    def broken(alert: Alert, monitor: GradeMonitor) -> None:
        raise RuntimeError("a fault of the action")

    torch.manual_seed(0)
    run = tmp_path / "run"
    model = GPT(GPTConfig(n_positions=16, width=32, n_heads=2))
    monitor = GradeMonitor(
        model, run=run, every=10, policy=EARLY, on_alert=[broken, note, StopTraining()]
    )
    for step in range(60):
        if step == 35:
            damage(model)
        loss = next_byte_loss(model, windows(4, seed=step))
        loss.backward()
        monitor.step(loss)
        monitor.flush()
        if monitor.should_stop:
            break
    assert step < 59
    monitor.close()
    assert seen[0][0].level == "danger"
    assert {thread for _, thread in seen} == {threading.main_thread().name}
    assert monitor._recorder.failures["action broken"] >= 1


def test_without_actions_nothing_is_done(damaged: tuple[Path, GradeMonitor]) -> None:
    _, monitor = damaged
    assert monitor.alerts
    assert not monitor.should_stop


def test_recovery_plan_names_the_checkpoint_from_before_the_damage(
    damaged: tuple[Path, GradeMonitor],
) -> None:
    run, monitor = damaged
    assert f"{run.parent / 'ckpt-100'}" in str(monitor.recovery_plan())
    found = CliRunner().invoke(main, ["recover", str(run), "--json"])
    assert found.exit_code == 0, found.output
    plan = json.loads(found.output)
    assert plan["checkpoint"]["path"] == str(run.parent / "ckpt-100")
    # Both say by what they tell the onset.
    live = monitor.recovery_plan()
    assert live.drop is not None
    assert "The onset is that of the grade alone" in str(live)
    moved = plan["drop"]["onset_high"] < live.drop.onset_high
    by_grade = f"after step {live.drop.onset_low}, by step {live.drop.onset_high}"
    told = f"as monitor.recovery_plan() has it, it lies {by_grade}"
    assert (told if moved else "The onset is that of the grade") in plan["summary"]


def test_grade_command_grades_as_live_and_by_other_thresholds(
    damaged: tuple[Path, GradeMonitor], tmp_path: Path
) -> None:
    run, monitor = damaged
    found = CliRunner().invoke(main, ["grade", str(run), "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.output)
    assert told["policy"] == asdict(EARLY)  # the run's own
    assert [row["grade"] for row in told["grades"]] == [g.grade for g in monitor.grades]
    assert told["live"] == {"sampled_steps": len(monitor.grades), "graded_otherwise": 0}
    assert [alert["message"] for alert in told["alerts"]] == [a.message for a in monitor.alerts]
    settings = tmp_path / "late.toml"
    settings.write_text("[policy]\nconfirm_samples = 50\n")
    late = CliRunner().invoke(main, ["grade", str(run), "--policy", str(settings)])
    assert "danger: grade" not in late.output
    assert "S0" in late.output
    wrong = CliRunner().invoke(main, ["grade", str(run), "--set", "danger=1"])
    assert wrong.exit_code == 2
    assert "danger_grade" in wrong.output


def test_exporters_get_sampled_signals_and_the_scalars_of_every_step(tmp_path: Path) -> None:
    monitor = train(tmp_path / "run", exporters=[JSONLines(tmp_path / "metrics.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["auditor/loss"] for line in lines if "auditor/loss" in line}
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    recorded = signals.filter(pl.col("signal") == "loss").sort("step")
    assert sorted(losses) == recorded["step"].to_list() == list(range(STEPS))
    assert [losses[step] for step in range(STEPS)] == pytest.approx(recorded["value"].to_list())
    grades = {line["step"]: line["auditor/grade"] for line in lines if "auditor/grade" in line}
    assert grades == {grade.step: grade.grade for grade in monitor.grades}


def test_learning_rate_that_is_a_tensor_is_recorded_as_it_was_at_the_step(tmp_path: Path) -> None:
    model = GPT(GPTConfig(n_positions=16, width=32, n_heads=2))
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    monitor = GradeMonitor(model, run=tmp_path / "run", every=100)
    for step in range(3):
        loss = next_byte_loss(model, windows(2, seed=step))
        loss.backward()
        monitor.step(loss, optimizer=optimizer)
        optimizer.param_groups[0]["lr"].mul_(0.5)
    monitor.close()
    rates = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "lr").collect()
    assert rates.sort("step")["value"].to_list() == [0.5, 0.25, 0.125]


def test_samples_that_come_too_fast_are_dropped_and_counted_and_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = GPT(GPTConfig(n_positions=16, width=32, n_heads=2))
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1)
    monkeypatch.setattr("auditor.record.monitor.WAITING_BYTES", 200_000)
    slow = threading.Event()
    judge = monitor._judge.update
    monkeypatch.setattr(
        monitor._judge, "update", lambda *of_step: (slow.wait(30), judge(*of_step))[1]
    )
    for step in range(20):
        loss = next_byte_loss(model, windows(2, seed=step))
        loss.backward()
        monitor.step(loss)
    assert monitor._bytes_sent - monitor._bytes_analysed <= 200_000
    slow.set()
    monitor.close()
    assert 1 <= len(monitor.grades) < 20
    assert any("dropped samples" in gap for gap in Run.open(tmp_path / "run").gaps())
    losses = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "loss").collect()
    assert len(losses) == 20
