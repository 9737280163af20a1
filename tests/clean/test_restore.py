"""Dropped rows given back; rows read from the inputs, where they are now."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from elsewhere import elsewhere
from jsonl_files import write_jsonl
from megatron_files import read_megatron, write_megatron

from auditor.clean.config import DedupeConfig
from auditor.clean.dedupe import dedupe
from auditor.clean.formats import jsonl, mosaic
from auditor.clean.manifest import Manifest, load_manifest
from auditor.clean.restore import restore
from auditor.clean.row import Reading
from auditor.clean.shards import MARKER, Shard
from auditor.clean.verify import verify
from auditor.errors import ManifestError, ShardError

LOREM = " ".join(f"word{i}" for i in range(60))
NEAR = LOREM.replace("word59", "other")
ROWS = [
    {"id": f"r{i}", "text": text, "source": source, "more": i}
    for i, (text, source) in enumerate(
        [
            ("alone", "a"),
            (LOREM, "a"),
            (NEAR, "a"),
            ("alone", "b"),
            ("buy now " * 40, "b"),
            (LOREM, "b"),
            ("last", "b"),
        ]
    )
]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    feather.write_feather(pa.Table.from_pylist(rows), path)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Rows by other means than ours."""
    if path.suffix == ".parquet":
        return pl.read_parquet(path).to_dicts()
    if path.suffix == ".arrow":
        return feather.read_table(path).to_pylist()
    return pl.read_ndjson(path.read_bytes()).to_dicts()  # polars decompresses


def merged(manifest: Manifest, kept: list[Any], restored: list[Any], shard: str) -> list[Any]:
    """Both in the places that the manifest gives them."""
    kept, restored = list(kept), list(restored)
    rows = [(kept if stays else restored).pop(0) for stays in manifest.keep(shard)]
    assert not kept
    assert not restored
    return rows


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_jsonl),
        ("a.jsonl.gz", write_jsonl),
        ("a.jsonl.zst", write_jsonl),
        ("a.parquet", write_parquet),
        ("a.arrow", write_arrow),
    ],
)
def test_kept_and_restored_rows_are_the_input(
    name: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "in" / "deep" / name, ROWS)
    write_jsonl(tmp_path / "in" / "z.jsonl", [{"text": "untouched"}])
    manifest = dedupe([tmp_path / "in"], tmp_path / "out")
    restored = restore(load_manifest(tmp_path / "out"), tmp_path / "back")
    shard = f"deep/{name}"
    assert restored.by_shard == {shard: 4}
    assert restored.by_reason == {"exact": 2, "near": 1, "repetition": 1}
    kept, back = read(tmp_path / "out" / "data" / shard), read(tmp_path / "back" / shard)
    assert merged(manifest, kept, back, shard) == read(path) == ROWS
    assert [p.name for p in (tmp_path / "back").iterdir()] == ["deep"]


def test_restored_lines_are_the_bytes_they_were_even_where_they_cannot_be_read(
    tmp_path: Path,
) -> None:
    lines = [b'{"text": "x"}', b'{"text": "cut', b'{"text":   "X"}', b'{"text": "y"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    config = DedupeConfig(on_error="skip")
    dedupe([tmp_path / "a.jsonl"], tmp_path / "out", config=config)
    restored = restore(load_manifest(tmp_path / "out"), tmp_path / "back")
    assert (tmp_path / "back" / "a.jsonl").read_bytes() == b"\n".join(lines[1:3]) + b"\n"
    assert restored.by_reason == {"exact": 1, "unreadable": 1}


def zeroed_in(path: Path, row: int, column: str) -> None:
    """Zero bytes in the middle of the page of a column that a row of a Parquet file is in."""
    with pq.ParquetFile(path) as file:
        group = file.metadata.row_group(row // 300)
        chunk = next(c for c in map(group.column, range(3)) if c.path_in_schema == column)
        at = chunk.data_page_offset + chunk.total_compressed_size // 4
    n_bytes = min(4000, chunk.total_compressed_size // 2)
    data = bytearray(path.read_bytes())
    data[at : at + n_bytes] = bytes(n_bytes)
    path.write_bytes(data)


def parquet_of_900(path: Path) -> list[dict[str, Any]]:
    """Three row groups of 300 different texts, but that every tenth row repeats the one before."""
    rows = [
        {"id": f"r{i}", "text": " ".join(f"w{i - (i % 10 == 9)}-{j}" for j in range(40)), "n": i}
        for i in range(900)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300, use_dictionary=False)
    return rows


def test_rows_of_a_damaged_row_group_are_counted_and_all_others_are_given_back(
    tmp_path: Path,
) -> None:
    """Parquet has no bytes of a row that could be given back unread; no other shard suffers."""
    rows = parquet_of_900(tmp_path / "in" / "p.parquet")
    zeroed_in(tmp_path / "in" / "p.parquet", 450, "text")
    write_jsonl(tmp_path / "in" / "z.jsonl", ROWS)
    config = DedupeConfig(on_error="skip")
    assert dedupe([tmp_path / "in"], tmp_path / "out", config=config).counts["unreadable"] == 300
    assert verify(tmp_path / "out").ok
    restored = restore(load_manifest(tmp_path / "out"), tmp_path / "back")
    assert restored.lost_by_shard == {"p.parquet": 300}
    assert restored.n_lost == 300
    assert restored.by_shard == {"p.parquet": 60, "z.jsonl": 4}
    assert restored.by_reason == {"exact": 62, "near": 1, "repetition": 1}
    back = pq.read_table(tmp_path / "back" / "p.parquet").to_pylist()
    assert back == [row for row in (*rows[:300], *rows[600:]) if row["n"] % 10 == 9]
    # Of a shard that gives nothing else, nothing is written.
    none = restore(load_manifest(tmp_path / "out"), tmp_path / "none", reason="unreadable")
    assert (none.by_shard, none.n_rows, none.n_lost) == ({}, 0, 300)
    assert list((tmp_path / "none").iterdir()) == []


def test_damage_in_a_column_that_is_no_content_loses_the_rows_of_its_group_alone(
    tmp_path: Path,
) -> None:
    rows = parquet_of_900(tmp_path / "p.parquet")
    table = pa.Table.from_pylist([{**row, "note": f"{row['n']:08}" * 9} for row in rows])
    pq.write_table(
        table.select(["id", "text", "note"]),
        tmp_path / "p.parquet",
        row_group_size=300,
        use_dictionary=False,
    )
    zeroed_in(tmp_path / "p.parquet", 450, "note")
    config = DedupeConfig(on_error="skip")
    manifest = dedupe([tmp_path / "p.parquet"], tmp_path / "out", config=config)
    assert manifest.counts["unreadable"] == 300
    assert pq.read_table(tmp_path / "out/data/p.parquet").num_rows == 600 - 60
    restored = restore(load_manifest(tmp_path / "out"), tmp_path / "back")
    assert (restored.by_reason, restored.lost_by_shard) == ({"exact": 60}, {"p.parquet": 300})


def write_tar(path: Path, names: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in names.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_samples_of_a_tar_are_given_back_undecoded_but_for_members_that_are_refused(
    tmp_path: Path,
) -> None:
    pytest.importorskip("webdataset")
    members = {"a.txt": b"one", "b.txt": b"\xff\xfe", "c.txt": b"one", "../d.txt": b"leads out"}
    path = write_tar(tmp_path / "a.tar", members)
    dedupe([path], tmp_path / "out", config=DedupeConfig(on_error="skip"))
    restored = restore(load_manifest(tmp_path / "out"), tmp_path / "back")
    assert restored.by_reason == {"exact": 1, "unreadable": 1}
    assert restored.lost_by_shard == {"a.tar": 1}
    with tarfile.open(tmp_path / "back" / "a.tar") as tar:
        back = {member.name: tar.extractfile(member) for member in tar}
        assert {name: file and file.read() for name, file in back.items()} == {
            "b.txt": members["b.txt"],
            "c.txt": members["c.txt"],
        }


def test_documents_that_reach_beyond_the_ids_are_counted(tmp_path: Path) -> None:
    documents = [[[1, 2, 3]], [[4]], [[1, 2, 3]], [[5, 6, 7]]]
    path = write_megatron(tmp_path / "a", documents, 8)
    ids = tmp_path / "a.bin"
    ids.write_bytes(ids.read_bytes()[:-2])
    dedupe([path], tmp_path / "out", config=DedupeConfig(on_error="skip"))
    restored = restore(load_manifest(tmp_path / "out"), tmp_path / "back")
    assert read_megatron(tmp_path / "back" / "a.idx") == (8, [[[1, 2, 3]]])
    assert (restored.by_reason, restored.lost_by_shard) == ({"exact": 1}, {"a.idx": 1})


def test_lines_that_are_too_long_to_be_read_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_BYTES", 50)
    lines = [b'{"text": "x"}', b'{"text": "' + b"long" * 20 + b'"}', b'{"text":   "X"}', b"cut"]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    dedupe([tmp_path / "a.jsonl"], tmp_path / "out", config=DedupeConfig(on_error="skip"))
    restored = restore(load_manifest(tmp_path / "out"), tmp_path / "back")
    assert (tmp_path / "back" / "a.jsonl").read_bytes() == b"\n".join(lines[2:]) + b"\n"
    assert restored.by_reason == {"exact": 1, "unreadable": 1}
    assert restored.lost_by_shard == {"a.jsonl": 1}


def test_samples_of_mosaic_shards_are_lost_from_a_fault_on(tmp_path: Path) -> None:
    """The second of two files breaks off within its second sample; one before is not decodable."""
    samples = [b"\3\0\0\0one", b"\2\0\0\0\xff\xfe", b"\3\0\0\0two"]
    offsets = np.cumsum([0, *map(len, samples)]).astype("<u4") + 4 * 5
    whole = (3).to_bytes(4, "little") + offsets.tobytes() + b"".join(samples)
    wrong = bytearray(whole)
    wrong[4 + 4 * 2 : 4 + 4 * 3] = (9999).to_bytes(4, "little")  # where the second sample ends
    about = {"format": "mds", "version": 2, "samples": 3, "compression": None, "hashes": []}
    about |= {"column_names": ["text"], "column_encodings": ["str"], "column_sizes": [None]}
    shards = []
    for name, data in (("a.mds", whole), ("b.mds", bytes(wrong))):
        (tmp_path / name).write_bytes(data)
        shards.append({**about, "raw_data": {"basename": name, "bytes": len(data)}})
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    readable = [row.readable for row in Shard(tmp_path, "x").rows(Reading(on_error="skip"))]
    assert readable == [True, False, True, True, False, False]
    assert mosaic.lost(tmp_path, np.ones(6, np.bool_)).tolist() == [False] * 4 + [True] * 2
    assert mosaic.lost(tmp_path, np.arange(6) == 5).tolist() == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("chosen", "rows"),
    [
        ({"reason": "near"}, [2]),
        ({"reason": "exact"}, [3, 5]),
        ({"source": "b"}, [3, 4, 5]),
        ({"source": "b", "reason": "repetition"}, [4]),
    ],
)
def test_restore_takes_rows_of_a_reason_or_a_source(
    chosen: dict[str, str], rows: list[int], tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    manifest = dedupe([path], tmp_path / "out")
    restored = restore(manifest, tmp_path / "back", **chosen)
    assert restored.n_rows == len(rows)
    assert read(tmp_path / "back" / "a.jsonl") == [ROWS[i] for i in rows]


def test_restore_of_nothing_is_an_error(tmp_path: Path) -> None:
    manifest = dedupe([write_jsonl(tmp_path / "a.jsonl", ROWS)], tmp_path / "out")
    with pytest.raises(ManifestError, match="no row was dropped for unreadable from 'a'"):
        restore(manifest, tmp_path / "back", reason="unreadable", source="a")
    with pytest.raises(ValueError, match=r"exact, near.*'dirty'"):
        restore(manifest, tmp_path / "back", reason="dirty")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("harm", ["changed", "not there any more"])
def test_parent_that_is_not_what_it_was_is_named_before_anything_is_written(
    harm: str, tmp_path: Path
) -> None:
    for name, rows in (("a", ROWS), ("b", [ROWS[0], {"text": "more"}])):
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", rows)
    manifest = dedupe([tmp_path / "in"], tmp_path / "out")
    parent = tmp_path / "in" / "b.jsonl"
    if harm == "changed":
        parent.write_bytes(parent.read_bytes().replace(b"alone", b"ALONE"))
    else:
        parent.unlink()
    with pytest.raises(ShardError, match=rf"b\.jsonl.*{harm}.*--parents"):
        restore(manifest, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    # A shard that gives no row is not needed.
    assert restore(manifest, tmp_path / "near", reason="near").by_shard == {"a.jsonl": 1}


def test_restore_refuses_a_folder_in_use(tmp_path: Path) -> None:
    manifest = dedupe([write_jsonl(tmp_path / "in" / "a.jsonl", ROWS)], tmp_path / "out")
    for used, words in (
        (tmp_path / "in", "contains the input"),
        (tmp_path / "out", "lies within"),
        (tmp_path / "out" / "data" / "more", "lies within"),
    ):
        with pytest.raises(ShardError, match=words):
            restore(manifest, used)
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize("is_whole", [True, False])
def test_splits_of_a_dataset_open_as_what_is_there(is_whole: bool, tmp_path: Path) -> None:
    """Together where each has a row that was dropped, else one by one."""
    texts = {"train": ["one", "two", "one"], "test": ["three", "three" if is_whole else "four"]}
    splits = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in texts.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "in")
    dedupe([tmp_path / "in"], tmp_path / "out")
    restored = restore(load_manifest(tmp_path / "out"), tmp_path / "back")
    assert (tmp_path / "back" / "dataset_dict.json").exists() == is_whole
    if is_whole:
        back = datasets.load_from_disk(tmp_path / "back")
        assert sum(split.num_rows for split in back.values()) == restored.n_rows == 2
    else:
        assert datasets.load_from_disk(tmp_path / "back" / "train")["text"][:] == ["one"]


def test_interrupted_restore_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", ROWS)
    manifest = dedupe([tmp_path / "in"], tmp_path / "out")

    def stop(stage: str, done: int, total: int) -> None:
        if 0 < done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore(manifest, tmp_path / "back", progress=stop)
    assert (tmp_path / "back" / MARKER).exists()
    left = sorted(tmp_path.glob("back/*"))
    with pytest.raises(ShardError, match="another call was interrupted here"):
        dedupe([tmp_path / "in"], tmp_path / "back")
    assert sorted(tmp_path.glob("back/*")) == left  # rows that were given back are not cleared
    with pytest.raises(ShardError, match="another call was interrupted here"):
        restore(manifest, tmp_path / "back", reason="exact")
    assert restore(manifest, tmp_path / "back").n_rows == 4 + 7
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == ["a.jsonl", "b.jsonl"]


def test_restore_refuses_rows_that_are_not_those_of_the_manifest(tmp_path: Path) -> None:
    dedupe([write_jsonl(tmp_path / "a.jsonl", ROWS)], tmp_path / "out")
    path = tmp_path / "out" / "rows.parquet"
    pl.read_parquet(path).with_columns(pl.col("decision").reverse()).write_parquet(path)
    with pytest.raises(ManifestError, match=r"rows\.parquet.*SHA-256"):
        restore(load_manifest(tmp_path / "out"), tmp_path / "back")


def test_shard_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    """Else a manifest of someone else's could have files written anywhere."""
    dedupe([write_jsonl(tmp_path / "a.jsonl", ROWS)], tmp_path / "out", manifest_only=True)
    path = tmp_path / "out" / "manifest.json"
    document = json.loads(path.read_text())
    for name in ("../a.jsonl", str(tmp_path / "a.jsonl"), "x/../../a.jsonl"):
        document["shards"][0]["shard"] = name
        path.write_text(json.dumps(document))
        with pytest.raises(ManifestError, match="leads out of its folder"):
            load_manifest(tmp_path / "out")


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A manifest without shards, of three inputs."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_jsonl(tmp_path / "in" / "x" / "a.jsonl.zst", ROWS)
    (tmp_path / "in" / "b.jsonl").write_bytes(b'{"id": "s0", "text": "z"}\n{"text": "cut\n')
    write_parquet(tmp_path / "in" / "c.parquet", [{**ROWS[0], "id": "t0", "text": "new"}, ROWS[1]])
    config = DedupeConfig(on_error="skip")
    dedupe([tmp_path / "in"], tmp_path / "out", config=config, manifest_only=True)
    return tmp_path / "out"


KEPT = ["r0", "r1", "r6", "s0", "t0"]


def ids(manifest: Manifest) -> list[str]:
    return sorted(manifest.dataset["id"][:])


def test_manifest_without_shards_serves_the_rows_that_stay(alone: Path) -> None:
    assert sorted(path.name for path in alone.iterdir()) == ["manifest.json", "rows.parquet"]
    manifest = load_manifest(alone)
    assert not manifest.has_children
    assert ids(manifest) == KEPT
    texts = dict(zip(manifest.dataset["id"][:], manifest.dataset["text"][:], strict=True))
    assert texts == {"r0": "alone", "r1": LOREM, "r6": "last", "s0": "z", "t0": "new"}
    assert manifest.keep("x/a.jsonl.zst").tolist() == [True, *[False] * 5, True]
    drawn = {manifest.dataset[i]["id"] for i in manifest.sampler(seed=0, n_samples=200)}
    assert drawn == set(KEPT)
    assert verify(alone).ok


def test_inputs_that_moved_are_found_by_their_names(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "in").rename(tmp_path / "elsewhere")
    moved = verify(alone, parents=tmp_path / "elsewhere")
    assert moved.ok
    assert moved.missing_parents == ()
    manifest = load_manifest(alone, parents=tmp_path / "elsewhere")
    assert ids(manifest) == KEPT
    assert restore(manifest, tmp_path / "back").by_reason == {
        "exact": 3,
        "near": 1,
        "repetition": 1,
        "unreadable": 1,
    }
    (tmp_path / "elsewhere" / "b.jsonl").write_bytes(b'{"text": "other"}\n')
    changed = verify(alone, parents=tmp_path / "elsewhere")
    assert any("b.jsonl: the input has changed" in failure for failure in changed.failures)


def test_rows_are_not_read_from_inputs_that_are_not_what_was_cleaned(
    alone: Path, tmp_path: Path
) -> None:
    """Or the text of another row would be given under an id."""
    shard = tmp_path / "in" / "x" / "a.jsonl.zst"
    write_jsonl(shard, [{**row, "text": f"other {i}"} for i, row in enumerate(ROWS)])
    with pytest.raises(ShardError, match=r"a\.jsonl\.zst: the input has changed"):
        ids(load_manifest(alone))
    with pytest.raises(ShardError, match=r"a\.jsonl\.zst: the input has changed"):
        list(load_manifest(alone).kept_rows(2))
    shard.unlink()
    with pytest.raises(ShardError, match=r"the input is not there any more.*parents="):
        ids(load_manifest(alone))


def test_verification_of_a_manifest_alone_fails_where_its_rows_are_gone(
    alone: Path, tmp_path: Path
) -> None:
    (tmp_path / "in" / "b.jsonl").unlink()
    found = verify(alone)
    assert (found.n_shards, found.n_shards_hashed) == (3, 2)
    assert found.missing_parents == (str(tmp_path / "in" / "b.jsonl"),)
    assert found.failures == (f"{tmp_path / 'in' / 'b.jsonl'}: the input is not there any more",)


def test_parents_that_a_manifest_names_by_file_urls_are_compared(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    dedupe([path.as_uri()], tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.json"
    document = json.loads(manifest.read_text())
    assert document["shards"][0]["parent"] == str(path)
    document["shards"][0]["parent"] = path.as_uri()  # as it once was written
    manifest.write_text(json.dumps(document))
    assert verify(tmp_path / "out").missing_parents == ()
    write_jsonl(path, ROWS[1:])
    (failure,) = verify(tmp_path / "out").failures
    assert failure == f"{path}: the input has changed since it was cleaned"


def test_parents_that_are_gone_are_a_failure_where_their_folder_was_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    dedupe([path], tmp_path / "out")
    path.unlink()
    assert verify(tmp_path / "out").ok
    (tmp_path / "empty").mkdir()
    (failure,) = verify(tmp_path / "out", parents=tmp_path / "empty").failures
    assert failure == f"{tmp_path / 'empty' / 'a.jsonl'}: the input is not there"
    with pytest.raises(ManifestError, match="absent: no such folder of inputs"):
        verify(tmp_path / "out", parents=tmp_path / "absent")


def test_rows_that_stay_are_read_from_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_jsonl(tmp_path / "in" / "a.jsonl", ROWS)
    saved = datasets.Dataset.from_list([{"id": "t0", "text": "new"}, {"id": "t1", "text": LOREM}])
    saved.save_to_disk(tmp_path / "in" / "saved")
    dedupe([elsewhere(tmp_path / "in")], tmp_path / "out", manifest_only=True)
    assert ids(load_manifest(tmp_path / "out")) == ["r0", "r1", "r6", "t0"]
    assert verify(tmp_path / "out").n_shards_hashed == 2
    write_jsonl(tmp_path / "in" / "a.jsonl", ROWS[1:])
    (failure,) = verify(tmp_path / "out").failures
    assert failure.endswith("a.jsonl: the input has changed since it was cleaned")


def test_rows_are_not_given_back_into_the_inputs(alone: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="lies within the input"):
        restore(load_manifest(alone), tmp_path / "in" / "back")
    (tmp_path / "in").rename(tmp_path / "moved")
    moved = load_manifest(alone, parents=tmp_path / "moved")
    with pytest.raises(ShardError, match="lies within the input"):
        restore(moved, tmp_path / "moved" / "back")


def test_verify_tells_progress_in_bytes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    dedupe([path], tmp_path / "out")
    told: list[tuple[str, int, int]] = []
    verify(tmp_path / "out", progress=lambda *event: told.append(event))
    n = path.stat().st_size + (tmp_path / "out" / "data" / "a.jsonl").stat().st_size
    assert told == [("verify", 0, n), ("verify", n, n)]


def test_damaged_parent_fails_verification_and_is_no_traceback(tmp_path: Path) -> None:
    manifest = dedupe([write_jsonl(tmp_path / "a.jsonl", ROWS)], tmp_path / "out")
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.jsonl").mkdir()
    assert manifest.parents == (Shard(tmp_path / "a.jsonl", "a.jsonl"),)
    (failure,) = verify(tmp_path / "out").failures
    assert "a.jsonl" in failure
