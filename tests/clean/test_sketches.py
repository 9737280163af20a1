"""Sketches made beforehand are those that training would have made."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import fsspec
import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from torch.utils.data import DataLoader

from auditor import AuditedSampler, Run
from auditor.clean.sketches import sketch
from auditor.cli import main
from auditor.errors import RunError, SchemaVersionError, ShardError
from auditor.measure.compact import compact
from auditor.record.lookup import Lookup

TEXTS = [
    f"document {i % 9} tells of the {i % 9} hills and of the rivers between them" for i in range(40)
]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    rows = [{"text": text, "id": f"d{i}"} for i, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:25]))
    pl.DataFrame(rows[25:]).write_parquet(folder / "b.parquet")
    return folder


def test_looked_up_sketches_are_those_of_the_content(shards: Path, tmp_path: Path) -> None:
    document = sketch([shards], tmp_path / "signatures")
    assert document["n_rows"] == 40
    assert [shard["rows"] for shard in document["shards"]] == [25, 15]
    ids = [f"d{i}" for i in range(39, -1, -1)]
    found = Lookup(tmp_path / "signatures").sketches(ids, [None] * 40)
    assert np.array_equal(found, compact(TEXTS[::-1]))


def test_units_of_several_files_and_units_behind_a_url_are_sketched_too(
    shards: Path, tmp_path: Path
) -> None:
    rows = [{"text": text, "id": f"d{i}"} for i, text in enumerate(TEXTS)]
    datasets.Dataset.from_list(rows[:25]).save_to_disk(str(tmp_path / "folder"))
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/sketched/b.parquet", (shards / "b.parquet").read_bytes())
    inputs = [tmp_path / "folder", "memory://sketched/b.parquet"]
    document = sketch(inputs, tmp_path / "signatures")
    sketch([shards], tmp_path / "expected")
    for name in ("keys.npy", "sketches.npy"):
        expected = np.load(tmp_path / "expected" / name)
        assert np.array_equal(np.load(tmp_path / "signatures" / name), expected)
    by_path = {Path(shard["path"]).name: shard for shard in document["shards"]}
    assert by_path["b.parquet"]["bytes"] == (shards / "b.parquet").stat().st_size
    files = [one for one in (tmp_path / "folder").rglob("*") if one.is_file()]
    assert by_path["folder"]["bytes"] == sum(one.stat().st_size for one in files)


def test_samples_that_are_not_among_them_are_sketched(shards: Path, tmp_path: Path) -> None:
    sketch([shards], tmp_path / "signatures")
    found = Lookup(tmp_path / "signatures").sketches(
        ["d3", "unheard of", None], ["another text", "new", "newer"]
    )
    assert np.array_equal(found, compact([TEXTS[3], "new", "newer"]))


@pytest.mark.parametrize("workers", [0, 2])
def test_training_scores_the_same_with_them(shards: Path, tmp_path: Path, workers: int) -> None:
    sketch([shards], tmp_path / "signatures")
    rows = [{"text": text, "id": f"d{i}"} for i, text in enumerate(TEXTS)]
    tables = []
    for name, duplication in (("made", True), ("looked up", tmp_path / "signatures")):
        loader = AuditedSampler(
            DataLoader(rows, batch_size=8, num_workers=workers),  # type: ignore[arg-type]
            run=tmp_path / name,
            duplication=duplication,
        )
        list(loader)
        loader.close()
        tables.append(Run.open(tmp_path / name).scan("exposures").collect())
    assert tables[0].equals(tables[1])
    assert (tables[0]["duplication"] == 1).sum() == 31


def test_folders_that_hold_none_or_others_are_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="auditor sketch"):
        AuditedSampler([], run=tmp_path / "run", duplication=tmp_path / "nowhere")
    sketch([shards], tmp_path / "signatures")
    path = tmp_path / "signatures/signatures.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "schema_version": 9}))
    with pytest.raises(SchemaVersionError, match="version 9"):
        Lookup(tmp_path / "signatures")
    path.write_text(json.dumps({**document, "normalisation": 0}))
    with pytest.raises(RunError, match="another normalisation"):
        Lookup(tmp_path / "signatures")


def test_rows_without_ids_cannot_be_looked_up_and_it_says_so(tmp_path: Path) -> None:
    shard = tmp_path / "x.jsonl"
    shard.write_text('{"text": "a"}\n{"text": "b", "id": "b"}\n{"text": "c", "id": "b"}\n')
    document = sketch([shard], tmp_path / "signatures")
    assert (document["n_rows"], document["n_without_id"], document["n_repeated_ids"]) == (1, 1, 1)
    nameless = tmp_path / "y.jsonl"
    nameless.write_text('{"text": "a"}\n')
    with pytest.raises(ShardError, match="no row has an id"):
        sketch([nameless], tmp_path / "others")


def test_command_says_what_it_made(shards: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["sketch", str(shards), "--out", str(tmp_path / "s"), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["n_rows"] == 40
    again = CliRunner().invoke(main, ["sketch", str(shards), "--out", str(tmp_path / "s")])
    assert again.exit_code == 1
    assert "s" in again.output
