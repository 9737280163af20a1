"""Training logs of other tools: what is read from each format, and what is said of the rest.

The formats are written here as the tools write them; ``test_logs_real.py`` reads real ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from auditor import Run
from auditor.explain.logs.columns import Columns, choose, role_of
from auditor.explain.logs.importing import import_logs
from auditor.explain.logs.log import Log, LogError, NoRecordError
from auditor.explain.logs.recognise import format_of, read_log

MEGATRON = """\
 iteration       10/    1000 | consumed samples:         2560 | elapsed time per iteration (ms): \
18706.1 | learning rate: 6.000E-05 | global batch size:   256 | lm loss: 6.444662E+00 | loss \
scale: 2048.0 | grad norm: 3.258 | num zeros: 0.0 | number of skipped iterations:   0 | number of \
nan iterations:   0 |
 validation loss at iteration 10 | lm loss value: 7.174200E+00 | lm loss PPL: 1.305315E+03 |
"""
LLM_C = "s:0 tel:11.0\ns:0 trl:10.9\ns:1 trl:10.8\n"
LLM_C_SCREEN = (
    "step    5/100 | loss 7.2 (+0.1z)| norm 1.9 (-0.2z)| lr 6.00e-05 | 100.2 ms | 52 tok/s\n"
)
MODDED_NANOGPT = """\
nvidia-smi:
|   0  NVIDIA H100 80GB HBM3          On  | 00000000:19:00.0 Off |                    0 |
step:0/1530 val_loss:10.8258 train_time:0ms step_avg:nanms
step:1/1530 train_loss:10.7 train_time:31559ms step_avg:nanms
"""
NANOGPT = """\
step 0: train loss 4.3, val loss 4.2
iter 0: loss 4.1, time 12ms, mfu 3.2%
iter 10: loss 4, time 9ms
"""
TORCHTITAN = (
    "[titan] 2025-01-01 12:00:00,1 - root - INFO - \x1b[31mstep:  7  \x1b[32mloss:  8.1  "
    "\x1b[38mgrad_norm:  1.4 \x1b[34mmemory: 47.1GiB(59%)  tps: 1,234\x1b[39m\n"
)
FAIRSEQ = (
    '2021-11 | INFO | {"epoch": 1, "num_updates": "8", "loss": "7.1", "gnorm": "2", "lr": "3e-5"}\n'
)

Values = dict[str, dict[int, float]]


def written(folder: Path, text: str, name: str = "a.log") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def imported(folder: Path, text: str, *columns: str, format: str | None = None) -> Values:
    """Values by signal and step of a log, as the run directory has them."""
    import_logs([written(folder, text)], folder / "run", columns=Columns.of(columns), format=format)
    return signals(folder / "run")


def signals(run: Path) -> Values:
    found: Values = {}
    for row in Run.open(run).scan("signals").collect().iter_rows(named=True):
        value = math.nan if row["value"] is None else row["value"]
        found.setdefault(row["signal"], {})[row["step"]] = value
        assert row["kind"] == ("probe" if row["signal"] == "probe_loss" else "step")
    return found


# -- text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            MEGATRON,
            {
                "loss": {10: 6.444662},
                "grad_norm": {10: 3.258},
                "lr": {10: 6e-5},
                "probe_loss": {10: 7.1742},
            },
        ),
        (LLM_C, {"loss": {0: 10.9, 1: 10.8}, "probe_loss": {0: 11.0}}),
        (LLM_C_SCREEN, {"loss": {5: 7.2}, "grad_norm": {5: 1.9}, "lr": {5: 6e-5}}),
        (MODDED_NANOGPT, {"loss": {1: 10.7}, "probe_loss": {0: 10.8258}}),
        (NANOGPT, {"loss": {0: 4.1, 10: 4.0}, "probe_loss": {0: 4.2}}),
        (TORCHTITAN, {"loss": {7: 8.1}, "grad_norm": {7: 1.4}}),
        (FAIRSEQ, {"loss": {8: 7.1}, "grad_norm": {8: 2.0}, "lr": {8: 3e-5}}),
        ("1 8.049\n2 7.751\n3 nan\n", {"loss": {1: 8.049, 2: 7.751, 3: math.nan}}),
        ("step 1,200 | Loss = -3.5\r\n", {"loss": {1200: -3.5}}),
    ],
    ids=[
        "megatron",
        "llm.c",
        "screen",
        "modded",
        "nanogpt",
        "torchtitan",
        "fairseq",
        "two",
        "minus",
    ],
)
def test_text_logs(tmp_path: Path, text: str, expected: Values) -> None:
    found = imported(tmp_path, text)
    assert found.keys() == expected.keys()
    for signal, values in expected.items():
        assert found[signal] == pytest.approx(values, nan_ok=True)


def test_two_columns_with_lines_that_are_none(tmp_path: Path) -> None:
    text = "1 8.0\n2 7.0\n3 6.0\n4 1.2.3\n5\n99999999999999999999 1\n"
    log = read_log(written(tmp_path, text), Columns())
    assert (log.format, log.n_records) == ("two-columns", 3)
    ((_, skipped),) = log.skipped.items()
    assert (skipped.count, skipped.first) == (3, "line 4: '4 1.2.3'")


def test_progress_bar_that_wrote_over_itself_is_several_lines(tmp_path: Path) -> None:
    assert imported(tmp_path, "step: 1 loss: 3\rstep: 2 loss: 2\n")["loss"] == {1: 3.0, 2: 2.0}


@pytest.mark.parametrize(
    "line",
    [
        "At 35250 step, the loss explodes again; almost the same behaviour as in 33700 step",
        "Somewhere between iteration 7000 and 7010 lm loss jumped from 6.4 to 14",
        "- Restarting from 42700 step; reducing minimum lr from 8e-6 to 4e-6",
        "- rolled back to iteration 3k - so earlier than 6210",
        "saving checkpoint at iteration   33241 to checkpoints/global_step33241",
        "Round1 SAVE_INTERVAL=10",
    ],
)
def test_prose_about_steps_is_no_record(tmp_path: Path, line: str) -> None:
    with pytest.raises(NoRecordError, match=r"no record was found: 1 .*line 1: .*give the log"):
        read_log(written(tmp_path, line), Columns())


def test_lines_that_are_no_records_are_counted_and_the_first_is_told(tmp_path: Path) -> None:
    text = "Training begins\nstep: 1 loss: 3.0\nno luck\n{'loss': 0.5, 'epoch': 0.1}\n"
    log = read_log(written(tmp_path, text), Columns())
    assert {what: (one.count, one.first) for what, one in log.skipped.items()} == {
        "lines that are no records": (2, "line 1: 'Training begins'"),
        "records without a step": (1, "line 4: \"{'loss': 0.5, 'epoch': 0.1}\""),
    }


def test_identifiers_need_no_mark_before_their_number(tmp_path: Path) -> None:
    text = (
        "step 1 train_loss 3.5 lr 1e-3 seen 900\nstep 2 train/loss 3.25 grad_norm 0.5 seen 1800\n"
    )
    log = read_log(written(tmp_path, text), Columns())
    assert log.names == {"train_loss": 1, "lr": 1, "train/loss": 1, "grad_norm": 1}
    assert log.series("train_loss")[-1].tolist() == [3.5]


# -- tables ----------------------------------------------------------------------------------


def test_csv_has_train_and_validation_in_different_rows(tmp_path: Path) -> None:
    text = "epoch,step,train_loss,val_loss\n0,9,,0.3\n0,19,0.5,\n0,19,,0.25\n"
    assert imported(tmp_path, text) == {"loss": {19: 0.5}, "probe_loss": {9: 0.3, 19: 0.25}}


def test_empty_cell_was_not_measured_but_nan_was(tmp_path: Path) -> None:
    text = "step,loss,grad_norm,val_loss\n0,1,nan,2\n1,,1,nan\n2,NaN,inf,-inf\n"
    found = imported(tmp_path, text)
    assert found["loss"] == pytest.approx({0: 1, 2: math.nan}, nan_ok=True)
    assert found["grad_norm"] == pytest.approx({0: math.nan, 1: 1, 2: math.inf}, nan_ok=True)
    assert found["probe_loss"] == pytest.approx({0: 2, 1: math.nan, 2: -math.inf}, nan_ok=True)


def test_exports_of_wandb_name_the_run_and_the_range(tmp_path: Path) -> None:
    text = (
        '"Step","a/b_1 - lm_loss","a/b_1 - lm_loss__MIN","a/b_1 - lm_loss__MAX"\n'
        '"4","12.1","12.0","12.2"\n'
    )
    assert imported(tmp_path, text) == {"loss": {4: 12.1}}


def test_other_delimiters_and_byte_order_mark(tmp_path: Path) -> None:
    assert imported(tmp_path, "\ufeffstep;train/loss\n1;3\n2.0;2.5\n") == {"loss": {1: 3, 2: 2.5}}


def test_cells_and_rows_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    text = "step,loss\n0,3\n,2\n1.5,2\n2,x\n3\n4,1\n"
    log = read_log(written(tmp_path, text), Columns())
    assert {what: (one.count, one.first) for what, one in log.skipped.items()} == {
        "rows without a step": (2, "line 3: ''"),
        "cells that are no numbers": (1, "line 5: 'x' in 'loss'"),
        "rows with more or fewer cells than the header": (
            1,
            "line 6: 1 cells, the header has 2",
        ),
    }


def test_table_without_a_step_says_how_to_name_one(tmp_path: Path) -> None:
    path = written(tmp_path, "batch,loss\n1,2\n")
    with pytest.raises(LogError, match=r"line 1: no column 'step'.*'batch'.*--column step=NAME"):
        read_log(path, Columns())
    assert read_log(path, Columns(step="batch")).n_records == 1


def test_table_whose_names_say_nothing(tmp_path: Path) -> None:
    columns = ("step=batch", "loss=train/ce")
    assert imported(tmp_path, "batch,train/ce\n1,2\n", *columns) == {"loss": {1: 2.0}}


# -- JSON ------------------------------------------------------------------------------------


def test_trainer_state(tmp_path: Path) -> None:
    history = [
        {"step": 500, "loss": 2.5, "grad_norm": 1.5, "learning_rate": 1e-5, "epoch": 0.5},
        {"step": 500, "eval_loss": 2.6, "eval_runtime": 3.0},
        {"step": 1000, "loss": float("nan"), "grad_norm": 0.5, "learning_rate": 0.0},
        {"step": 1000, "train_loss": 2.2, "train_runtime": 60.0},
    ]
    found = imported(tmp_path, json.dumps({"global_step": 1000, "log_history": history}, indent=1))
    assert found["loss"] == pytest.approx({500: 2.5, 1000: math.nan}, nan_ok=True)
    assert found["probe_loss"] == {500: 2.6}
    assert found["lr"] == {500: 1e-5, 1000: 0.0}


def test_golden_values_in_both_forms(tmp_path: Path) -> None:
    by_step = {"lm loss": {"values": {"1": 9.0, "5": 8.0, "10": "nan"}}}
    listed = {"lm loss": {"start_step": 0, "step_interval": 5, "values": [9.0, 8.0]}}
    for document, expected in (
        (by_step, {1: 9.0, 5: 8.0, 10: math.nan}),
        (listed, {0: 9.0, 5: 8.0}),
    ):
        log = read_log(written(tmp_path, json.dumps(document)), Columns())
        _, steps, values = log.series("lm loss")
        found = dict(zip(steps.tolist(), values.tolist(), strict=True))
        assert found == pytest.approx(expected, nan_ok=True)


def test_golden_values_that_are_nan_for_memory_too_were_not_measured(tmp_path: Path) -> None:
    document = {
        "lm loss": {"values": {"5": 8.0, "10": "nan", "15": "nan"}},
        "mem-allocated-bytes": {"values": {"5": 1.0, "10": 1.0, "15": "nan"}},
    }
    log = read_log(written(tmp_path, json.dumps(document)), Columns())
    assert log.series("lm loss")[1].tolist() == [5, 10]
    assert [one.count for one in log.skipped.values()] == [1]


def test_json_lines_with_objects_inside_and_a_torn_end(tmp_path: Path) -> None:
    text = (
        '{"train": {"loss": 3.0}, "trainer": {"global_step": 1}, "note": "x", "ok": true}\n'
        '{"train": {"loss": NaN}, "trainer": {"global_step": 2}}\n'
        '{"train": {"loss": 2.0}, "trai'
    )
    path = written(tmp_path, text)
    log = read_log(path, Columns())
    assert (log.format, log.names) == ("jsonl", {"train/loss": 2})
    assert log.skipped["lines that are no JSON objects"].first.startswith("line 3: ")


def test_summary_is_one_record(tmp_path: Path) -> None:
    text = json.dumps({"_step": 160, "loss/total": 0.25, "loss/value": 0.5, "table": {"n": 1}})
    assert imported(tmp_path, text) == {"loss": {160: 0.25}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "log_history": [\n  {"step": 1,', "line 3: no JSON"),
        ('{"a": 1,\n "b": 2}', "is JSON, but no log"),
        ("[1, 2]", "2 entries that are no objects"),
    ],
)
def test_json_that_is_no_log(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LogError, match=message):
        read_log(written(tmp_path, text), Columns())


# -- recognising -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ce87\nsize 1\n", "git lfs pull"),
        (b"\x1f\x8b\x08\x00", "compressed with gzip.*Decompress"),
        ("step: 1".encode("utf-16"), "UTF-16"),
        (b"\x00\x01\x02", "is binary"),
    ],
)
def test_files_that_are_no_logs_say_what_they_are(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(LogError, match=message):
        read_log(path, Columns())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a, b, and c\nstep: 1 loss: 2\n", "text"),
        ("step,loss\n", "csv"),
        ('[\n {"step": 1, "loss": 2}\n]\n', "json"),
        ('{"step": 1, "loss": 2}\n', "json"),
        ('{"step": 1, "loss": 2}\n{"step": 2, "loss": 2}\n', "jsonl"),
        ("{'loss': 1}\n", "text"),
        ("[2024-01-01] step: 1 loss: 2\n", "text"),
    ],
)
def test_format_is_told_from_the_content(tmp_path: Path, text: str, name: str) -> None:
    assert format_of(written(tmp_path, text), Columns()) == name


def test_format_that_is_given_overrides(tmp_path: Path) -> None:
    text = "step,loss\n1,3\nstep: 2; loss: 2\n"
    assert imported(tmp_path, text, format="text")["loss"] == {2: 2.0}
    assert read_log(tmp_path / "a.log", Columns()).series("loss")[1].tolist() == [1]
    with pytest.raises(LogError, match="line 1: no JSON"):
        read_log(tmp_path / "a.log", Columns(), "json")


# -- columns ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("train/loss", "loss"),
        ("lm loss", "loss"),
        ("train/CrossEntropyLoss", "loss"),
        ("val/loss", "probe_loss"),
        ("eval_loss", "probe_loss"),
        ("valid_nll_loss", "probe_loss"),
        ("grad norm", "grad_norm"),
        ("train/grad_norm", "grad_norm"),
        ("lr-AdamW", "lr"),
        ("learning_rate", "lr"),
        ("loss scale", None),
        ("loss__MIN", None),
        ("lm loss PPL", None),
        ("weight_norm", None),
        ("glossary", None),
        ("throughput", None),
    ],
)
def test_names_speak_of_signals(name: str, role: str | None) -> None:
    assert role_of(name) == role


def log_with(*names: str) -> Log:
    log = Log(Path("a"), "csv")
    log.add(0, dict.fromkeys(names, 1.0))
    return log


def test_of_several_losses_the_plainest_is_taken_and_the_others_are_told() -> None:
    chosen = choose(log_with("aux_loss", "train_loss", "z_loss"), Columns())
    assert (chosen.columns["loss"], chosen.others["loss"]) == ("train_loss", ("aux_loss", "z_loss"))


def test_user_says_which_column_is_which() -> None:
    columns = Columns.of(["loss=ce=2", "step=n"])
    assert (columns.step, choose(log_with("ce=2", "loss"), columns).columns) == (
        "n",
        {"loss": "ce=2"},
    )
    with pytest.raises(LogError, match=r"no column 'ce' for loss; it has 'loss'"):
        choose(log_with("loss"), Columns.of(["loss=ce"]))
    with pytest.raises(LogError, match=r"it has 'a', 'b'.*--column loss=NAME"):
        choose(log_with("a", "b"), Columns())
    for wrong in ("loss", "loss=", "speed=a"):
        with pytest.raises(ValueError, match="SIGNAL=COLUMN"):
            Columns.of([wrong])


# -- attempts --------------------------------------------------------------------------------


def lines(steps: Sequence[int], loss: float) -> str:
    return "".join(f"step: {step} loss: {loss}\n" for step in steps)


def effective(run: Path, view: str) -> list[tuple[int, int, float]]:
    frame = Run.open(run).scan("signals", view=view).collect()  # type: ignore[arg-type]
    return frame.sort("attempt", "step").select("attempt", "step", "value").rows()


def test_step_that_goes_back_is_an_attempt_and_rolls_back(tmp_path: Path) -> None:
    path = written(tmp_path, lines(range(5), 3.0) + lines(range(3, 7), 2.0))
    import_logs([path], tmp_path / "run")
    kept = [(0, step, 3.0) for step in range(3)] + [(1, step, 2.0) for step in range(3, 7)]
    assert effective(tmp_path / "run", "effective") == kept
    assert len(effective(tmp_path / "run", "all")) == 9


def test_files_are_attempts_in_the_order_given(tmp_path: Path) -> None:
    one = written(tmp_path, lines(range(5), 3.0), "z.log")
    two = written(tmp_path, lines(range(3, 7), 2.0), "a.log")
    import_logs([one, two], tmp_path / "run")
    assert [row[1] for row in effective(tmp_path / "run", "effective")] == list(range(7))
    origins = [attempt["imported"]["file"] for attempt in Run.open(tmp_path / "run").attempts]
    assert origins == [str(one), str(two)]


def test_validation_logged_late_is_no_restart(tmp_path: Path) -> None:
    text = "step: 1 loss: 3\nstep: 2 loss: 3\nstep: 1 val_loss: 4\nstep: 3 loss: 3\n"
    assert len(import_logs([written(tmp_path, text)], tmp_path / "run").attempts) == 1


def test_summary_that_repeats_records_is_no_restart(tmp_path: Path) -> None:
    text = lines(range(5), 3.0) + lines([2, 4], 3.0)
    (attempt,) = import_logs([written(tmp_path, text)], tmp_path / "run").attempts
    assert attempt.skipped == {"records that repeat an earlier one": 2}
    assert any("2 records that repeat" in gap for gap in Run.open(tmp_path / "run").gaps())


def test_step_logged_twice_keeps_the_last_and_says_so(tmp_path: Path) -> None:
    text = "step: 1 loss: 3\nstep: 2 loss: 3\nstep: 2 loss: 4\n"
    (attempt,) = import_logs([written(tmp_path, text)], tmp_path / "run").attempts
    assert attempt.skipped == {"values of a step logged twice, the last is taken": 1}
    assert signals(tmp_path / "run")["loss"] == {1: 3.0, 2: 4.0}


def test_steps_in_no_order_are_refused(tmp_path: Path) -> None:
    text = "step,loss\n" + "".join(f"{step},{step}.5\n" for step in range(40, 0, -1))
    with pytest.raises(LogError, match=r"goes back 39 times in 40 records.*Sort"):
        import_logs([written(tmp_path, text)], tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -- run directory ---------------------------------------------------------------------------


def test_run_is_whole_or_not_there(tmp_path: Path) -> None:
    good = written(tmp_path, lines(range(3), 1.0), "good.log")
    bad = written(tmp_path, '{"a": 1}', "bad.json")
    with pytest.raises(LogError):
        import_logs([good, bad], tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "good.log"]
    import_logs([good], tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert run.gaps() == []
    assert run.scan("exposures").collect().is_empty()
    with pytest.raises(Exception, match="is there already"):
        import_logs([good], tmp_path / "run")


def test_log_without_records_is_passed_over_beside_others(tmp_path: Path) -> None:
    good = written(tmp_path, lines(range(3), 1.0), "good.log")
    empty = written(tmp_path, "", "empty.log")
    found = import_logs([empty, good], tmp_path / "run")
    assert [error.path for error in found.empty] == [empty]
    assert len(found.attempts) == 1
    with pytest.raises(NoRecordError):
        import_logs([empty], tmp_path / "other")


def test_long_log_is_read_with_progress(tmp_path: Path) -> None:
    n = 70_000  # more than one frame of a ledger
    path = written(tmp_path, lines(range(n), 1.0))
    told: list[tuple[str, int, int]] = []
    import_logs([path], tmp_path / "run", progress=lambda *one: told.append(one))
    size = path.stat().st_size
    assert len(told) > 10
    assert told[-1] == ("read", size, size)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert Run.open(tmp_path / "run").scan("signals").select(pl.len()).collect().item() == n
