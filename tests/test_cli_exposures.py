"""``auditor exposures`` and ``auditor replay-order`` as a user types them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import zstandard
from click.testing import CliRunner, Result
from rich.cells import cell_len
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

from auditor import AuditedSampler, Run
from auditor.cli import main
from auditor.explain.exposures import WINDOW, seen
from auditor.show.exposures import print_seen

STEPS = 50
HOSTILE = "\x1b[31mred\x1b[0m\n\t\u202e[bold]\x9b2J" + "x" * 300


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # a traceback is a bug
    return result


def test_run_whose_batches_were_all_lost_says_what_failed(tmp_path: Path) -> None:
    loader = AuditedSampler(DataLoader([0.5] * 8, batch_size=None), run=tmp_path / "run")
    loader.record([1, 2], torch.zeros(3, 2))  # refused: more samples than ids
    loader.close()
    for command in ("exposures", "replay-order"):
        result = run(command, tmp_path / "run")
        assert result.exit_code == 1
        assert "no exposure was recorded" in result.output
        assert "AuditedSampler.record failed 1 times" in " ".join(result.output.split())


class Rows(Dataset):
    """Floats and a text; every fifth text is the same."""

    def __init__(self, name: str = "plain") -> None:
        self.name = name

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = " ".join(str(0 if index % 5 == 0 else 100 * index + i) for i in range(40))
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(3, generator=generator),
            "text": f"{self.name} {words}",
            "id": f"{self.name}-{index}",
            "source": f"{self.name}/{index % 2}",
        }


def train(path: Path, dataset: Dataset, steps: int, **options: Any) -> list[dict[str, Any]]:
    """Train and return the batches that the loop took."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=1e-9)
    loader = AuditedSampler(
        DataLoader(dataset, batch_size=4, shuffle=True), run=path, optimizer=optimizer, **options
    )
    log: list[dict[str, Any]] = []
    while len(log) < steps:
        for batch in loader:
            optimizer.step()
            log.append(batch)
            if len(log) == steps:
                break
    loader.close()
    return log


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("recorded") / "run"
    return path, train(path, Rows(), STEPS)


Recorded = tuple[Path, list[dict[str, Any]]]


def test_exposures_tell_what_was_seen_by_default(recorded: Recorded) -> None:
    path, log = recorded
    result = run("exposures", path)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert f"steps {STEPS - WINDOW} to {STEPS - 1} (0 to {STEPS - 1} are recorded)" in text
    assert f"{WINDOW * 4} exposures in {WINDOW} batches; rank 0, attempt 0" in text
    ids = [name for batch in log[-WINDOW:] for name in batch["id"]]
    odd = sum(int(name.split("-")[1]) % 2 for name in ids)
    assert f"plain/1 {odd} {odd / len(ids):.1%}" in text
    copies = sum(int(name.split("-")[1]) % 5 == 0 for name in ids)
    assert f"{copies} times plain-" in text
    assert 'text: "plain 0 0 0' in text
    assert "Gaps in the record none known" in text


def test_exposures_as_json_say_how_many_rows_there_are(recorded: Recorded) -> None:
    path, log = recorded
    result = run("exposures", path, "--step", 20, "--window", 6, "--json", "--limit", 5)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    ids = [name for batch in log[15:21] for name in batch["id"]]
    assert (document["n_rows"], document["n_rows_shown"]) == (24, 5)
    assert [row["sample_id"] for row in document["rows"]] == ids[:5]
    assert (document["first"], document["last"]) == (15, 20)
    assert (document["recorded_first"], document["recorded_last"]) == (0, STEPS - 1)
    assert document["schema_version"] == 1
    assert document["states"] == {"trained": 24}
    assert document["total"]["n_samples"] == 24
    assert sum(source["n_samples"] for source in document["sources"]) == 24
    whole = json.loads(run("exposures", path, "--step", 20, "--window", 6, "--json").stdout)
    assert [row["sample_id"] for row in whole["rows"]] == ids


def test_rows_are_lines_and_a_cut_is_said(recorded: Recorded) -> None:
    path, log = recorded
    result = run("exposures", path, "--step", 9, "--window", 2, "--rows")
    names, *lines = [line.split("\t") for line in result.stdout.splitlines()]
    column = names.index("sample_id")
    assert [line[column] for line in lines] == [n for batch in log[8:10] for n in batch["id"]]
    assert {len(line) for line in lines} == {len(names)}
    assert result.stderr == ""
    result = run("exposures", path, "--step", 9, "--window", 2, "--rows", "--limit", 3)
    assert len(result.stdout.splitlines()) == 4
    assert "3 of 8 rows shown; --limit 8 shows all" in result.stderr


def test_one_sample_is_followed_through_the_run(recorded: Recorded) -> None:
    path, log = recorded
    steps = [step for step, batch in enumerate(log) if "plain-7" in batch["id"]]
    result = run("exposures", path, "--sample", "plain-7", "--json")
    assert [row["step"] for row in json.loads(result.stdout)["rows"]] == steps


def test_rolled_back_steps_are_shown_on_request(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(path, Rows(), 10)
    train(path, Rows("later"), 8, start_step=6)
    document = json.loads(run("exposures", path, "--json").stdout)
    assert (document["n_rows"], document["attempts"]) == (14 * 4, [0, 1])
    document = json.loads(run("exposures", path, "--json", "--all").stdout)
    assert document["n_rows"] == 18 * 4


def test_run_without_steps_says_so_and_shows_batches(tmp_path: Path) -> None:
    loader = AuditedSampler(DataLoader(Rows(), batch_size=4), run=tmp_path / "run")
    assert len(list(loader)) == 16
    loader.close()
    result = run("exposures", tmp_path / "run", "--window", 4)
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "batches 12 to 15 (0 to 15 are recorded)" in text
    assert "No step was closed over these batches" in text
    assert "16 delivered" in text
    result = run("replay-order", tmp_path / "run")
    assert result.exit_code == 1
    assert "--include delivered" in result.output
    result = run("replay-order", tmp_path / "run", "--include", "delivered")
    assert [json.loads(line)["index"] for line in result.stdout.splitlines()] == list(range(64))


def test_window_without_anything_trained_has_no_tables(tmp_path: Path) -> None:
    train(tmp_path / "run", Rows(), 12, skip={3})
    rows = Run.open(tmp_path / "run").scan("exposures").filter(pl.col("state") == "skipped")
    name = rows.collect()["sample_id"][0]
    result = run("exposures", tmp_path / "run", "--sample", name)
    assert "1 skipped" in result.output
    assert "None of it was trained" in result.output
    document = json.loads(run("exposures", tmp_path / "run", "--sample", name, "--json").stdout)
    assert (document["total"], document["sources"], document["n_rows"]) == (None, [], 1)


def test_hostile_names_are_inert_and_lines_keep_to_the_width(tmp_path: Path) -> None:
    train(tmp_path / "run", Rows(HOSTILE), 20)
    found = seen(Run.open(tmp_path / "run"))
    for width in (60, 80, 200):
        out = io.StringIO()
        print_seen(Console(file=out, width=width), found)
        text = out.getvalue()
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
        assert "[bold]" in text
        assert max(map(cell_len, text.splitlines())) <= width
    raw = io.BytesIO()
    ascii_only = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    print_seen(Console(file=ascii_only, width=80), found)
    for arguments in (["--rows"], ["--source", HOSTILE + "?"], ["--sample", HOSTILE]):
        output = run("exposures", tmp_path / "run", *arguments).output
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", output)
    document = json.loads(run("exposures", tmp_path / "run", "--json").stdout)
    assert document["rows"][0]["source"].startswith(HOSTILE)


@pytest.mark.parametrize("name", ["order.jsonl", "order.jsonl.zst", "order.parquet"])
def test_training_on_the_order_again_gives_the_same_batches(
    name: str, recorded: Recorded, tmp_path: Path
) -> None:
    path, log = recorded
    result = run("replay-order", path, "--out", tmp_path / name)
    assert result.exit_code == 0, result.output
    assert (
        f"{STEPS * 4} exposures, {STEPS} batches, steps 0 to {STEPS - 1}, rank 0" in result.output
    )
    content = (tmp_path / name).read_bytes()
    if name.endswith(".zst"):
        content = zstandard.ZstdDecompressor().decompressobj().decompress(content)
    read = pl.read_parquet if name.endswith(".parquet") else pl.read_ndjson
    order = read(io.BytesIO(content))
    batches = order.group_by("attempt", "batch", maintain_order=True).agg("index")["index"]
    again = list(DataLoader(Rows(), batch_sampler=batches.to_list()))
    assert len(again) == len(log)
    for left, right in zip(again, log, strict=True):
        assert torch.equal(left["x"], right["x"])
        assert (left["id"], left["text"]) == (right["id"], right["text"])
    assert not list(tmp_path.glob(".*"))


def test_order_on_standard_output_is_json_lines_and_nothing_else(recorded: Recorded) -> None:
    path, log = recorded
    result = run("replay-order", path, "--from-step", 3, "--to-step", 4)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["sample_id"] for line in lines] == [n for batch in log[3:5] for n in batch["id"]]
    assert [line["step"] for line in lines] == [3] * 4 + [4] * 4
    assert [line["position"] for line in lines] == [0, 1, 2, 3] * 2
    assert result.stderr == ""


def test_what_the_order_lacks_is_said_on_standard_error(tmp_path: Path) -> None:
    train(tmp_path / "run", Rows(), 12, skip={3})
    ledger = tmp_path / "run/exposures/rank-00000/attempt-0000.ledger"
    ledger.write_bytes(ledger.read_bytes() + b"torn")
    result = run("replay-order", tmp_path / "run")
    assert len(result.stdout.splitlines()) == 48
    assert "Left out: 4 skipped. Take them in with --include." in result.stderr
    assert "4 bytes are torn" in result.stderr
    result = run("replay-order", tmp_path / "run", "--include", "skipped")
    assert len(result.stdout.splitlines()) == 52


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["exposures", "nowhere"], 1, ["nowhere", "not a run directory", "run="]),
        (["replay-order", "nowhere"], 1, ["nowhere", "not a run directory", "run="]),
        (["exposures", "{run}", "--step", "9999"], 1, ["{run}", "steps 0 to 49", "--step"]),
        (["exposures", "{run}", "--source", "web"], 1, ["'web'", "'plain/0', 'plain/1'"]),
        (["exposures", "{run}", "--rank", "2"], 1, ["rank 2", "has rank 0", "--rank"]),
        (["exposures", "{run}", "--window", "0"], 2, ["--window", "0"]),
        (["exposures", "{run}", "--rows", "--json"], 2, ["--rows", "--json"]),
        (["replay-order", "{run}", "--out", "order.csv"], 2, ["order.csv", ".jsonl", ".parquet"]),
        (["replay-order", "{run}", "--from-step", "9", "--to-step", "3"], 2, ["9", "after", "3"]),
        (["replay-order", "{run}", "--from-step", "99"], 1, ["{run}", "steps 0 to 49"]),
        (["replay-order", "{run}", "--include", "lost"], 2, ["lost", "skipped"]),
        (["replay-order", "{run}", "--out", "{run}/run.json/order.jsonl"], 1, ["run.json"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:50] if isinstance(value, list) else None,
)
def test_wrong_input_is_a_message_and_an_exit_code(
    arguments: list[str], code: int, words: list[str], recorded: Recorded
) -> None:
    result = run(*(argument.format(run=recorded[0]) for argument in arguments))
    assert result.exit_code == code, result.output
    flat = " ".join(result.output.split())
    for word in words:
        assert word.format(run=recorded[0]) in flat


def test_help_names_the_default_window() -> None:
    assert f"[default: {WINDOW};" in " ".join(run("exposures", "--help").output.split())
