"""Megatron's indexed datasets and raw token ids, read back by readers written from the formats."""

from __future__ import annotations

import struct
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_files import CODES, Documents, read_megatron, write_megatron

from auditor.clean.row import Finding, Reading
from auditor.clean.shards import Shard, find_shards
from auditor.errors import ShardError

SKIP = Reading(on_error="skip")


def shard(path: Path) -> Shard:
    return find_shards([path]).shards[0]


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=6), max_size=3), max_size=9),
    code=st.sampled_from(sorted(CODES)),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_kept_documents_survive_with_their_sequences(
    documents: Documents, code: int, data: Any
) -> None:
    keep = data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    with tempfile.TemporaryDirectory() as name:
        source = shard(write_megatron(Path(name, "a_text_document"), documents, code))
        contents = [np.asarray(row.content).tolist() for row in source.rows()]
        assert contents == [[*chain(*document)] for document in documents]
        assert source.count() == len(documents)
        source.copy(Path(name, "out", source.name), np.array(keep, np.bool_))
        kept = [document for document, is_kept in zip(documents, keep, strict=True) if is_kept]
        assert read_megatron(Path(name, "out", source.name)) == (code, kept)


@pytest.mark.parametrize("name", ["megatron_bytes_int32", "megatron_bytes_uint16"])
def test_files_written_by_megatron_are_read_and_copied(
    corpora: Path, tmp_path: Path, name: str
) -> None:
    folder = corpora / "E_formats"
    (unit,) = find_shards([folder / f"{name}.bin"]).shards
    assert (unit.name, unit.format) == (f"{name}.idx", "megatron")
    assert {path.name for path in unit.files()} == {f"{name}.bin", f"{name}.idx"}
    code, documents = read_megatron(folder / f"{name}.idx")
    assert [np.asarray(row.content).tolist() for row in unit.rows()] == [
        [*chain(*document)] for document in documents
    ]
    keep = np.arange(len(documents)) % 3 > 0
    unit.copy(tmp_path / unit.name, keep)
    kept = [document for document, is_kept in zip(documents, keep, strict=True) if is_kept]
    assert read_megatron(tmp_path / unit.name) == (code, kept)
    unit.copy(tmp_path / "all" / unit.name, np.ones(len(documents), np.bool_))
    for file in unit.files():
        assert (tmp_path / "all" / file.name).read_bytes() == file.read_bytes()


def test_indices_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", [[[1, 2], [3]], [[4]]], 8)
    good = path.read_bytes()
    modes = good + bytes(3)
    bad = {
        "multimodal": modes,
        "bytes, .* are due": good[:-1],
        "version 2": good[:9] + struct.pack("<Q", 2) + good[17:],
        "none of integer ids": good[:17] + b"\x07" + good[18:],
        "not an index of Megatron": b"x" * len(good),
        "do not cover": good[:-8] + struct.pack("<q", 2),
    }
    for message, data in bad.items():
        path.write_bytes(data)
        with pytest.raises(ShardError, match=message):
            list(shard(path).rows())


def test_documents_beyond_the_end_of_the_ids_are_lost_alone(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", [[[1, 2]], [[3]], [[4, 5]]], 4)
    binary = path.with_suffix(".bin")
    binary.write_bytes(binary.read_bytes()[:-4])
    with pytest.raises(ShardError, match=r"row 2: reaches beyond the end of a\.bin"):
        list(shard(path).rows())
    findings: list[Finding] = []
    assert [row.readable for row in shard(path).rows(SKIP, findings)] == [True, True, False]
    assert [(finding.row, finding.lost) for finding in findings] == [(2, True)]
    shard(path).copy(tmp_path / "out.idx", np.array([False, True, False]), SKIP)
    assert read_megatron(tmp_path / "out.idx") == (4, [[[3]]])


def test_half_of_a_pair_is_refused(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", [[[1]]], 8)
    path.with_suffix(".bin").unlink()
    with pytest.raises(ShardError, match=r"no \.bin beside it"):
        find_shards([path])


# Raw ids

EOT = 9


def documents_of(ids: list[int]) -> list[list[int]]:
    """Documents of a stream, each without its end, by the letters of its text."""
    parts = "".join(map(str, ids)).split(str(EOT))
    return [[int(digit) for digit in part] for part in (parts if parts[-1] else parts[:-1])]


@given(
    ids=st.lists(st.integers(0, 9), max_size=40),
    dtype=st.sampled_from(["uint16", "int32", "uint8"]),
    suffix=st.sampled_from([".bin", ".npy"]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_streams_are_documents_and_lose_none_but_the_dropped(
    ids: list[int], dtype: str, suffix: str, data: Any
) -> None:
    documents = documents_of(ids)
    keep = data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    reading = Reading(dtype=None if suffix == ".npy" else dtype, eot=EOT)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, f"train{suffix}")
        array = np.array(ids, dtype)
        np.save(path, array) if suffix == ".npy" else array.tofile(path)
        source = shard(path)
        contents = [np.asarray(row.content).tolist() for row in source.rows(reading)]
        assert contents == documents
        assert source.count(reading) == len(documents)
        out = Path(name, "out", path.name)
        source.copy(out, np.array(keep, np.bool_), reading)
        found = np.load(out) if suffix == ".npy" else np.fromfile(out, dtype)
        assert found.dtype == dtype
        kept = [document for document, is_kept in zip(documents, keep, strict=True) if is_kept]
        assert documents_of(found.tolist()) == kept


def test_a_file_of_ids_wants_type_and_end(tmp_path: Path) -> None:
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.save(tmp_path / "train.npy", np.arange(20))
    source = shard(tmp_path / "train.bin")
    for reading in (Reading(), SKIP):
        with pytest.raises(ShardError, match=r"--dtype .* and --eot"):
            list(source.rows(reading))
    with pytest.raises(ShardError, match=r"with --eot"):
        list(shard(tmp_path / "train.npy").rows())
    with pytest.raises(ShardError, match="no such type: 'uint17'"):
        list(source.rows(Reading(dtype="uint17", eot=1)))
    findings: list[Finding] = []
    assert len(list(source.rows(Reading(dtype="uint16", eot=500), findings))) == 1
    assert "ends no document" in findings[0].what
    (tmp_path / "odd.bin").write_bytes(bytes(5))
    with pytest.raises(ShardError, match="1 bytes at the end are no whole id"):
        list(shard(tmp_path / "odd.bin").rows(Reading(dtype="uint16", eot=1)))


def test_tables_of_ids_are_rows(tmp_path: Path) -> None:
    table = np.arange(24, dtype=np.int32).reshape(6, 4)
    np.save(tmp_path / "a.npy", table)
    source = shard(tmp_path / "a.npy")
    assert [np.asarray(row.content).tolist() for row in source.rows()] == table.tolist()
    keep = np.array([True, False, True, True, False, False])
    source.copy(tmp_path / "out.npy", keep)
    found = np.load(tmp_path / "out.npy")
    assert found.dtype == table.dtype
    assert np.array_equal(found, table[keep])


def test_nothing_is_unpickled_and_headers_are_no_ids(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"x": 1}]), allow_pickle=True)
    with pytest.raises(ShardError, match="cannot be read as an array"):
        list(shard(tmp_path / "a.npy").rows())
    header = np.zeros(256, np.int32)
    header[0] = 20240520
    (tmp_path / "fineweb.bin").write_bytes(header.tobytes() + bytes(64))
    with pytest.raises(ShardError, match=r"header of llm\.c"):
        list(shard(tmp_path / "fineweb.bin").rows(Reading(dtype="uint16", eot=50256)))


def test_ids_in_a_folder_are_data_where_nothing_else_is(tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin"):
        np.arange(4, dtype=np.uint16).tofile(tmp_path / name)
    assert [unit.name for unit in find_shards([tmp_path]).shards] == ["train.bin", "val.bin"]
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    found = find_shards([tmp_path])
    assert [unit.name for unit in found.shards] == ["a.jsonl"]
    assert [Path(path).name for path in found.ignored] == ["train.bin", "val.bin"]
