"""Published training logs: each is imported or refused, and has the events a person sees in it.

What is in them was written down from plots and from the numbers around each jump, before any rule
was run on them. A jump is told by its neighbours in the log, not by a baseline.
"""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl
import pytest

from auditor import Run
from auditor.explain.events import events_of
from auditor.explain.grades import grades_of
from auditor.explain.logs.importing import Imported, import_logs
from auditor.explain.logs.log import LogError

SPIKES = {
    # One step each, 1.2 and 1.7 nats above the steps before and after; the next jump is .75 nats
    # (step 1105), among many of .5. The four runs share their data order; the event file is the
    # first of them, converted.
    "modded_nanogpt_valueembed_run1.txt": [918, 946],
    "modded_nanogpt_valueembed_run2.txt": [918, 946],
    "modded_nanogpt_valueembed_run3.txt": [918, 946],
    "modded_nanogpt_windowwarmup_run1.txt": [918, 946],
    "converted_modded_nanogpt_valueembed_run1.out.tfevents": [918, 946],
    # Far longer, with many jumps of all sizes; these are more than a nat above both neighbours.
    "modded_nanogpt_scaleshortcuts_11444.txt": [919, 947, 5335, 6127, 7617, 8166, 9477, 10270],
}

QUIET = {
    # The loss falls, with lone jumps of at most .36 nats on 3.4; the validation loss is smooth.
    "modded_nanogpt_adamw_llmc_format.log": 9536,
    # A hump of .2 nats from step 2820 to 2850, gone at 2855; no jump anywhere.
    "megatron_gpt3_15b_sm_golden_h100.json": 2544,
    "torchtitan_llama3_cuda_losses.txt": 100,  # falls to 2.75 and stays
    "trackio_nanotron_lm_loss_48n.csv": 2270,  # falls from 12 to 2.3, largest rise .08
    # Noise between .0002 and .004 without a trend; validation turns up after step 4000, by .0003.
    "lightning_metrics_gmnn_sparse.csv": 140,
}

PROSE = ("glm130b_main_log_en.md", "opt175b_10_percent_update.md", "opt175b_27_percent_update.md")


@pytest.fixture(scope="module")
def logs() -> Path:
    """The folder of real logs, which is no part of the repository."""
    beside = Path(__file__).resolve().parents[3] / "shared"
    root = Path(os.environ.get("AUDITOR_SHARED", beside)) / "data" / "D_logs"
    if not root.is_dir():
        pytest.skip("no logs: set AUDITOR_SHARED to the folder that holds data/D_logs")
    return root


def imported(path: Path, folder: Path) -> tuple[Imported, pl.DataFrame, pl.DataFrame]:
    """What was imported, its signals and its events, of all attempts."""
    found = import_logs([path], folder / "run")
    signals = Run.open(folder / "run").scan("signals", view="all").collect()
    return found, signals, events_of(signals, grades_of(signals))


def values(signals: pl.DataFrame, signal: str) -> dict[int, float]:
    rows = signals.filter(pl.col("signal") == signal).select("step", "value")
    return dict(rows.iter_rows())


@pytest.mark.parametrize("name", SPIKES)
def test_spikes_are_found_at_their_steps(logs: Path, tmp_path: Path, name: str) -> None:
    _, signals, events = imported(logs / name, tmp_path)
    assert set(events["kind"]) == {"loss_spike"}
    found = events["onset_high"].to_list()
    assert set(SPIKES[name]) <= set(found)
    loss = values(signals, "loss")
    for row in events.iter_rows(named=True):
        step = row["onset_high"]
        assert (row["trough_step"], row["recovery_step"]) == (step, step + 1)
        above = loss[step] - max(loss[step - 1], loss[step + 1])
        assert above > 0.6, (step, above)  # none that a person would not call a jump
    if "11444" not in name:
        assert found == SPIKES[name]


@pytest.mark.parametrize("name", QUIET)
def test_none_is_invented_in_quiet_logs(logs: Path, tmp_path: Path, name: str) -> None:
    found, signals, events = imported(logs / name, tmp_path)
    assert len(found.attempts) == 1
    assert len(values(signals, "loss")) == QUIET[name]
    assert events.is_empty()


def test_event_file_and_text_of_one_run_are_the_same(logs: Path, tmp_path: Path) -> None:
    name = "modded_nanogpt_valueembed_run1"
    (tmp_path / "text").mkdir()
    _, text, _ = imported(logs / f"{name}.txt", tmp_path / "text")
    _, events, _ = imported(logs / f"converted_{name}.out.tfevents", tmp_path)
    for signal, n in (("loss", 1530), ("probe_loss", 14)):
        expected = values(text, signal)
        assert len(expected) == n
        assert values(events, signal) == pytest.approx(expected, rel=1e-6)


def test_loss_that_is_nan_from_the_second_step_on(logs: Path, tmp_path: Path) -> None:
    found, signals, events = imported(logs / "lightning_metrics_genrisk_nan.csv", tmp_path)
    assert values(signals, "loss")[0] == pytest.approx(1.6226933508321501e24)
    assert found.chosen[0].others["loss"] == ("train_gen_loss",)
    (row,) = events.iter_rows(named=True)
    assert (row["kind"], row["onset_high"], row["recovery_step"]) == ("non_finite", 1, None)


def test_validation_that_turns_up_while_training_goes_on(logs: Path, tmp_path: Path) -> None:
    """The losses of six validation sets rise from step 1203 on, the training loss only falls.

    One gradient norm of 5.3 (step 8020) is four times its neighbours, and as high as the first.
    """
    found, signals, events = imported(logs / "hf_trainer_state_memit.json", tmp_path)
    assert found.chosen[0].columns["probe_loss"] == "eval_g0_loss"
    assert len(found.chosen[0].others["probe_loss"]) == 5
    assert {signal: len(values(signals, signal)) for signal in ("loss", "grad_norm", "lr")} == {
        "loss": 30,
        "grad_norm": 30,
        "lr": 30,
    }
    (row,) = events.iter_rows(named=True)
    # With a record every 401 steps the first twenty are what later ones are compared with.
    assert row["kind"] == "probe_loss_rise"
    assert 1203 <= row["onset_high"] <= 20 * 401
    assert row["recovery_step"] is None


def test_runs_in_one_file_are_attempts(logs: Path, tmp_path: Path) -> None:
    """Seven seeds, one after another; each ends with a summary that repeats its last steps."""
    name = "modded_nanogpt_soda_batch_combined_stdout.txt"
    seeds = (logs / name).read_text().count(" start ")
    found, _, events = imported(logs / name, tmp_path)
    assert len(found.attempts) == seeds == 7
    for attempt in found.attempts[:-1]:
        assert (attempt.first_step, attempt.last_step) == (125, 3040)
        assert attempt.skipped["records that repeat an earlier one"] == 3
    assert events.is_empty()


def test_excerpts_of_a_log_in_a_logbook(logs: Path, tmp_path: Path) -> None:
    """Ten lines of Megatron's; the spike at 29050 has three of them before it: not judged."""
    found, signals, events = imported(logs / "bigscience_tr1_13B_chronicles.md", tmp_path)
    loss = values(signals, "loss")
    assert (len(loss), loss[29040], loss[29050]) == (10, 2.768131, 7.343709)
    assert found.attempts[0].skipped == {"lines that are no records": 282}
    assert events.is_empty()


def test_logbook_that_goes_back_has_attempts(logs: Path, tmp_path: Path) -> None:
    found, signals, events = imported(logs / "bigscience_tr8_104B_chronicles.md", tmp_path)
    bounds = [(attempt.first_step, attempt.last_step) for attempt in found.attempts]
    assert bounds == [(7000, 7220), (6900, 11448), (8738, 9027)]
    assert values(signals, "grad_norm")[8741] == 3273877.676
    assert 9027 not in values(signals, "loss")  # the line has none: the update was skipped
    assert values(signals, "probe_loss") == {7000: 7.1742}
    assert events.is_empty()


def test_summary_is_one_record(logs: Path, tmp_path: Path) -> None:
    found, signals, events = imported(logs / "wandb-summary_jaxmarl.json", tmp_path)
    assert found.attempts[0].log.format == "summary"
    assert values(signals, "loss") == {160: pytest.approx(0.25279501080513)}
    assert events.is_empty()


@pytest.mark.parametrize("name", PROSE)
def test_prose_is_refused(logs: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(LogError, match=r"no record was found: .*give the log it tells of"):
        import_logs([logs / name], tmp_path / "run")


def test_pointer_to_a_file_is_refused(logs: Path, tmp_path: Path) -> None:
    with pytest.raises(LogError, match="git lfs pull"):
        import_logs([logs / "tfevents_header_only.out.tfevents"], tmp_path / "run")


def test_every_log_is_spoken_of(logs: Path) -> None:
    text = Path(__file__).read_text()
    for path in logs.iterdir():
        assert path.name in text or path.stem.removeprefix("converted_") in text
