"""A manifest loads as a dataset, whatever else its shards hold."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from torch.utils.data import DataLoader

from auditor.clean.dedupe import dedupe
from auditor.clean.manifest import load_manifest
from auditor.errors import ManifestError

WORDS = [f"word{i}" for i in range(16)]


def text(i: int) -> str:
    return " ".join(WORDS[(i * 7 + j * 3) % len(WORDS)] + str(i * j) for j in range(20))


def test_shards_that_differ_in_their_other_columns_load_as_one(tmp_path: Path) -> None:
    """Nulls in one shard and text in another, and another type in the third, of another format."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    first = [{"id": f"a{i}", "text": text(i), "meta": {"title": None}} for i in range(6)]
    second = [{"id": f"b{i}", "text": text(10 + i), "meta": {"title": "x"}} for i in range(6)]
    for name, rows in (("1.jsonl", first), ("2.jsonl", second + second[:2])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    pl.DataFrame({"text": [text(20 + i) for i in range(4)], "part": [1, 2, 3, 4]}).write_parquet(
        folder / "3.parquet"
    )
    dedupe([folder], tmp_path / "cleaned")
    manifest = load_manifest(tmp_path / "cleaned")
    dataset = manifest.dataset
    kept = manifest.rows.filter(pl.col("decision") == "kept")
    assert dataset["id"][:] == kept["sample_id"].to_list()
    assert dataset["source"][:] == kept["source"].to_list() == ["1"] * 6 + ["2"] * 6 + ["3"] * 4
    assert dataset["text"][:12] == [row["text"] for row in first + second]
    assert dataset["row"][:] == [*range(6), *range(6), *range(4)]
    loader = DataLoader(dataset, batch_size=4, sampler=manifest.sampler(seed=0, n_samples=32))
    assert sum(len(batch["text"]) for batch in loader) == 32


def test_tokens_load_as_tokens_and_mixed_content_is_refused(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text(json.dumps({"input_ids": list(range(30))}) + "\n")
    dedupe([tokens], tmp_path / "out")
    assert load_manifest(tmp_path / "out").dataset[0]["input_ids"] == list(range(30))
    words = tmp_path / "words.jsonl"
    words.write_text(json.dumps({"text": text(1)}) + "\n")
    dedupe([tokens, words], tmp_path / "mixed")
    with pytest.raises(ManifestError, match=r"words\.jsonl.*tokens\.jsonl"):
        _ = load_manifest(tmp_path / "mixed").dataset


def test_changed_cleaned_shard_is_not_answered_from_a_cache(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    loaded = []
    for i, out in ((1, "one"), (2, "two")):
        path.write_text(json.dumps({"text": text(i)}) + "\n")
        dedupe([path], tmp_path / out)
        (tmp_path / out).rename(tmp_path / "same")
        loaded.append(load_manifest(tmp_path / "same").dataset[0]["text"])
        (tmp_path / "same").rename(tmp_path / f"{out}-again")
    assert loaded == [text(1), text(2)]
