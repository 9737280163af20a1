"""WebDataset shards, read back by webdataset where it is installed, else by ``tarfile``."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from auditor.clean.row import Finding, Reading
from auditor.clean.shards import Shard, find_shards
from auditor.errors import ShardError

SKIP = Reading(on_error="skip")


def shard(path: Path) -> Shard:
    return find_shards([path]).shards[0]


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def samples_of(path: Path) -> dict[str, dict[str, bytes]]:
    """Members by key and extension, read with ``tarfile`` alone."""
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isfile():
                folder, _, base = member.name.rpartition("/")
                key, _, extension = base.partition(".")
                content = tar.extractfile(member)
                assert content is not None
                found.setdefault(f"{folder}/{key}".lstrip("/"), {})[extension] = content.read()
    return found


def npy(ids: list[int]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(ids, np.uint16))
    return file.getvalue()


def test_samples_are_groups_of_members_by_key(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "a.tar",
        [
            ("a/0.json", json.dumps({"source": "wiki", "score": 0.5}).encode()),
            ("a/0.txt", "é".encode()),
            ("a/0.seg.png", b"\x89PNG"),
            ("a/1.txt", b"two"),
            ("__meta__", b"x"),
        ],
    )
    findings: list[Finding] = []
    first, second = shard(path).rows(Reading(columns=("json.score", "score")), findings)
    assert (first.content, first.sample_id, first.source) == ("é", "a/0", "wiki")
    assert first.columns == (0.5, 0.5)
    assert (second.content, second.sample_id, second.source) == ("two", "a/1", None)
    assert [finding.what for finding in findings] == ["'__meta__' is in no sample: it is left out"]
    assert shard(path).count() == 2


@pytest.mark.parametrize(
    ("members", "content", "expected"),
    [
        ([("0.json", b'{"text": "x"}')], None, "x"),
        ([("0.json", b'{"body": {"text": "x"}}')], "json.body.text", "x"),
        ([("0.json", b'{"body": {"text": "x"}}')], "body.text", "x"),
        ([("0.json", b'{"input_ids": [1, 2]}')], None, [1, 2]),
        ([("0.json", b"[1, 2]")], None, [1, 2]),
        ([("0.npy", npy([3, 4]))], None, [3, 4]),
        ([("0.tokens.npy", npy([3, 4])), ("0.txt", b"x")], "tokens.npy", [3, 4]),
        ([("0.txt.gz", gzip.compress(b"packed"))], None, "packed"),
        ([("0.caption.txt", b"x"), ("0.txt", b"y")], "caption.txt", "x"),
    ],
)
def test_content_is_text_or_ids_of_a_member_or_a_field_of_one(
    tmp_path: Path, members: list[tuple[str, bytes]], content: str | None, expected: object
) -> None:
    (row,) = shard(write_tar(tmp_path / "a.tar", members)).rows(Reading(content=content))
    found = row.content
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == expected


def test_members_are_named_where_there_is_no_content(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.mp", b"x"), ("0.json", b'{"body": "x"}')])
    with pytest.raises(ShardError, match=r"'mp', 'json'; fields of 'json': 'body'.*--content"):
        list(shard(path).rows())


def test_samples_that_are_damaged_are_lost_alone(tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(257 << 20))
    path = write_tar(
        tmp_path / "a.tar",
        [
            ("0.txt", b"x"),
            ("1.txt", b"\xff"),
            ("../../2.txt", b"leads out"),
            ("3.txt", b"x"),
            ("3.txt", b"y"),
            ("4.txt.gz", bomb),
            ("5.txt", b"last"),
        ],
    )
    with pytest.raises(ShardError, match=r"row 1: cannot be decoded"):
        list(shard(path).rows())
    findings: list[Finding] = []
    rows = list(shard(path).rows(SKIP, findings))
    assert [row.readable for row in rows] == [True, False, False, False, False, True]
    whats = [finding.what for finding in findings]
    for part, what in zip(["utf-8", "leads out", "twice", "longer than 256"], whats, strict=True):
        assert part in what


def test_ids_are_never_unpickled(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"x": 1}]), allow_pickle=True)
    path = write_tar(tmp_path / "a.tar", [("0.npy", file.getvalue())])
    with pytest.raises(ShardError, match="row 0: cannot be decoded"):
        list(shard(path).rows())


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_an_archive_cut_off_is_read_to_the_cut(tmp_path: Path, suffix: str, cut: float) -> None:
    random = np.random.default_rng(0)
    members = [(f"{i}.txt", random.bytes(900).hex().encode()) for i in range(40)]
    path = write_tar(tmp_path / f"a{suffix}", members, "w:gz" if suffix == ".tar.gz" else "w")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    with pytest.raises(ShardError, match="cannot be read to its end"):
        list(shard(path).rows())
    findings: list[Finding] = []
    rows = list(shard(path).rows(SKIP, findings))
    assert len(rows) > 40 * cut - 8
    assert [str(row.content).encode() for row in rows] == [data for _, data in members[: len(rows)]]
    assert findings[-1].lost


def test_an_archive_without_its_end_is_told(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.txt", b"x"), ("1.txt", b"y")])
    path.write_bytes(path.read_bytes()[:2048])
    findings: list[Finding] = []
    assert len(list(shard(path).rows(findings=findings))) == 2
    assert [finding.what for finding in findings] == ["has no mark of its end: it may be cut off"]


def test_fixtures_of_webdataset_are_read(corpora: Path) -> None:
    folder = corpora / "E_formats"
    texts = list(shard(folder / "webdataset_text-000000.tar").rows())
    assert len(texts) == 200
    members = samples_of(folder / "webdataset_text-000000.tar")
    assert [str(row.content).encode() for row in texts] == [m["txt"] for m in members.values()]
    packed = list(shard(folder / "webdataset_fixture_compressed.tar").rows())
    assert len(packed) == 3
    assert all(isinstance(row.content, str) for row in packed)
    with pytest.raises(ShardError, match="members found: 'mp'"):
        list(shard(folder / "webdataset_fixture_mpdata.tar").rows())


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_kept_samples_survive_member_by_member(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("webdataset", reason="not installed: pip install webdataset")
    from webdataset import WebDataset

    members = []
    for i in range(30):
        key = f"part/{'k' * (150 if i == 7 else 1)}{i}"
        members += [(f"{key}.txt", f"text {i}".encode()), (f"{key}.Seg.PNG", bytes([i]) * i)]
    path = write_tar(tmp_path / f"a{suffix}", members, "w:gz" if suffix == ".tar.gz" else "w")
    keep = np.arange(30) % 4 != 1
    out = tmp_path / "out" / path.name
    shard(path).copy(out, keep)
    before = list(samples_of(path).items())
    kept = [sample for sample, is_kept in zip(before, keep, strict=True) if is_kept]
    assert list(samples_of(out).items()) == kept
    opened = list(WebDataset(str(out), shardshuffle=False))
    assert [(sample["__key__"], sample["txt"]) for sample in opened] == [
        (key, fields["txt"]) for key, fields in kept
    ]
    again = tmp_path / "again" / path.name
    shard(path).copy(again, keep)
    assert again.read_bytes() == out.read_bytes()


def test_writing_without_webdataset_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "webdataset", None)
    path = write_tar(tmp_path / "a.tar", [("0.txt", b"x"), ("1.txt", b"y")])
    with pytest.raises(ShardError, match=r"auditor\[webdataset\]"):
        shard(path).copy(tmp_path / "out.tar", np.array([True, False]))
    # All of it is kept: its bytes are.
    shard(path).copy(tmp_path / "out.tar", np.array([True, True]))
    assert (tmp_path / "out.tar").read_bytes() == path.read_bytes()
