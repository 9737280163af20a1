"""Steps out of names, and checkpoints scored against signals whose course is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.errors import RunError
from auditor.explain.checkpoints import find_checkpoints, score, step_of
from auditor.explain.recovery import recovery_of
from auditor.record.checkpoints import append_checkpoint
from auditor.record.recorder import Recorder, recorder_for
from auditor.record.signals import frame_of, scalars_frame
from auditor.run import Run

NAMES = {
    # Hugging Face, Lightning, Megatron, DeepSpeed, OLMo, nanotron, Composer
    "checkpoint-500": 500,
    "epoch=0-step=500.ckpt": 500,
    "epoch=3-step=1200-v1.ckpt": 1200,
    "epoch=1-step=30-val_loss=2.31.ckpt": 30,
    "iter_0000500": 500,
    "global_step1000": 1000,
    "step1000-unsharded": 1000,
    "stage1-step2500-tokens11B": 2500,
    "ep2-ba4200-rank0.pt": 4200,
    # by hand
    "ckpt-17": 17,
    "step_00042.pt": 42,
    "step-7.safetensors": 7,
    "Step7": 7,
    "model_500.pt": 500,
    "500": 500,
    "500.pt": 500,
    "gpt2-7b-lr1e-4-3000.pt": 3000,
    "llama-7b-500": 500,
    "seed3-500": 500,
    "2026-03-01-500.tar": 500,
    "update12.pth.tar": 12,
    # nothing that is a step
    "epoch=3.ckpt": None,
    "model-v2.pt": None,
    "model-00001-of-00002.safetensors": None,
    "val_loss=2.31.ckpt": None,
    "rank0.pt": None,
    "2026-03-01": None,
    "last.ckpt": None,
    "llama-7b": None,
    "step10k": None,
    "deep7-500": 500,
    "": None,
    "step=" + "9" * 40: None,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_step_in_a_name(name: str) -> None:
    assert step_of(name) == NAMES[name]


@given(step=st.integers(0, 10**9), epoch=st.integers(0, 99), width=st.integers(1, 9))
def test_steps_are_read_whatever_their_padding(step: int, epoch: int, width: int) -> None:
    digits = str(step).rjust(width, "0")
    for name in (f"epoch={epoch}-step={digits}.ckpt", f"ckpt-{digits}", f"iter_{digits}.pt"):
        assert step_of(name) == step


@given(name=st.text(max_size=30))
def test_any_name_is_read_or_not_without_an_error(name: str) -> None:
    step = step_of(name)
    assert step is None or step >= 0


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(
        tmp_path,
        "hf/checkpoint-500/model-00001-of-00002.bin",
        "hf/checkpoint-500/model-00002-of-00002.bin",
        "hf/checkpoint-1000/model.bin",
        "hf/last/model.bin",
        "lit/epoch=0-step=500.ckpt",
        "lit/last.ckpt",
        "own/a9_s12x.pt",
        "own/a9_s7x.pt",
        "own/other.pt",
        "job7/weights.pt",
    )

    def found(pattern: str) -> tuple[list[tuple[str, int]], list[str]]:
        checkpoints, not_understood = find_checkpoints(pattern)
        return [(one.path, one.step) for one in checkpoints], not_understood

    folders = [("hf/checkpoint-500", 500), ("hf/checkpoint-1000", 1000)]
    assert found("hf/checkpoint-*") == (folders, [])
    assert found("hf/checkpoint-*/") == (folders, [])
    assert found("hf/*/*.bin") == (folders, ["hf/last/model.bin"])  # parts of one checkpoint
    assert found("lit/*.ckpt") == ([("lit/epoch=0-step=500.ckpt", 500)], ["lit/last.ckpt"])
    own = [("own/a9_s7x.pt", 7), ("own/a9_s12x.pt", 12)]
    assert found("own/a?_s{step}x.pt") == (own, [])
    assert found("**/a[0-9]_s{step}x.pt") == (own, [])
    assert found(str(tmp_path / "own/a9_s{step}x.pt"))[0][0][1] == 7
    assert found("job*/weights.pt") == ([], ["job7/weights.pt"])  # a folder's number is no step
    with pytest.raises(RunError, match="no checkpoint matches"):
        find_checkpoints("none/*")
    with pytest.raises(ValueError, match="once"):
        find_checkpoints("{step}/{step}")


# -- scores ----------------------------------------------------------------------------------

EVERY = 5


def record(recorder: Recorder, ratios: dict[int, float], losses: dict[int, float]) -> None:
    """Signals of these graded ratios: the raw ratio at its best, so that the column ratio rules."""
    for step, ratio in ratios.items():
        rows: list[dict[str, Any]] = [
            {"kind": "probe", "site": "b", "layer": 0, "signal": "token_rank", "variant": variant,
             "value": value, "n_rows": 512}
            for variant, value in (("raw", 0.9), ("column", ratio))
        ]  # fmt: skip
        rows.append({"kind": "probe", "signal": "probe_loss", "value": losses[step]})
        recorder.submit(
            lambda step=step, rows=rows: recorder.append_signals(frame_of(step, rows)), what="s"
        )
    steps = np.asarray(sorted(losses), np.int64)
    columns = {
        "step": steps,
        "loss": np.asarray([losses[step] for step in steps.tolist()]),
        "lr": np.full(len(steps), 1e-3),
        "grad_norm": np.full(len(steps), np.nan),
    }
    recorder.submit(lambda: recorder.append_signals(scalars_frame(columns)), what="s")
    assert recorder.drain()


def course(first: int, last: int, fall_at: int | None = None) -> dict[int, float]:
    return {
        step: 0.75 if fall_at is None or step < fall_at else 0.15
        for step in range(first, last, EVERY)
    }


def flat(first: int, last: int) -> dict[int, float]:
    return dict.fromkeys(range(first, last), 2.0)


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """Attempt 0 falls at step 300 and ends at 400; attempt 1 goes on from 200, healthy."""
    run = tmp_path / "run"
    recorder = recorder_for(run)
    record(recorder, course(0, 400, fall_at=300), flat(0, 400))
    recorder.close()
    recorder = recorder_for(run)
    record(recorder, course(200, 500), flat(200, 500))
    recorder.close()
    for attempt, step in ((0, 150), (0, 250), (0, 350), (1, 350), (1, 450)):
        path = tmp_path / f"saved/{attempt}-{step}"
        make(tmp_path, f"saved/{attempt}-{step}")
        for rank in (0, 1):  # every rank says so
            append_checkpoint(run, path, step, attempt=attempt, rank=rank)
    return run


def test_a_checkpoint_is_judged_by_the_attempt_that_saved_it(resumed: Path) -> None:
    """Step 350 was harmed in attempt 0 and is healthy in attempt 1, which trained it again."""
    scored = score(Run.open(resumed))
    rows = {(row["attempt"], row["step"]): row for row in scored.table.iter_rows(named=True)}
    assert sorted(rows) == [(0, 150), (0, 250), (0, 350), (1, 350), (1, 450)]
    assert rows[0, 350]["verdict"] == "after onset" and rows[0, 350]["grade"] == 1
    assert rows[1, 350]["verdict"] == "good" and rows[1, 350]["grade"] == 7
    assert rows[0, 250]["lowest_before"] == 7 and rows[0, 250]["lowest_after"] == 1
    assert [place for place, row in rows.items() if row["best"]] == [(1, 450)]
    assert {row["loss"] for row in rows.values()} == {2.0}
    assert {row["probe_loss"] for row in rows.values()} == {2.0}


def test_found_by_a_pattern_they_are_judged_by_the_run_as_it_went_on(resumed: Path) -> None:
    (resumed.parent / "found").mkdir()
    for step in (150, 350):
        make(resumed.parent, f"found/step_{step}.pt")
    scored = score(Run.open(resumed), str(resumed.parent / "found/*"))
    assert scored.table["grade"].to_list() == [7, 7]
    assert scored.table["attempt"].to_list() == [None, None]


def test_a_resumed_run_is_verified_from_where_it_resumed(resumed: Path) -> None:
    recovery = recovery_of(Run.open(resumed))
    assert recovery.plan.state == "none"
    assert recovery.resumed_step == 200
    assert recovery.verification is not None and recovery.verification.state == "running"
    assert recovery.verification.n_steps == 295


def test_an_attempt_that_merely_goes_on_is_no_recovery(tmp_path: Path) -> None:
    for first in (0, 200):
        recorder = recorder_for(tmp_path / "run")
        record(recorder, course(first, first + 200), flat(first, first + 200))
        recorder.close()
    assert recovery_of(Run.open(tmp_path / "run")).verification is None


def test_a_probe_loss_that_rose_before_the_grade_fell_tells_the_onset(tmp_path: Path) -> None:
    recorder = recorder_for(tmp_path / "run")
    losses = {step: 2.0 if step < 270 else 2.5 for step in range(400)}
    record(recorder, course(0, 400, fall_at=300), losses)
    recorder.close()
    for step in (250, 290):
        make(tmp_path, f"ckpt-{step}")
    recovery = recovery_of(Run.open(tmp_path / "run"), str(tmp_path / "ckpt-*"))
    assert recovery.plan.drop is not None
    assert (recovery.plan.drop.onset_low, recovery.plan.drop.onset_high) == (265, 270)
    assert recovery.plan.checkpoint is not None and recovery.plan.checkpoint.step == 250
    verdicts = dict(recovery.scored.table.select("step", "verdict").iter_rows())
    assert verdicts == {250: "good", 290: "after onset"}
    assert recovery.plan.learning_rate == pytest.approx(1e-3 / 3)  # S1: severe
