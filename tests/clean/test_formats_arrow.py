"""Arrow in its containers: Parquet, IPC files and streams, and folders of ``datasets``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.clean.row import Finding, Reading
from auditor.clean.shards import Shard, find_shards
from auditor.errors import ShardError

SKIP = Reading(on_error="skip")
TEXTS = ["x", "", None, "é\u2028", "long " * 50]
IDS: list[list[int] | None] = [[1, 2, 3], [], None, [70000], [5, 6]]
LISTS = [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64())]
KINDS = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.dictionary(pa.int8(), pa.string()),
]


def shard(path: Path) -> Shard:
    return find_shards([path]).shards[0]


def contents(path: Path, reading: Reading = Reading()) -> list[Any]:  # noqa: B008
    rows = [row.content for row in shard(path).rows(reading)]
    return [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]


# Cells


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_text_is_read_from_every_type_that_holds_some(tmp_path: Path, name: str, kind: Any) -> None:
    plain = pa.array(TEXTS)
    column = (
        plain.dictionary_encode().cast(kind)
        if pa.types.is_dictionary(kind)
        else (
            pa.array([t if t is None else t.encode() for t in TEXTS], kind)
            if pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
            else pa.array(TEXTS, kind)
        )
    )
    write(tmp_path / name, pa.table({"text": column}))
    assert contents(tmp_path / name) == TEXTS


@pytest.mark.parametrize("kind", LISTS, ids=str)
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_ids_are_read_from_lists_of_integers(tmp_path: Path, name: str, kind: Any) -> None:
    ids = [None if each is None else [i % 60000 for i in each] for each in IDS]
    write(tmp_path / name, pa.table({"input_ids": pa.array(ids, kind)}))
    assert contents(tmp_path / name) == ids


def test_ids_are_read_from_lists_of_one_length_and_lists_with_holes(tmp_path: Path) -> None:
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    write(tmp_path / "a.arrow", pa.table({"tokens": fixed}))
    assert contents(tmp_path / "a.arrow") == [[1, 2], None, [3, 4]]
    write(tmp_path / "b.parquet", pa.table({"tokens": [[1, None], [2]]}))
    assert contents(tmp_path / "b.parquet") == [None, [2]]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_nested_text_and_further_columns_are_read_by_dotted_path(tmp_path: Path, name: str) -> None:
    rows = [{"data": {"body": {"text": "deep"}, "score": 0.5}, "n": 3}, {"data": None, "n": 4}]
    write(tmp_path / name, pa.Table.from_pylist(rows))
    reading = Reading(content="data.body.text", columns=("data.score", "n", "absent"))
    first, second = shard(tmp_path / name).rows(reading)
    assert (first.content, first.columns) == ("deep", (0.5, 3, None))
    assert (second.content, second.columns) == (None, (None, 4, None))
    with pytest.raises(ShardError, match=r"no column 'data\.title'"):
        list(shard(tmp_path / name).rows(Reading(content="data.title")))


# Containers


def write(path: Path, table: Any, **options: Any) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, **options)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_ipc_keeps_kind_codec_schema_and_metadata(
    tmp_path: Path, is_stream: bool, codec: str | None
) -> None:
    table = pa.table(
        {
            "text": pa.array([f"text {i % 7} " * 20 for i in range(100)]).dictionary_encode(),
            "n": pa.array(range(100), pa.int16()),
        }
    ).replace_schema_metadata({"origin": "somewhere"})
    path = tmp_path / "a.arrow"
    options = pa.ipc.IpcWriteOptions(compression=codec)
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=30)
    keep = np.arange(100) % 3 == 0
    shard(path).copy(tmp_path / "out.arrow", keep)
    opened = (pa.ipc.open_stream if is_stream else pa.ipc.open_file)(tmp_path / "out.arrow")
    found = opened.read_all()
    assert found.schema.equals(table.schema, check_metadata=True)
    assert found.to_pylist() == table.filter(pa.array(keep)).to_pylist()
    # A codec is told by what it does to the size of text that repeats itself.
    everything = tmp_path / "all.arrow"
    shard(path).copy(everything, np.arange(100) != 0)
    assert abs(everything.stat().st_size - path.stat().st_size) < 0.1 * path.stat().st_size


def test_feather_is_read_and_its_first_version_refused(tmp_path: Path) -> None:
    table = pa.table({"text": ["x", "y"]})
    pyarrow.feather.write_feather(table, tmp_path / "a.feather", compression="zstd")
    shard(tmp_path / "a.feather").copy(tmp_path / "out.feather", np.array([False, True]))
    assert pyarrow.feather.read_table(tmp_path / "out.feather").to_pylist() == [{"text": "y"}]
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(60))
    with pytest.raises(ShardError, match="first version of Feather"):
        list(shard(tmp_path / "old.feather").rows())


def test_a_stream_cut_off_is_read_to_the_cut(tmp_path: Path) -> None:
    table = pa.table({"text": [f"text {i}" for i in range(100)]})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=25)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ShardError, match="cannot be read as Arrow"):
        list(shard(path).rows())
    findings: list[Finding] = []
    rows = list(shard(path).rows(SKIP, findings))
    assert [row.content for row in rows] == [f"text {i}" for i in range(75)]
    assert [(finding.row, finding.lost) for finding in findings] == [(75, True)]
    shard(path).copy(tmp_path / "out.arrow", np.arange(75) > 70, SKIP)
    assert contents(tmp_path / "out.arrow") == [f"text {i}" for i in range(71, 75)]


@pytest.mark.parametrize("damaged", [0, 1], ids=["content", "another column"])
def test_a_row_group_that_is_damaged_is_skipped_alone(tmp_path: Path, damaged: int) -> None:
    texts = [f"text {i}" * 9 for i in range(90)]
    table = pa.table({"text": texts, "url": texts})
    path = write(
        tmp_path / "a.parquet",
        table,
        row_group_size=30,
        write_page_checksum=True,
        use_dictionary=False,
    )
    column = pq.read_metadata(path).row_group(1).column(damaged)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ShardError, match="cannot be read as Parquet"):
        shard(path).copy(tmp_path / "out.parquet", np.arange(90) != 0)
    findings: list[Finding] = []
    rows = list(shard(path).rows(SKIP, findings))
    readable = np.array([row.readable for row in rows])
    assert np.flatnonzero(~readable).tolist() == list(range(30, 60))
    assert [(finding.row, finding.lost) for finding in findings] == [(30, True)]
    shard(path).copy(tmp_path / "out.parquet", readable, SKIP)
    assert pq.read_table(tmp_path / "out.parquet").equals(table.filter(pa.array(readable)))


# Folders of datasets


@pytest.mark.parametrize("name", ["hf_save_to_disk", "hf_with_indices"])
def test_folders_are_units_that_datasets_opens_again(
    corpora: Path, tmp_path: Path, name: str
) -> None:
    folder = corpora / "E_formats" / name
    before = datasets.load_from_disk(str(folder))
    (unit,) = find_shards([folder]).shards
    assert (unit.name, unit.stem, unit.format) == (name, name, "huggingface")
    assert [row.content for row in unit.rows()] == before["text"][:]
    assert [row.sample_id for row in unit.rows()] == before["id"][:]
    keep = np.random.default_rng(0).random(len(before)) < 0.6
    unit.copy(tmp_path / "out", keep)
    after = datasets.load_from_disk(str(tmp_path / "out"))
    assert after[:] == before.select(np.flatnonzero(keep))[:]
    assert after.features == before.features
    assert after.info.description == before.info.description
    # What datasets caches of the one must not pass for the other's.
    assert after._fingerprint != before._fingerprint
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in folder.iterdir()}


def test_splits_of_a_dict_are_units_and_what_names_them_is_told(
    corpora: Path, tmp_path: Path
) -> None:
    folder = corpora / "E_formats" / "hf_dict_save_to_disk"
    found = find_shards([folder])
    assert [unit.name for unit in found.shards] == ["train", "validation"]
    assert found.beside == ((folder / "dataset_dict.json", "dataset_dict.json"),)
    before = datasets.load_from_disk(str(folder))
    for unit in found.shards:
        unit.copy(tmp_path / unit.name, np.arange(unit.count()) % 2 == 0)
    (tmp_path / "dataset_dict.json").write_bytes((folder / "dataset_dict.json").read_bytes())
    after = datasets.load_from_disk(str(tmp_path))
    for split in before:
        assert after[split][:] == before[split].select(range(0, len(before[split]), 2))[:]


def test_a_folder_of_questions_is_read_by_the_column_named(corpora: Path) -> None:
    folder = corpora / "E_formats" / "olmo_arc_challenge_val"
    (unit,) = find_shards([folder]).shards
    with pytest.raises(ShardError, match=r"'question'.*--content"):
        list(unit.rows())
    before = datasets.load_from_disk(str(folder))
    assert [r.content for r in unit.rows(Reading(content="question"))] == before["question"][:]


@given(keep=st.lists(st.booleans(), min_size=23, max_size=23), n_files=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_kept_rows_and_number_of_files_survive(keep: list[bool], n_files: int) -> None:
    rows = [{"text": f"text {i}", "score": i / 7, "tags": ["a"] * (i % 3)} for i in range(23)]
    with tempfile.TemporaryDirectory() as name:
        before = datasets.Dataset.from_list(rows)
        before.save_to_disk(f"{name}/in", num_shards=n_files)
        (unit,) = find_shards([f"{name}/in"]).shards
        unit.copy(Path(name, "out"), np.array(keep))
        after = datasets.load_from_disk(f"{name}/out")
        assert after.to_list() == [row for row, is_kept in zip(rows, keep, strict=True) if is_kept]
        assert len(list(Path(name, "out").glob("*.arrow"))) == n_files
        assert after.features == before.features
        del before, after


def test_a_folder_is_read_and_copied_to_where_it_is_cut_off(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(3000)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "in"), num_shards=3)
    second = sorted((tmp_path / "in").glob("*.arrow"))[1]
    second.write_bytes(second.read_bytes()[:-400])
    (unit,) = find_shards([tmp_path / "in"]).shards
    with pytest.raises(ShardError, match="cannot be read as Arrow"):
        list(unit.rows())
    findings: list[Finding] = []
    rows = list(unit.rows(SKIP, findings))
    assert [row.content for row in rows] == texts[: len(rows)]
    assert 1000 <= len(rows) < 2000
    assert [(finding.row, finding.lost) for finding in findings] == [(len(rows), True)]
    unit.copy(tmp_path / "out", np.arange(len(rows)) >= 7, SKIP)
    assert datasets.load_from_disk(str(tmp_path / "out"))["text"][:] == texts[7 : len(rows)]


def test_a_folder_that_names_files_outside_of_it_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(str(tmp_path / "in"))
    state = tmp_path / "in" / "state.json"
    document = json.loads(state.read_text())
    document["_data_files"] = [{"filename": "../secret.arrow"}]
    state.write_text(json.dumps(document))
    (unit,) = find_shards([tmp_path / "in"]).shards
    with pytest.raises(ShardError, match="outside of the folder"):
        list(unit.rows())
