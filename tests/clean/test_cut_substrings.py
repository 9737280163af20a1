"""Substring duplicates in cleaned shards: listed, or cut out, and never in a protected row."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonl_files import write_jsonl

from auditor.clean.config import DedupeConfig
from auditor.clean.dedupe import dedupe
from auditor.clean.manifest import load_manifest
from auditor.clean.verify import verify
from auditor.errors import ManifestError, ShardError

NOTICE = " ".join(f"notice{i}" for i in range(60))


def own(name: str) -> str:
    return " ".join(f"{name}{i}" for i in range(80))


ROWS: list[dict[str, Any]] = [
    {"id": 0, "text": f"{own('a')} {NOTICE}.", "score": 0.1},
    {"id": 1, "text": f"{own('b')}: {NOTICE}! {own('c')}", "score": 12345678901234567890},
    {"id": 2, "text": own("d"), "score": None},
    {"id": 3, "text": f"{own('b')}: {NOTICE}! {own('c')}", "score": 1e300},
]


def config(substrings: Any, **others: Any) -> DedupeConfig:
    return DedupeConfig(substrings=substrings, **others)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_substrings_are_reported_between_rows_that_stay(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    manifest = dedupe([path], tmp_path / "out", config=config("report"))
    spans = pl.read_parquet(tmp_path / "out" / "substrings.parquet")
    # Row 3 repeats row 1, and is gone.
    assert spans.select("row", "keeper_row", "n_elements").rows() == [(1, 0, 60)]
    begin, end = spans.select("begin", "end").row(0)
    assert ROWS[1]["text"][begin:end] == NOTICE
    assert manifest.document["substrings"] == {
        "n_spans": 1,
        "n_rows": 1,
        "n_elements": 60,
        "are_cut": False,
        "sha256": sha256((tmp_path / "out" / "substrings.parquet").read_bytes()).hexdigest(),
    }
    assert lines(tmp_path / "out/data/a.jsonl") == ROWS[:3]


@pytest.mark.parametrize("form", ["jsonl", "jsonl.zst", "parquet", "dictionary"])
def test_substrings_are_cut_and_all_else_stays(tmp_path: Path, form: str) -> None:
    rows = [{**row, "score": 0.5} for row in ROWS] if "jsonl" not in form else ROWS
    if "jsonl" in form:
        path = write_jsonl(tmp_path / f"a.{form}", rows)
    else:
        path = tmp_path / "a.parquet"
        table = pa.Table.from_pylist(rows)
        if form == "dictionary":
            table = table.set_column(1, "text", table.column("text").dictionary_encode())
        pq.write_table(table, path, row_group_size=2)
    dedupe([path], tmp_path / "out", config=config("cut"))
    child = tmp_path / "out/data" / path.name
    if form == "jsonl.zst":
        import zstandard

        data = zstandard.ZstdDecompressor().stream_reader(child.read_bytes()).read()
        cleaned = [json.loads(line) for line in data.splitlines()]
    else:
        cleaned = lines(child) if form == "jsonl" else pq.read_table(child).to_pylist()
    assert cleaned[0] == rows[0]
    assert cleaned[1] == {**rows[1], "text": f"{own('b')}: ! {own('c')}"}
    assert cleaned[2] == rows[2]
    if form == "dictionary":
        assert pq.read_schema(child) == pq.read_schema(path)
    assert verify(tmp_path / "out").ok


def test_substrings_of_protected_rows_are_not_cut(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    dedupe([path], tmp_path / "out", config=config("cut", protect_ids=frozenset({"1"})))
    assert lines(tmp_path / "out/data/a.jsonl") == ROWS[:3]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow"])
def test_substrings_are_cut_as_rows_are_read_where_no_shard_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Also from formats whose shards would not be written with spans cut out."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / f"a.{form}"
    table = pa.table({"text": [row["text"] for row in ROWS]})
    if form == "jsonl":
        write_jsonl(path, ROWS)
    elif form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    dedupe([path], tmp_path / "out", config=config("cut"), manifest_only=True)
    texts = load_manifest(tmp_path / "out").dataset["text"][:]
    assert texts == [ROWS[0]["text"], f"{own('b')}: ! {own('c')}", ROWS[2]["text"]]
    assert verify(tmp_path / "out").ok


def test_verify_knows_a_table_of_spans_that_was_changed_or_is_gone(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    dedupe([path], tmp_path / "out", config=config("cut"), manifest_only=True)
    table = tmp_path / "out" / "substrings.parquet"
    pl.read_parquet(table).with_columns(end=pl.col("end") + 1).write_parquet(table)
    (failure,) = verify(tmp_path / "out").failures
    assert failure == f"{table}: SHA-256 differs from the manifest"
    table.unlink()
    assert verify(tmp_path / "out").failures == (f"{table}: is not there",)
    with pytest.raises(ManifestError, match=r"substrings\.parquet: cannot be read"):
        list(load_manifest(tmp_path / "out").kept_rows(0))


def test_substrings_of_tokens_are_cut_unless_a_mask_lies_beside_them(tmp_path: Path) -> None:
    shared = list(range(1000, 1060))
    rows = [[*range(80), *shared], [*range(100, 180), *shared, *range(200, 280)]]
    path = write_jsonl(tmp_path / "a.jsonl", [{"tokens": ids} for ids in rows])
    dedupe([path], tmp_path / "out", config=config("cut"))
    assert lines(tmp_path / "out/data/a.jsonl")[1] == {
        "tokens": [*range(100, 180), *range(200, 280)]
    }
    masked = [{"tokens": ids, "attention_mask": [1] * len(ids)} for ids in rows]
    write_jsonl(path, masked)
    with pytest.raises(ShardError, match=r"row 1: .*attention_mask"):
        dedupe([path], tmp_path / "out-2", config=config("cut"))


def test_substrings_are_not_cut_in_formats_that_belong_to_others(tmp_path: Path) -> None:
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.table({"text": [row["text"] for row in ROWS]}))
    write_jsonl(tmp_path / "0.jsonl", ROWS)
    told: list[object] = []
    refused = r"a\.arrow: contents of arrow shards are not changed.*--substrings report.*convert"
    for dry_run in (True, False):  # a rehearsal says what is to come
        with pytest.raises(ShardError, match=refused):
            dedupe(
                [tmp_path / "0.jsonl", tmp_path / "a.arrow"],
                tmp_path / "out",
                config=config("cut"),
                progress=lambda *event: told.append(event),
                dry_run=dry_run,
            )
    # Before anything was read, and nothing is left behind.
    assert told == []
    assert not (tmp_path / "out").exists()
    manifest = dedupe([tmp_path / "a.arrow"], tmp_path / "out", config=config("report"))
    assert manifest.document["substrings"]["n_spans"] == 1
