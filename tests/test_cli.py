"""Commands as a user types them: output, exit codes, messages."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
import zstandard
from click.testing import CliRunner, Result
from torch.utils.data import DataLoader

from auditor import AuditedSampler, GradeMonitor
from auditor.cli import main
from auditor.demo.corpus import ShardRows, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.show.digest import GradePoint


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # a traceback is a bug
    return result


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two zstd shards, half of whose rows repeat."""
    folder = tmp_path_factory.mktemp("shards")
    paths = []
    rng = np.random.default_rng(0)
    for name in ("left", "right"):
        texts = [" ".join(map(str, rng.integers(0, 10**6, size=12))) for _ in range(60)]
        buffer = io.BytesIO()
        for i in range(60):
            row = {"id": f"{name}-{i}", "text": texts[i if i % 2 else 0], "source": name}
            buffer.write(json.dumps(row).encode() + b"\n")
        path = folder / f"{name}.jsonl.zst"
        path.write_bytes(zstandard.ZstdCompressor().compress(buffer.getvalue()))
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def recorded(shards: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short training on those shards."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = AuditedSampler(
        DataLoader(ShardRows(shards), batch_size=8, shuffle=True, collate_fn=collate), run=path
    )
    monitor = GradeMonitor(model, run=path, every=5)
    for batch in loader:
        loss = next_byte_loss(model, batch)
        loss.backward()
        monitor.step(loss, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    return path


def test_report_prints_a_verdict_and_writes_a_page(recorded: Path, tmp_path: Path) -> None:
    result = run("report", recorded, "--html", tmp_path / "page.html")
    assert result.exit_code == 0
    assert "Not judged" in result.output  # 15 steps are too few
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_report_as_json_is_json_and_nothing_else(recorded: Path) -> None:
    result = run("report", recorded, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["schema_version"] == 1
    assert {"verdict", "events", "proposal"} <= set(report)


def test_report_as_markdown_and_as_the_path_of_the_page(recorded: Path, tmp_path: Path) -> None:
    result = run("report", recorded, "--format", "md")
    assert result.exit_code == 0
    assert result.stdout.startswith("## Training run `")
    page = tmp_path / "page.html"
    result = run("report", recorded, "--format", "html", "--html", page)
    assert result.stdout == f"{page}\n"
    assert page.is_file()
    as_json = run("report", recorded, "--format", "json").stdout
    assert json.loads(as_json) == json.loads(run("report", recorded, "--json").stdout)


def test_report_opens_the_page_that_it_wrote(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("click.launch", lambda path: opened.append(path) or 0)
    assert run("report", recorded, "--open").exit_code == 0
    assert opened == [str(recorded / "derived/report.html")]
    monkeypatch.setattr("click.launch", lambda path: 127)
    result = run("report", recorded, "--open")
    assert (result.exit_code, "no browser could be opened" in result.stderr) == (0, True)


@pytest.mark.parametrize(
    ("worst", "least", "code"), [(2, "S3", 3), (3, "S3", 0), (7, "S7", 0), (None, "s1", 3)]
)
def test_report_fails_below_a_grade_with_a_code_of_its_own(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, worst: int | None, least: str, code: int
) -> None:
    point = None if worst is None else GradePoint(step=150, grade=worst, ratio=0.3, layer=1)
    monkeypatch.setattr("auditor.show.digest.lowest_grade", lambda explanation: point)
    result = run("report", recorded, "--fail-below", least, "--format", "json")
    assert result.exit_code == code
    assert json.loads(result.stdout)["schema_version"] == 1
    told = "no sampled step after the warm-up" if worst is None else f"S{worst} at step 150"
    assert (told in result.stderr) == (code == 3)


def test_report_of_a_run_on_a_read_only_disk_is_printed_without_its_page(
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("auditor.show.produce.write_html", refuse)
    result = run("report", recorded)
    assert result.exit_code == 0
    assert "Not judged" in result.output
    assert "Page:" not in result.output
    (told,) = [one.getMessage() for one in caplog.records]  # on standard error, outside of pytest
    assert "report.html was not written (Read-only file system); --html" in told
    asked = run("report", recorded, "--html", tmp_path / "page.html")
    assert asked.exit_code == 1
    assert "Read-only file system" in asked.output


def test_dedupe_of_shards_then_verify_then_a_changed_byte(
    shards: list[Path], tmp_path: Path
) -> None:
    before = [path.read_bytes() for path in shards]
    result = run("dedupe", shards[0].parent / "*.jsonl.zst", "--out", tmp_path / "cleaned")
    assert result.exit_code == 0, result.output
    assert "120 rows in, 62 rows written" in result.output
    assert [path.read_bytes() for path in shards] == before
    rows = pl.read_parquet(tmp_path / "cleaned/rows.parquet")
    assert rows.height == 120
    assert (rows["decision"] == "kept").sum() == 62

    assert run("verify", tmp_path / "cleaned").exit_code == 0
    child = tmp_path / "cleaned/data/left.jsonl.zst"
    content = bytearray(child.read_bytes())
    content[len(content) // 2] ^= 1
    child.write_bytes(content)
    result = run("verify", tmp_path / "cleaned")
    assert result.exit_code == 1
    assert "left.jsonl.zst" in result.output
    assert json.loads(run("verify", tmp_path / "cleaned", "--json").output)["ok"] is False


def test_dedupe_of_a_run_takes_its_shards_and_its_mix(
    recorded: Path, shards: list[Path], tmp_path: Path
) -> None:
    result = run("dedupe", recorded, "--out", tmp_path / "cleaned", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [Path(shard["parent"]) for shard in document["shards"]] == shards
    assert document["run_id"] == json.loads((recorded / "run.json").read_text())["run_id"]
    assert document["sources"]["left"]["weight_before"] == pytest.approx(0.5)


def test_dedupe_refuses_shards_that_changed_since_the_run(
    recorded: Path, shards: list[Path], tmp_path: Path
) -> None:
    content = shards[1].read_bytes()
    try:
        shards[1].write_bytes(content[:-1])
        result = run("dedupe", recorded, "--out", tmp_path / "cleaned")
    finally:
        shards[1].write_bytes(content)
    assert result.exit_code == 1
    assert "right.jsonl.zst" in result.output
    assert "--shards" in result.output


def test_dry_run_writes_nothing(shards: list[Path], tmp_path: Path) -> None:
    result = run("dedupe", *shards, "--out", tmp_path / "cleaned", "--dry-run")
    assert result.exit_code == 0
    assert "62 rows would be written" in result.output
    assert not (tmp_path / "cleaned").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["report", "nowhere"], 1, ["nowhere", "not a run directory", "run="]),
        (["verify", "nowhere"], 1, ["nowhere", "manifest"]),
        (["dedupe", "nowhere", "--out", "x"], 1, ["nowhere", "no such file"]),
        (["dedupe", "--out", "x"], 2, ["INPUT"]),
        (["dedupe", "{shard}", "--out", "x", "--threshold", "3"], 2, ["threshold", "3.0"]),
        (["dedupe", "{shard}", "--out", "x", "--shards", "y"], 2, ["--shards"]),
        (["dedupe", "{shard}", "--out", "{folder}"], 1, ["{folder}"]),
        (["demo", "--steps", "10", "--out", "{folder}/new"], 2, ["at least", "10"]),
        (["demo", "--out", "{folder}"], 1, ["not an earlier demo", "--out"]),
        (["nonsense"], 2, ["nonsense"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else None,
)
def test_wrong_input_is_a_message_and_an_exit_code(
    arguments: list[str], code: int, words: list[str], shards: list[Path]
) -> None:
    known = {"shard": shards[0], "folder": shards[0].parent}
    result = run(*(argument.format(**known) for argument in arguments))
    assert result.exit_code == code, result.output
    flat = " ".join(result.output.split())
    for word in words:
        assert word.format(**known) in flat


def test_corrupt_shard_names_file_row_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\nnot json\n')
    result = run("dedupe", path, "--out", tmp_path / "cleaned")
    assert result.exit_code == 1
    assert "bad.jsonl, row 1" in result.output
    assert "--on-error skip" in result.output
    result = run("dedupe", path, "--out", tmp_path / "cleaned", "--on-error", "skip")
    assert result.exit_code == 0
    assert "1 dropped: unreadable" in " ".join(result.output.split())
