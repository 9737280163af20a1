"""Reading and copying shards: nothing lost in silence, nothing changed in passing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from elsewhere import elsewhere
from jsonl_files import write_jsonl

from auditor.clean.row import Reading
from auditor.clean.shards import MARKER, Shard, check_out, find_shards
from auditor.errors import ShardError
from auditor.files import atomic

TEXTS = [{"id": i, "text": f"text number {i}"} for i in range(30)]


def shard(path: Path) -> Shard:
    return find_shards([path]).shards[0]


def lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    elif path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    return data.splitlines(keepends=True)


# What is meant by the inputs


def test_find_shards_takes_folders_files_and_globs_in_natural_order(tmp_path: Path) -> None:
    for name in ("part-10.jsonl", "part-2.jsonl.gz", "sub/part-1.jsonl.zst"):
        write_jsonl(tmp_path / name, TEXTS)
    names = ["part-2.jsonl.gz", "part-10.jsonl", "sub/part-1.jsonl.zst"]
    assert [s.name for s in find_shards([tmp_path]).shards] == names
    assert [s.name for s in find_shards([tmp_path / "**" / "*.jsonl*"]).shards] == names
    twice = find_shards([tmp_path, tmp_path / "part-10.jsonl"])
    assert [s.name for s in twice.shards] == names
    assert [s.name for s in find_shards([tmp_path / "sub"]).shards] == ["part-1.jsonl.zst"]


def test_find_shards_names_data_it_passes_over(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    for name in ("b.csv", "weights.bin", "lit/chunk-0.bin", ".cache/c.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "lit/index.json").write_text('{"chunks": []}')
    (tmp_path / "README.md").write_text("no data")
    found = find_shards([tmp_path])
    assert [Path(path).name for path in found.ignored] == ["b.csv", "chunk-0.bin", "weights.bin"]
    assert [shard.name for shard in found.shards] == ["a.jsonl"]


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.mds", "a.orc", "a"])
def test_find_shards_says_which_formats_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    for given in (tmp_path / name, tmp_path):
        with pytest.raises(ShardError, match=r"JSON Lines .*Parquet.*WebDataset.*Megatron"):
            find_shards([given])


def test_find_shards_refuses_two_units_of_one_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ShardError, match=r"has the name 'a.jsonl', and so has"):
        find_shards([tmp_path / "a.jsonl", elsewhere(tmp_path / "a.jsonl")])


def test_a_file_url_is_a_path_on_this_machine(tmp_path: Path) -> None:
    """Also one with escapes, and a glob; so an output in such an input is refused."""
    folder = tmp_path / "my texts"
    path = write_jsonl(folder / "a.jsonl", TEXTS)
    assert folder.as_uri().endswith("my%20texts")
    for given in (folder.as_uri(), f"FILE://{folder}", f"local://{folder}"):
        assert find_shards([given]) == find_shards([folder])
    globbed = find_shards([f"file://{folder}/*.jsonl", path]).shards
    assert globbed == (Shard(path, "a.jsonl", "jsonl"),)
    with pytest.raises(ShardError, match="lies within the input"):
        check_out(folder / "out", find_shards([folder.as_uri()]))


def test_find_shards_refuses_a_missing_path(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no such file"):
        find_shards([tmp_path / "absent.jsonl"])


def test_find_shards_keeps_the_names_of_symbolic_links(tmp_path: Path) -> None:
    blob = write_jsonl(tmp_path / "blobs" / "0a1b", TEXTS)
    link = tmp_path / "snapshot" / "train.jsonl"
    link.parent.mkdir()
    link.symlink_to(blob)
    assert len(list(shard(link).rows())) == 30


# Rows


def test_rows_take_content_identity_and_source_from_the_usual_fields(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [
            {"text": "x", "id": 7, "source": "wiki"},
            {"text": "y", "sample_id": "s", "meta": {"source": "books"}},
            {"text": "z", "__key__": "k"},
            {"text": None},
            {"text": 5},
            [1, 2],
        ],
    )
    rows = list(shard(path).rows())
    assert [row.content for row in rows] == ["x", "y", "z", None, None, None]
    assert [row.sample_id for row in rows] == ["7", "s", "k", None, None, None]
    assert [row.source for row in rows] == ["wiki", "books", None, None, None, None]


@pytest.mark.parametrize("column", ["input_ids", "tokens"])
def test_rows_take_token_ids_where_there_is_no_text(tmp_path: Path, column: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{column: [1, 2, 3]}, {column: [1, "2"]}])
    pq.write_table(pa.table({column: [[1, 2, 3], None]}), tmp_path / "a.parquet")
    for each in (path, tmp_path / "a.parquet"):
        first, second = shard(each).rows()
        assert isinstance(first.content, np.ndarray)
        assert first.content.tolist() == [1, 2, 3]
        assert second.content is None


def test_rows_follow_a_dotted_content_path(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"data": {"body": {"text": "deep"}}}, {"data": 1}])
    assert [r.content for r in shard(path).rows(Reading(content="data.body.text"))] == [
        "deep",
        None,
    ]


def test_rows_name_the_columns_found_where_there_is_no_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"body": "x", "title": "y"}])
    with pytest.raises(ShardError, match=r"'body', 'title'.*--content"):
        list(shard(path).rows())


def test_rows_let_unreadable_lines_through_on_request_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": "cut\n{"text": "y"}\n')
    with pytest.raises(ShardError, match=r"a\.jsonl, row 1: .*--on-error skip"):
        list(shard(path).rows())
    assert [r.readable for r in shard(path).rows(Reading(on_error="skip"))] == [True, False, True]


# Copies


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_copy_preserves_the_bytes_of_kept_lines(tmp_path: Path, name: str) -> None:
    odd = b'{"text" :  "a\\u00e9\xe2\x80\xa8", "n": 1.0}\r\n{"text":"b"}\n{"b":1, "text":"c"}'
    path = tmp_path / name
    packed = {"": odd, ".gz": gzip.compress(odd), ".zst": zstandard.compress(odd)}
    path.write_bytes(packed["" if path.suffix == ".jsonl" else path.suffix])
    shard(path).copy(tmp_path / "out" / name, np.array([True, False, True]))
    assert b"".join(lines(tmp_path / "out" / name)) == odd.replace(b'{"text":"b"}\n', b"")


def test_copy_of_everything_is_the_same_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.gz", TEXTS)
    shard(path).copy(tmp_path / "out.jsonl.gz", np.ones(30, np.bool_))
    assert (tmp_path / "out.jsonl.gz").read_bytes() == path.read_bytes()


def test_copy_keeps_parquet_schema_metadata_order_and_compression(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": pa.array([f"t{i}" for i in range(100)]).dictionary_encode(),
            "nested": [{"a": i} for i in range(100)],
            "id": pa.array(range(100), pa.int16()),
        }
    ).replace_schema_metadata({"origin": "somewhere"})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=30, compression={"text": "zstd", "id": "gzip"})
    keep = np.arange(100) % 3 == 0
    shard(path).copy(tmp_path / "out.parquet", keep)
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.schema.equals(pq.read_table(path).schema, check_metadata=True)
    assert found.to_pylist() == table.filter(pa.array(keep)).to_pylist()
    before, after = (pq.read_metadata(p).row_group(0) for p in (path, tmp_path / "out.parquet"))
    for i in range(before.num_columns):
        assert after.column(i).compression == before.column(i).compression


def test_copy_refuses_a_shard_that_has_changed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    pq.write_table(pa.table({"text": ["x", "y"]}), tmp_path / "a.parquet")
    for each in (path, tmp_path / "a.parquet"):
        with pytest.raises(ShardError, match="had 7 rows"):
            shard(each).copy(tmp_path / "out" / each.name, np.arange(7) > 3)
    assert not list((tmp_path / "out").iterdir())


def test_atomic_leaves_nothing_behind_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


# The output folder


def test_check_out_refuses_folders_in_use(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", TEXTS)
    inputs = find_shards([tmp_path / "in"])
    (tmp_path / "file").touch()
    write_jsonl(tmp_path / "full" / "x.jsonl", TEXTS)
    refused = {
        "in": "contains the input",
        ".": "contains the input",
        "in/clean": "lies within the input",
        "file": "is a file",
        "full": "not empty",
    }
    for name, message in refused.items():
        with pytest.raises(ShardError, match=message):
            check_out(tmp_path / name, inputs)
    check_out(tmp_path / "new", inputs)


def test_check_out_takes_what_an_interrupted_call_left(tmp_path: Path) -> None:
    inputs = find_shards([write_jsonl(tmp_path / "a.jsonl", TEXTS)])
    write_jsonl(tmp_path / "out" / "data" / "stale.jsonl", TEXTS)
    (tmp_path / "out" / MARKER).mkdir()
    check_out(tmp_path / "out", inputs)


# Damage


@pytest.mark.parametrize("cut", [0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_truncation_anywhere_is_an_error(tmp_path: Path, cut: float, suffix: str) -> None:
    generator = np.random.default_rng(0)
    rows = [{"text": generator.bytes(40).hex()} for _ in range(2000)]
    path = write_jsonl(tmp_path / f"a.jsonl{suffix}", rows)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    with pytest.raises(ShardError, match="cannot be read to its end"):
        list(shard(path).rows())


def test_a_lone_surrogate_in_an_id_becomes_printable(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x", "id": "\ud800"}))
    (row,) = shard(tmp_path / "a.jsonl").rows()
    assert row.sample_id == "\\ud800"
