"""One row of a cleaned data set: decision, keeper, cluster, contents and similarity."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonl_files import write_jsonl

from auditor.clean.config import DedupeConfig
from auditor.clean.dedupe import dedupe
from auditor.clean.lookup import N_MEMBERS, ids_not_there, look_up, samples_of
from auditor.clean.manifest import Manifest, load_manifest
from auditor.errors import ManifestError

LOREM = " ".join(f"word{i}" for i in range(60))
NEAR = LOREM.replace("word59", "other")
FAR = LOREM.replace("word50", "x").replace("word59", "other")


def jaccard_by_hand(a: str, b: str) -> float:
    """Runs of five words as tuples, without a hash."""
    sets = []
    for text in (a, b):
        words = re.findall(r"\w+", text.lower())
        sets.append({tuple(words[i : i + 5]) for i in range(len(words) - 4)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.fixture
def cleaned(tmp_path: Path) -> Manifest:
    first = [("a0", LOREM), ("a1", "short and alone"), ("a2", "buy now " * 40)]
    second = [("b0", NEAR), ("twice", LOREM.upper()), ("twice", FAR), ("a1", None)]
    for name, rows in (("1.jsonl", first), ("2.jsonl.zst", second)):
        write_jsonl(tmp_path / "in" / name, [{"id": i, "text": t} for i, t in rows])
    return dedupe([tmp_path / "in"], tmp_path / "out")


def test_row_is_found_by_id_and_by_place(cleaned: Manifest) -> None:
    (by_id,) = look_up(cleaned, "b0")
    (by_place,) = look_up(cleaned, "2.jsonl.zst:0")
    assert by_id == by_place
    assert (by_id.row["decision"], by_id.row["reason"]) == ("dropped", "near")
    assert by_id.keeper is not None
    assert (by_id.keeper["shard"], by_id.keeper["row"]) == ("1.jsonl", 0)
    assert by_id.keeper["decision"] == "kept"
    assert (by_id.content, by_id.keeper_content) == (NEAR, LOREM)
    assert by_id.similarity == pytest.approx(jaccard_by_hand(NEAR, LOREM))
    assert by_id.unread is None


def test_all_rows_of_an_id_are_found_in_input_order(cleaned: Manifest) -> None:
    found = look_up(cleaned, "twice")
    assert [one.row["row"] for one in found] == [1, 2]
    assert [one.row["reason"] for one in found] == ["exact", "near"]
    assert found[0].similarity == 1.0
    assert [one.row["shard"] for one in look_up(cleaned, "a1")] == ["1.jsonl", "2.jsonl.zst"]


def test_cluster_names_its_members_whatever_became_of_them(cleaned: Manifest) -> None:
    (found,) = look_up(cleaned, "a0")
    assert found.row["decision"] == "kept"
    assert found.keeper is found.similarity is None
    assert found.n_members == 4
    assert [one["sample_id"] for one in found.members] == ["a0", "b0", "twice", "twice"]
    (alone,) = look_up(cleaned, "1.jsonl:1")
    assert (alone.members, alone.n_members) == ([], 0)


def test_only_the_first_members_of_a_large_cluster_are_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": LOREM}] * (N_MEMBERS + 5))
    manifest = dedupe([path], tmp_path / "out")
    (found,) = look_up(manifest, "a.jsonl:14")
    assert found.n_members == N_MEMBERS + 5
    assert [one["row"] for one in found.members] == list(range(N_MEMBERS))


@pytest.mark.parametrize("name", ["nobody", "1.jsonl:3", "9.jsonl:0", "1.jsonl:-1", ":", ""])
def test_no_such_row_is_nothing(cleaned: Manifest, name: str) -> None:
    assert look_up(cleaned, name) == []


def test_tokens_are_compared_as_tokens(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, (2, 100))
    ids[1] = ids[0]
    ids[1, -1] += 1
    pq.write_table(pa.table({"input_ids": ids.tolist()}), tmp_path / "a.parquet")
    manifest = dedupe([tmp_path / "a.parquet"], tmp_path / "out")
    (found,) = look_up(manifest, "a.parquet:1")
    assert found.similarity == pytest.approx(95 / 97)
    assert isinstance(found.content, np.ndarray)


def test_decision_is_told_without_its_inputs(cleaned: Manifest, tmp_path: Path) -> None:
    changed = tmp_path / "in" / "1.jsonl"
    changed.write_bytes(changed.read_bytes() + b"\n")
    (found,) = look_up(cleaned, "b0")
    assert found.content == NEAR
    assert found.keeper_content is found.similarity is None
    assert found.unread is not None
    assert "1.jsonl: the input has changed" in found.unread
    changed.unlink()
    (found,) = look_up(cleaned, "b0")
    assert "1.jsonl: the input is not there any more" in str(found.unread)


def test_rows_beside_one_that_cannot_be_read_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "x"}\n{"text": "cut\n' + json.dumps({"text": LOREM}).encode() + b"\n"
    )
    config = DedupeConfig(on_error="skip")
    manifest = dedupe([path], tmp_path / "out", config=config, manifest_only=True)
    (found,) = look_up(load_manifest(tmp_path / "out"), "a.jsonl:2")
    assert found.content == LOREM
    (lost,) = look_up(manifest, "a.jsonl:1")
    assert (lost.row["reason"], lost.content, lost.unread) == ("unreadable", None, None)


def test_damaged_table_of_rows_is_an_error_with_a_remedy(cleaned: Manifest, tmp_path: Path) -> None:
    (tmp_path / "out" / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ManifestError, match=r"rows\.parquet.*Clean the inputs again"):
        look_up(load_manifest(tmp_path / "out"), "b0")


def test_samples_of_a_dry_run_go_from_the_least_similar_to_the_most(tmp_path: Path) -> None:
    texts: list[Any] = [LOREM]
    words = LOREM.split()
    texts += [" ".join([*words[: 60 - n], *(f"new{n}{i}" for i in range(n))]) for n in (1, 5, 2, 3)]
    texts += ["buy now " * 40, LOREM.upper()]
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    manifest = dedupe([path], tmp_path / "out", dry_run=True)
    samples = samples_of(manifest, 3)
    near = [one for one in samples if one.row["reason"] == "near"]
    expected = sorted(jaccard_by_hand(text, LOREM) for text in texts[1:5])
    assert [one.similarity for one in near] == pytest.approx(
        [expected[0], expected[2], expected[3]]
    )
    assert [one.row["row"] for one in samples if one.row["reason"] == "repetition"] == [5]
    assert [one.row["row"] for one in samples if one.row["reason"] == "exact"] == [6]
    assert samples_of(manifest, 0) == []


def test_ids_that_no_row_has(cleaned: Manifest) -> None:
    assert ids_not_there(cleaned, {"a0", "twice", "nobody"}) == {"nobody"}
    assert ids_not_there(cleaned, ()) == set()


def test_table_of_rows_is_the_same_lazily(cleaned: Manifest) -> None:
    assert cleaned.scan_rows().collect().equals(pl.DataFrame(cleaned.rows))
