"""``auditor import`` as a user types it, and the commands after it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from auditor.cli import main
from auditor.cli.importing import _FORMATS
from auditor.explain.logs.recognise import READERS


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # a traceback is a bug
    return result


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """400 steps; the loss jumps at 300 and is not finite at 350, and the rate is logged."""
    loss = 3 + np.random.default_rng(0).normal(scale=0.05, size=400)
    loss[300] = 5.0
    loss[350] = np.nan
    path = tmp_path / "train.log"
    lines = [f"step:{step}/400 loss:{value:.4f} lr:1e-3" for step, value in enumerate(loss)]
    path.write_text("Training begins\n" + "\n".join(lines) + "\n")
    return path


def test_import_says_what_it_took_and_what_it_passed_over(log: Path, tmp_path: Path) -> None:
    result = run("import", log, "--out", tmp_path / "run")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"attempt 0: steps 0 to 399, text, {log}",
        "  loss        400 values, 1 of them not finite, from 'loss'",
        "  lr          400 values, from 'lr'",
        "  not in it   grad_norm, probe_loss",
        "No exposures: data can be neither blamed nor cleared.",
        f"Next: auditor report {tmp_path / 'run'}",
    ]
    assert result.stderr == (
        f"{log}: passed over 1 lines that are no records; the first is line 1: 'Training begins'\n"
    )


def test_report_finds_the_events_and_blames_no_data(log: Path, tmp_path: Path) -> None:
    run("import", log, "--out", tmp_path / "run")
    told = json.loads(run("report", tmp_path / "run", "--json").stdout)
    found = [(event["kind"], event["onset_step"]) for event in told["events"]]
    assert found == [("loss_spike", 300), ("non_finite", 350)]
    assert "data can be neither blamed nor cleared" in told["verdict"]
    assert told["culprit"] is None
    assert told["gaps"] == ["attempt 0, rank 0: 1 lines that are no records"]
    assert "<h1>" in (tmp_path / "run/derived/report.html").read_text()
    text = " ".join(run("report", tmp_path / "run").stdout.split())
    assert "Grades none: no rank was measured" in text
    assert "Not tested: no exposures were recorded." in text
    assert "No change proposed: no exposures were recorded" in text
    assert "Look at the batches" not in text


def test_other_commands_say_what_a_log_lacks(log: Path, tmp_path: Path) -> None:
    run("import", log, "--out", tmp_path / "run")
    for command in ("recover", "checkpoints"):
        assert run(command, tmp_path / "run").exit_code == 0, command
    for command, message in (
        ("grade", "no signals to grade"),
        ("exposures", "no exposure was recorded"),
    ):
        result = run(command, tmp_path / "run")
        assert result.exit_code == 1
        assert message in result.output


def test_json_has_attempts_signals_and_what_was_passed_over(log: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "resumed.jsonl"
    resumed.write_text('{"step": 390, "loss": 3}\n{"step": 391, "loss": 3, "aux_loss": 1}\n')
    result = run("import", log, resumed, "--out", tmp_path / "run", "--json")
    assert result.stderr == ""
    told = json.loads(result.stdout)
    first, second = told["attempts"]
    assert (first["format"], first["first_step"], first["last_step"]) == ("text", 0, 399)
    assert first["signals"]["loss"] == {
        "column": "loss",
        "others": [],
        "values": 400,
        "not_finite": 1,
    }
    assert first["passed_over"] == {"lines that are no records": 1}
    assert (second["format"], second["first_step"]) == ("jsonl", 390)
    assert second["signals"]["loss"]["others"] == ["aux_loss"]


def test_restart_and_choice_of_columns_are_told(log: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "resumed.csv"
    resumed.write_text("n,gen_loss,disc_loss\n390,3,2\n391,3,2\n")
    (tmp_path / "empty.log").touch()
    settings = ("--column", "step=n", "--out", tmp_path / "run")
    result = run("import", resumed, tmp_path / "empty.log", *settings)
    assert "loss could also be 'disc_loss': choose with --column loss=NAME" in result.stderr
    assert f"{tmp_path / 'empty.log'}: passed over: is empty" in result.stderr
    result = run("import", log, log, "--out", tmp_path / "twice")
    assert "attempt 1: steps 0 to 399, back from step 399, text" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--column", "speed=a"), 2, "is not SIGNAL=COLUMN with a signal of step, loss"),
        (("--column", "loss=ce"), 1, "has no column 'ce' for loss; it has 'loss', 'lr'"),
        (("--format", "wandb"), 2, "is not one of"),
        (("--format", "json"), 1, "line 1: no JSON"),
    ],
)
def test_what_cannot_be_done_is_said(
    log: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = run("import", log, "--out", tmp_path / "run", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


def test_nothing_is_written_over(log: Path, tmp_path: Path) -> None:
    result = run("import", log, "--out", tmp_path)
    assert result.exit_code == 1
    assert "is there already. Choose a new folder for --out" in result.stderr
    result = run("import", tmp_path / "none.log", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "there is no such file" in result.stderr


def test_names_from_a_log_are_not_live(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("step,\x1b[31mloss\x1b[2J,loss \u202eb\n1,2,3\n")
    result = run("import", path, "--out", tmp_path / "run")
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output


def test_formats_of_the_option_are_those_that_are_read() -> None:
    assert set(_FORMATS) == set(READERS)
