"""Inputs behind URLs: listed there, and brought here one shard at a time."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pytest
from elsewhere import elsewhere
from jsonl_files import write_jsonl

from auditor.clean.config import DedupeConfig
from auditor.clean.dedupe import dedupe
from auditor.clean.lookup import look_up
from auditor.clean.restore import restore
from auditor.clean.row import Reading
from auditor.clean.shards import find_shards
from auditor.clean.verify import verify
from auditor.errors import ShardError
from auditor.files import sha256

TEXTS = [{"id": i, "text": f"text number {i}"} for i in range(30)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder of several formats."""
    folder = tmp_path / "corpus"
    write_jsonl(folder / "web" / "part-10.jsonl.gz", TEXTS[:10])
    write_jsonl(folder / "web" / "part-2.jsonl", TEXTS[10:20])
    (folder / "web" / "notes.csv").write_text("a,b\n")
    saved = datasets.Dataset.from_list(TEXTS[20:])
    saved.save_to_disk(str(folder / "books" / "train"))
    return folder


NAMES = ["books/train", "web/part-2.jsonl", "web/part-10.jsonl.gz"]
CONTENTS = [row["text"] for row in (*TEXTS[20:], *TEXTS[10:20], *TEXTS[:10])]


def read_all(inputs: list[str], scratch: Path) -> list[object]:
    """Contents of all shards, each brought here in turn; nothing may be left of it."""
    scratch.mkdir(exist_ok=True)
    contents: list[object] = []
    for shard in find_shards(inputs).shards:
        assert isinstance(shard.path, str)
        with shard.local(scratch) as local:
            assert isinstance(local.path, Path)
            assert local.path.is_relative_to(scratch)
            assert (local.name, local.format) == (shard.name, shard.format)
            contents += [row.content for row in local.rows()]
        assert list(scratch.iterdir()) == []
    return contents


def test_folders_globs_and_files_behind_urls(tree: Path, tmp_path: Path) -> None:
    url = elsewhere(tree)
    found = find_shards([url])
    assert [shard.name for shard in found.shards] == NAMES
    assert [Path(str(path)).name for path in found.ignored] == ["notes.csv"]
    assert found.folders == ()
    assert read_all([url], tmp_path / "scratch") == CONTENTS
    globbed = find_shards([f"{url}/web/*.jsonl*"]).shards
    assert [shard.name for shard in globbed] == ["part-2.jsonl", "part-10.jsonl.gz"]
    (one,) = find_shards([f"{url}/books/train"]).shards
    assert (one.name, one.format) == ("train", "huggingface")


def test_shards_in_memory_are_copied_as_local_ones_are(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/a.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in TEXTS))
    for name in ("train.bin", "train.idx"):
        system.pipe(f"/megatron/{name}", b"x")
    (shard,) = find_shards(["memory://bucket"]).shards
    with pytest.raises(ShardError, match="is not on this machine"):
        list(shard.rows())
    keep = np.arange(30) < 2
    with shard.local(tmp_path) as local:
        local.copy(tmp_path / "out" / shard.name, keep)
    assert (tmp_path / "out" / "a.jsonl").read_text().splitlines() == [
        json.dumps(row) for row in TEXTS[:2]
    ]
    (pair,) = find_shards(["memory://megatron"]).shards
    with pair.local(tmp_path) as local:
        assert [file.name for file in local.files()] == ["train.bin", "train.idx"]
        assert all(file.read_bytes() == b"x" for file in local.files())


def test_cleaning_what_is_behind_urls_gives_what_cleaning_files_gives(
    tree: Path, tmp_path: Path
) -> None:
    """Exact and near-duplicates, spans that are cut out, rows given back, explained, verified."""
    words = [" ".join(f"{name}{i}" for i in range(80)) for name in "abc"]
    more = [words[0], words[0] + " end", f"{words[1]} {words[2]}", f"{words[2]} other", words[1]]
    write_jsonl(
        tree / "web" / "part-11.jsonl", [{"id": f"m{i}", "text": t} for i, t in enumerate(more)]
    )
    write_jsonl(tree / "web" / "part-12.jsonl.zst", [{"text": t} for t in reversed(more)])
    shutil.rmtree(tree / "books")  # whose contents are not cut
    config = DedupeConfig(substrings="cut")
    for name, given in (("there", elsewhere(tree)), ("here", tree)):
        out = tmp_path / name
        manifest = dedupe([given], out, config=config)
        assert manifest.counts["near"] > 0 < manifest.document["substrings"]["n_spans"]
        assert verify(out).ok
        assert (
            restore(manifest, tmp_path / f"{name}-back").n_rows
            == manifest.counts["exact"] + (manifest.counts["near"])
        )
        (found,) = look_up(manifest, "m1")
        assert found.similarity is not None
    for kind in ("data", "rows.parquet", "substrings.parquet"):
        assert hashes(tmp_path / "there" / kind) == hashes(tmp_path / "here" / kind)
    assert hashes(tmp_path / "there-back") == hashes(tmp_path / "here-back")


def hashes(path: Path) -> dict[str, str]:
    files = [file for file in (path, *path.rglob("*")) if file.is_file()]
    return {str(file.relative_to(path)): sha256(file) for file in files}


def test_errors_name_the_url_and_not_the_copy_that_is_gone(tree: Path, tmp_path: Path) -> None:
    """Also for the files of a unit that is a folder, and where dropped rows are given back."""
    bad = tree / "web" / "part-2.jsonl"
    bad.write_text('{"id": "1", "text": "hi"}\n{"id": "2", "text":\n')
    with pytest.raises(ShardError, match=f"^{elsewhere(bad)}, row 1: not a line of JSON"):
        dedupe([elsewhere(tree)], tmp_path / "out")
    bad.unlink()
    (arrow,) = (tree / "books" / "train").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:-300])
    with pytest.raises(ShardError, match=f"^{elsewhere(arrow)}: cannot be read as Arrow"):
        dedupe([elsewhere(tree)], tmp_path / "out")
    (tree / "books" / "train" / "state.json").write_text("{")
    with pytest.raises(ShardError) as told:
        dedupe([elsewhere(tree)], tmp_path / "out")
    assert str(told.value).startswith(f"{elsewhere(tree)}/books/train/state.json: cannot be read")
    assert str(tmp_path / "out") not in str(told.value)


def test_a_local_shard_stays_where_it_is(tree: Path, tmp_path: Path) -> None:
    for shard in find_shards([tree]).shards:
        with shard.local(tmp_path) as local:
            assert local is shard


def test_what_is_wrong_with_a_url_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShardError, match="no such file or folder"):
        find_shards([elsewhere(tmp_path / "absent")])
    with pytest.raises(ShardError, match=r"nowhere://a: .*Protocol not known"):
        find_shards(["nowhere://a"])
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ShardError, match=r"gs://b/a\.jsonl: .*install gcsfs"):
        find_shards(["gs://b/a.jsonl"])


@pytest.fixture
def web(tree: Path) -> Iterator[str]:
    """The tree served over HTTP."""
    pytest.importorskip("aiohttp", reason="not installed: pip install aiohttp")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    handler = functools.partial(Quiet, directory=str(tree))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_files_are_read_over_http(web: str, tmp_path: Path) -> None:
    urls = [f"{web}/web/part-2.jsonl", f"{web}/web/part-10.jsonl.gz"]
    assert read_all(urls, tmp_path / "scratch") == CONTENTS[10:]
    with pytest.raises(ShardError, match="no such file or folder"):
        find_shards([f"{web}/web/absent.jsonl"])


@pytest.fixture
def s3(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The tree in a bucket of a server that speaks S3."""
    pytest.importorskip("s3fs", reason="not installed: pip install s3fs")
    server = shutil.which("moto_server", path=os.pathsep.join([str(Path(sys.executable).parent)]))
    if server is None:
        pytest.skip("not installed: pip install 'moto[server]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [server, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir("corpus")
        system.put(f"{tree}/", "corpus/data/", recursive=True)
        yield "s3://corpus/data"
    finally:
        process.terminate()
        process.wait()


def test_a_bucket_is_a_folder(s3: str, tmp_path: Path) -> None:
    assert [shard.name for shard in find_shards([s3]).shards] == NAMES
    assert read_all([s3], tmp_path / "scratch") == CONTENTS
    assert read_all([f"{s3}/web/*.jsonl*"], tmp_path / "scratch") == CONTENTS[10:]
    (one,) = find_shards([f"{s3}/books/train"]).shards
    with one.local(tmp_path) as local:
        assert local.count(Reading()) == 10
