"""``auditor propose`` as a user types it, on a recorded run one of whose sources repeats itself.

The exposures are real, and what is blamed is found in them; the event is put there by hand, so that
no model has to be trained for it.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from rich.console import Console
from torch.utils.data import DataLoader

from auditor import AuditedSampler, Run, schema
from auditor.clean.proposal import Change, Proposal, ramp
from auditor.cli import main
from auditor.cli.proposing import _paths
from auditor.show.proposal import print_proposal
from auditor.tables import polars_schema

STEPS = 240
BATCH = 8
BAD = (150, 190)
"""Steps in which every sample of ``novels`` is one of two passages: from, to (exclusive)."""

SOURCES = ("novels", "novels", "novels", "novels", "speeches", "speeches", "peps", "peps")


def rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)

    def text() -> str:
        return " ".join(map(str, rng.integers(0, 10**6, size=24)))

    passages = [text(), text()]
    listed = []
    for i in range(STEPS * BATCH):
        step, source = i // BATCH, SOURCES[i % BATCH]
        repeats = source == "novels" and BAD[0] <= step < BAD[1]
        content = passages[i % 2] if repeats else text()
        listed.append({"id": f"{source}-{i}", "text": content, "source": source})
    return listed


def record(path: Path, listed: list[dict[str, Any]], **settings: Any) -> list[list[str]]:
    """A loop that trains nothing much; returns the ids of the batches that it took."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    loader = DataLoader(listed, batch_size=BATCH, collate_fn=list)  # type: ignore[arg-type]
    audited = AuditedSampler(loader, run=path, optimizer=optimizer, **settings)
    taken = []
    for batch in audited:
        taken.append([row["id"] for row in batch])
        parameter.grad = torch.ones(1)
        optimizer.step()
    audited.close()
    return taken


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run"
    record(path, rows())
    return path


@pytest.fixture
def blamed(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run with an event: the input went poor where the passages begin."""
    event = {
        "event": 0,
        "episode": 0,
        "kind": "input_fall",
        "signal": "sample_rank",
        "measured": "live",
        "layer": -1,
        "onset_low": BAD[0],
        "onset_high": BAD[0] + 5,
        "trough_step": BAD[1] - 5,
        "before": 0.8,
        "after": 0.4,
    }
    events = pl.DataFrame([event], schema=polars_schema(schema.EVENTS))
    monkeypatch.setattr("auditor.explain.pipeline.events_of", lambda *_: events)
    return recorded


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # a traceback is a bug
    return result


def flat(text: str) -> str:
    return " ".join(text.split())


def test_proposal_says_what_why_and_what_to_expect(blamed: Path) -> None:
    result = run("propose", blamed, "--ramp", 100)
    assert result.exit_code == 0, result.output
    text = flat(result.output)
    assert "1. Deduplicate novels" in text
    assert "near-duplicates from novels rose from 0.0% to 50% of what was consumed" in text
    assert "95% interval" in text
    assert "a replay from a checkpoint before the event would give one" in text
    assert "2. Reweight novels: x 0." in text
    assert "No interval of an effect on the model can be given" in text
    assert "240 to 249" in text  # where the ramp begins: after the last step
    assert "340 on" in text
    assert all(len(line) <= 80 for line in result.output.splitlines())


def test_proposal_as_json_is_json_and_nothing_else(blamed: Path) -> None:
    document = json.loads(run("propose", blamed, "--json").stdout)
    assert document["schema_version"] == 1
    assert document["proposed"] is True
    assert [one["kind"] for one in document["changes"]] == ["deduplicate", "reweight"]
    first = document["changes"][0]
    assert first["source"] == "novels"
    assert first["low"] < first["lift"] < first["high"]
    assert sum(document["weights"].values()) == pytest.approx(1.0)
    # A sixth of the samples of novels were repeats: 40 of 240 steps, apart from the first two.
    assert document["weights"]["novels"] == pytest.approx(0.5 * (5 / 6) / (11 / 12), rel=0.01)


def test_nothing_is_proposed_without_evidence_and_the_mix_is_written_as_it_is(
    recorded: Path, tmp_path: Path
) -> None:
    plain = run("propose", recorded)
    assert plain.exit_code == 0
    assert "No change proposed" in plain.output
    assert json.loads(run("propose", recorded, "--json").stdout)["changes"] == []
    mix = run("propose", recorded, "--format", "neutral")
    assert mix.exit_code == 0
    assert "The mix is written as it is" in mix.stderr
    weights = {row["source"]: row["weight"] for row in json.loads(mix.stdout)["sources"]}
    assert weights == pytest.approx({"novels": 0.5, "peps": 0.25, "speeches": 0.25})
    skipping = run("propose", recorded, "--skip-list", "json", "--out", tmp_path / "skip.json")
    assert skipping.exit_code == 0
    assert "nothing to skip" in skipping.stderr
    assert json.loads((tmp_path / "skip.json").read_text())["batches"] == []
    assert run("propose", recorded, "--skip-list", "megatron").stdout == ""


def test_mix_goes_to_standard_output_or_to_a_file(blamed: Path, tmp_path: Path) -> None:
    paths = [word for name in ("novels", "peps") for word in ("--paths", f"{name}=data/{name}")]
    printed = run("propose", blamed, "--format", "megatron", *paths)
    assert "data/novels" in printed.stdout
    assert printed.stderr.strip() == (
        "No path given for speeches: written under the source's name."
    )
    out = tmp_path / "mix.json"
    saved = run("propose", blamed, "--format", "megatron", *paths, "--out", out)
    assert saved.stdout == ""
    assert json.loads(out.read_text())["train"] == printed.stdout.split()


def test_ramp_is_in_formats_that_have_stages_and_the_others_say_so(blamed: Path) -> None:
    staged = run(*("propose", blamed, "--format", "nanotron", "--ramp", 50, "--from-step", 120))
    stages = yaml.safe_load(staged.stdout)["data_stages"]
    assert [one["start_training_step"] for one in stages] == [1, *range(121, 171, 5), 171]
    assert "has no stages" not in staged.stderr
    flat_one = run("propose", blamed, "--format", "hf", "--ramp", 50)
    assert "hf has no stages" in flat_one.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "neutral", "--json"], "exclude each other"),
        (["--paths", "novels=x"], "--paths goes with --format"),
        (["--out", "x.json"], "--out goes with --format or --skip-list"),
        (["--skip-list", "json", "--ramp", "3"], "not with --skip-list"),
        (["--from-step", "3"], "--from-step goes with"),
        (["--format", "neutral", "--paths", "nobody=x"], "names no source; the run has 'novels'"),
        (["--format", "neutral", *["--paths", "peps=x"] * 2], "names 'peps' twice"),
        (["--format", "megatron", "--paths", "peps=a b"], "splits its list of data at spaces"),
        (["--skip-list", "json", "--from-step", "500"], "nothing to skip"),
        (["--max-factor", "0.5"], "max-factor"),
    ],
)
def test_wrong_usage_is_told(blamed: Path, arguments: list[str], message: str) -> None:
    result = run("propose", blamed, *arguments)
    assert message in flat(result.output)
    assert result.exit_code == (0 if message == "nothing to skip" else 2)


def test_run_without_exposures_has_no_mix_to_write(tmp_path: Path) -> None:
    record(tmp_path / "run", [])
    assert "no exposures were recorded" in run("propose", tmp_path / "run").output
    result = run("propose", tmp_path / "run", "--format", "neutral")
    assert result.exit_code == 1
    assert "Record with AuditedSampler" in result.output


# -- skip lists --------------------------------------------------------------------------------


def test_skip_list_is_the_batches_of_the_blamed_stretch(blamed: Path) -> None:
    result = run("propose", blamed, "--skip-list", "json")
    assert result.exit_code == 0, result.output
    document = json.loads((blamed / "derived" / "skip.json").read_text())
    # To the trough. Step 150 is where the two passages are new: half of it repeats.
    assert document["stretches"] == [[BAD[0], BAD[1] - 5]]
    assert document["batches"] == list(range(BAD[0], BAD[1] - 4))  # a batch a step, from step 0
    assert "36 batches, of steps 150 to 185" in result.stderr


def test_skipped_batches_are_left_out_of_the_next_run(blamed: Path, tmp_path: Path) -> None:
    skip = tmp_path / "skip.json"
    run("propose", blamed, "--skip-list", "json", "--out", skip)
    listed = rows()
    for form in (skip, str(skip), json.loads(skip.read_text())["batches"]):
        path = tmp_path / f"run-{type(form).__name__}"
        taken = record(path, listed, skip=form)
        expected = [i for i in range(STEPS) if not BAD[0] <= i < BAD[1] - 4]
        assert [int(ids[0].split("-")[1]) // BATCH for ids in taken] == expected
        states = Run.open(path).scan("exposures").collect()["state"]
        assert (states == "skipped").sum() == 36 * BATCH


def test_batches_are_counted_from_where_training_goes_on(blamed: Path, tmp_path: Path) -> None:
    out = tmp_path / "skip.json"
    run("propose", blamed, "--skip-list", "json", "--from-step", 120, "--out", out)
    assert json.loads(out.read_text())["batches"][0] == BAD[0] - 120
    run("propose", blamed, "--skip-list", "json", "--from-step", 160, "--out", out)
    document = json.loads(out.read_text())
    assert document["batches"][0] == 0
    assert document["stretches"] == [[160, BAD[1] - 5]]


def test_megatron_skips_iterations_which_it_counts_from_zero(blamed: Path) -> None:
    """Megatron compares its list with the number of iterations done, before it counts one more."""
    words = run("propose", blamed, "--skip-list", "megatron").stdout.split()
    assert words[0] == "--iterations-to-skip"
    assert [int(word) for word in words[1:]] == list(range(BAD[0], BAD[1] - 4))


def test_lightning_file_is_a_list_as_its_spike_detection_writes(
    blamed: Path, tmp_path: Path
) -> None:
    run("propose", blamed, "--skip-list", "lightning")
    ours = json.loads((blamed / "derived" / "skip_batches.json").read_text())
    assert ours == list(range(BAD[0], BAD[1] - 4))
    spike = pytest.importorskip(
        "lightning.fabric.utilities.spike", reason="Lightning is not installed: lightning"
    )
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed: torchmetrics")
    detection = spike.SpikeDetection(exclude_batches_path=tmp_path / "skip_batches.json")
    with pytest.raises(spike.TrainingSpikeException):
        detection._handle_spike(SimpleNamespace(global_rank=0), 7)
    theirs = json.loads((tmp_path / "skip_batches.json").read_text())
    assert {type(one) for one in [*theirs, *ours]} == {int}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ('{"steps": [1]}', "neither a list nor an object with a list of batches"),
        ('{"batches": [-1]}', "got -1 in it"),
    ],
)
def test_file_that_is_no_skip_list_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "skip.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        AuditedSampler([], run=tmp_path / "run", skip=path)


# -- text from data ----------------------------------------------------------------------------

HOSTILE = (
    "\x1b[31mred\x1b[0m",
    "[red]markup[/red]",
    "a\r\nb",
    "\u202egnirts",
    "x" * 500,
    "=",
    "a=b",
)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_from_data_are_never_live_on_a_terminal(encoding: str) -> None:
    n = len(HOSTILE)
    now = dict.fromkeys(HOSTILE, 1 / n)
    changes = tuple(
        Change(
            kind="deduplicate",
            source=name,
            reason="blamed",
            feature="duplication",
            event=0,
            exposure=0.5,
            control=0.1,
            z=9.0,
        )
        for name in HOSTILE
    )
    one = Proposal(" ".join(HOSTILE), True, now, now, now, now, changes)
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    print_proposal(Console(file=out, width=80), HOSTILE[0], HOSTILE[2], one, ramp(one, 10, 0))
    out.flush()
    text = raw.getvalue().decode(encoding)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]markup[/red]" in text
    assert "no interval can be given" in flat(text)
    assert max(map(len, text.splitlines())) <= 80


def test_paths_are_told_apart_where_names_hold_equals_signs() -> None:
    one = Proposal("", False, dict.fromkeys(("a", "a=b", "c"), 1 / 3), {}, {}, {})
    assert _paths(("a=x=y", "a=b=z"), one) == {"a": "x=y", "a=b": "z"}
