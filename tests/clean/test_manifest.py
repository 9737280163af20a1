"""The manifest as proof: it loads, it serves the cleaned data, and it notices every change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonl_files import write_jsonl

from auditor.clean.dedupe import dedupe
from auditor.clean.manifest import load_manifest
from auditor.clean.verify import verify
from auditor.errors import ManifestError, SchemaVersionError
from auditor.measure.sketch import NORMALISATION_VERSION


@pytest.fixture
def cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards of two sources, with one exact duplicate in each of the first two."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    a = [{"text": t, "source": "a"} for t in ("one", "two", "one", "three")]
    b = [{"text": t, "source": "b"} for t in ("four", "two", "five")]
    write_jsonl(tmp_path / "in" / "1.jsonl", a)
    write_jsonl(tmp_path / "in" / "2.jsonl.zst", b)
    pq.write_table(pa.table({"text": ["six"], "source": ["b"]}), tmp_path / "in" / "3.parquet")
    dedupe([tmp_path / "in"], tmp_path / "out", run_id="run-7")
    return tmp_path / "out"


def edit(cleaned: Path, change: Any) -> None:
    document = json.loads((cleaned / "manifest.json").read_text())
    change(document)
    (cleaned / "manifest.json").write_text(json.dumps(document))


def test_manifest_records_parents_children_and_settings(cleaned: Path) -> None:
    document = load_manifest(cleaned).document
    assert document["run_id"] == "run-7"
    assert document["normalisation_version"] == NORMALISATION_VERSION
    assert document["parameters"]["threshold"] == 0.8
    assert document["capped_buckets"] == {"n_buckets": 0, "n_pairs_left_out": 0}
    first = document["shards"][0]
    assert (first["shard"], first["child"]) == ("1.jsonl", "data/1.jsonl")
    assert (first["rows_in"], first["rows_out"]) == (4, 3)
    assert first["bytes_out"] == (cleaned / "data/1.jsonl").stat().st_size
    assert set(document["sources"]["b"]) == {
        *("rows_in", "rows_out", "weight_before", "weight"),
        *("projected_epochs_at_old_weight", "projected_epochs"),
    }


def test_manifest_loads_from_folder_or_file(cleaned: Path) -> None:
    manifest = load_manifest(cleaned / "manifest.json")
    assert manifest.document == load_manifest(str(cleaned)).document
    assert manifest.weights == pytest.approx({"a": 0.5, "b": 0.5})
    assert manifest.keep("1.jsonl").tolist() == [True, True, False, True]
    with pytest.raises(ManifestError, match=r"'9\.jsonl'"):
        manifest.keep("9.jsonl")


def test_manifest_dataset_and_sampler_agree_on_rows(cleaned: Path) -> None:
    manifest = load_manifest(cleaned)
    assert manifest.dataset["text"][:] == ["one", "two", "three", "four", "five", "six"]
    sampler = manifest.sampler(seed=0, n_samples=60)
    drawn = [manifest.dataset[i]["source"] for i in sampler]
    assert len(drawn) == len(sampler) == 60
    assert 15 < drawn.count("a") < 45
    a_rows = [i for i in sampler if manifest.dataset[i]["source"] == "a"]
    assert a_rows[:6] == [0, 1, 2, 0, 1, 2]


def test_manifest_of_a_dry_run_has_no_files(cleaned: Path, tmp_path: Path) -> None:
    manifest = dedupe([tmp_path / "in"], tmp_path / "rehearsal", dry_run=True)
    assert manifest.rows.height == 8
    with pytest.raises(ManifestError, match="--dry-run"):
        _ = manifest.dataset


def test_verify_passes_on_what_was_written(cleaned: Path) -> None:
    result = verify(cleaned)
    assert result.ok
    assert (result.n_shards, result.n_shards_hashed, result.n_rows) == (3, 3, 8)
    assert verify(cleaned, sample=2).n_shards_hashed == 2


@pytest.mark.parametrize("name", ["data/1.jsonl", "data/2.jsonl.zst", "data/3.parquet"])
@pytest.mark.parametrize("position", [0, 0.5, -1])
def test_verify_fails_when_one_byte_of_a_cleaned_shard_changes(
    cleaned: Path, name: str, position: float
) -> None:
    content = bytearray((cleaned / name).read_bytes())
    content[int(position * len(content)) if position == 0.5 else int(position)] ^= 1
    (cleaned / name).write_bytes(content)
    result = verify(cleaned)
    assert not result.ok
    assert all(name in failure for failure in result.failures)


def test_verify_fails_when_a_cleaned_shard_is_gone(cleaned: Path) -> None:
    (cleaned / "data/1.jsonl").unlink()
    assert not verify(cleaned).ok


def test_verify_reports_a_missing_parent_and_fails_for_a_changed_one(
    cleaned: Path, tmp_path: Path
) -> None:
    parent = tmp_path / "in" / "1.jsonl"
    content = parent.read_bytes()
    parent.unlink()
    result = verify(cleaned)
    assert result.ok
    assert result.missing_parents == (str(parent),)
    parent.write_bytes(content + b"\n")
    assert any("has changed" in failure for failure in verify(cleaned).failures)


def test_verify_fails_for_rows_that_do_not_add_up(cleaned: Path) -> None:
    path = cleaned / "rows.parquet"
    rows = pl.read_parquet(path)

    def failures(changed: pl.DataFrame) -> str:
        changed.write_parquet(path)
        return "\n".join(verify(cleaned).failures)

    assert "not has each" not in failures(rows)
    assert "has not each of 4 rows once" in failures(rows.slice(1))
    assert "keeps 4, not 3" in failures(
        rows.with_columns(decision=pl.lit("kept"), reason=pl.lit(None, pl.String))
    )
    assert "keeper that is not kept" in failures(
        rows.with_columns(keeper_row=pl.when(pl.col("keeper_row").is_not_null()).then(2))
    )
    assert "not in the manifest" in failures(
        rows.with_columns(shard=pl.col("shard").replace("1.jsonl", "x"))
    )
    assert "disagree" in failures(rows.with_columns(reason=pl.lit("near")))
    path.write_bytes(b"not parquet")
    assert "cannot be read" in "\n".join(verify(cleaned).failures)


@pytest.mark.parametrize("child", ["../in/1.jsonl", "/etc/hostname", "data/../../in/1.jsonl"])
def test_manifest_that_points_outside_of_its_folder_is_refused(cleaned: Path, child: str) -> None:
    edit(cleaned, lambda document: document["shards"][0].update(child=child))
    with pytest.raises(ManifestError, match="outside"):
        load_manifest(cleaned)


def test_manifest_that_links_outside_of_its_folder_is_refused(cleaned: Path) -> None:
    (cleaned / "data/1.jsonl").unlink()
    (cleaned / "data/1.jsonl").symlink_to(cleaned.parent / "in" / "1.jsonl")
    with pytest.raises(ManifestError, match="outside"):
        load_manifest(cleaned)


def test_manifest_of_a_newer_version_is_refused(cleaned: Path) -> None:
    edit(cleaned, lambda document: document.update(manifest_version=99))
    with pytest.raises(SchemaVersionError) as refused:
        load_manifest(cleaned)
    assert (refused.value.found, refused.value.expected) == (99, 1)


def test_manifest_that_is_missing_or_malformed_is_refused(cleaned: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no manifest"):
        load_manifest(tmp_path)
    edit(cleaned, lambda document: document.pop("shards"))
    with pytest.raises(ManifestError, match="no shards"):
        load_manifest(cleaned)
    (cleaned / "manifest.json").write_text("{")
    with pytest.raises(ManifestError, match="not JSON"):
        load_manifest(cleaned)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["counts"].update(near=d["counts"]["near"] + 1), "near is"),
        (lambda d: d["counts"].update(rows_out=0), "rows_out is 0"),
        (lambda d: d["counts"].update(rows_in=9), "rows_in is 9"),
        (lambda d: d["sources"]["b"].update(weight=0.01), "sum to"),
        (lambda d: d["sources"]["b"].update(weight=float("nan")), "sum to nan"),
    ],
    ids=["reason", "rows", "rows in", "weight", "no weight"],
)
def test_verify_fails_when_the_document_disagrees_with_the_rows(
    cleaned: Path, change: Any, words: str
) -> None:
    path = cleaned / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    assert any(words in failure for failure in verify(cleaned).failures)


def test_verify_fails_for_a_reason_that_was_not_counted(cleaned: Path) -> None:
    path = cleaned / "rows.parquet"
    rows = pl.read_parquet(path)
    rows.with_columns(reason=pl.col("reason").replace("exact", "implicated")).write_parquet(path)
    assert any("implicated is 0" in failure for failure in verify(cleaned).failures)


def test_verify_lets_weights_be_zero_where_nothing_is_left_to_draw(cleaned: Path) -> None:
    edit(cleaned, lambda d: [entry.update(weight=0.0) for entry in d["sources"].values()])
    assert verify(cleaned).ok


@pytest.mark.parametrize("name", ["extra.jsonl", "nested/extra.txt"])
def test_verify_fails_when_a_stranger_is_among_the_shards(cleaned: Path, name: str) -> None:
    stranger = cleaned / "data" / name
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("{}\n")
    (failure,) = verify(cleaned).failures
    assert f"{name}: not in the manifest" in failure
