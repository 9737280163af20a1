"""Cleaning MosaicML shards: written by its writer, and read back by its dataset.

Reading needs no package, so those tests run anywhere.
"""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.clean.row import Finding, Reading
from auditor.clean.shards import Shard, find_shards
from auditor.errors import ShardError

SKIP = Reading(on_error="skip")


def streaming() -> Any:
    """The package, or the test is skipped."""
    return pytest.importorskip(
        "streaming", reason="MosaicML Streaming is not installed: pip install mosaicml-streaming"
    )


@pytest.fixture(scope="module")
def fixtures() -> Path:
    """Folders written by MDSWriter, which are no part of the repository."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "E_formats"
    if not folder.is_dir():
        pytest.skip("no corpora beside the repository")
    return folder


def unit_of(folder: Path) -> Shard:
    (unit,) = find_shards([folder]).shards
    return unit


def samples_of(folder: Path) -> list[dict[str, Any]]:
    """All samples in order, by the dataset of the package."""
    package = streaming()
    from streaming.base.util import clean_stale_shared_memory

    gc.collect()
    clean_stale_shared_memory()
    dataset = package.StreamingDataset(local=str(folder), shuffle=False, batch_size=1)
    samples = [dataset[i] for i in range(len(dataset))]
    del dataset
    return samples


@pytest.mark.parametrize("name", ["mds_plain", "mds_zstd"])
def test_samples_are_read_in_the_order_of_the_index(fixtures: Path, name: str) -> None:
    unit = unit_of(fixtures / name)
    assert (unit.name, unit.format) == (name, "mosaic")
    rows = list(unit.rows(Reading(columns=("n",))))
    assert len(rows) == unit.count() == 200
    assert [row.columns for row in rows] == [(n,) for n in range(200)]
    assert all(isinstance(row.content, str) and row.sample_id for row in rows)
    shards = json.loads((fixtures / name / "index.json").read_text())["shards"]
    assert len(unit.files()) == len(shards) + 1


def test_plain_and_compressed_shards_hold_the_same(fixtures: Path) -> None:
    plain, packed = (list(unit_of(fixtures / f"mds_{k}").rows()) for k in ("plain", "zstd"))
    assert plain == packed


def test_folders_are_not_descended_into(fixtures: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(fixtures / "mds_plain", tmp_path / split)
    found = find_shards([tmp_path])
    assert [unit.name for unit in found.shards] == ["train", "val"]
    assert found.ignored == ()
    with pytest.raises(ShardError, match="data of other formats: 2 files"):
        find_shards([fixtures / "litdata"])


@pytest.mark.parametrize("name", ["mds_plain", "mds_zstd"])
def test_kept_samples_survive_with_columns_compression_and_hashes(
    fixtures: Path, tmp_path: Path, name: str
) -> None:
    before = samples_of(fixtures / name)
    keep = np.random.default_rng(0).random(len(before)) < 0.7
    unit_of(fixtures / name).copy(tmp_path / name, keep)
    after = samples_of(tmp_path / name)
    assert after == [sample for sample, is_kept in zip(before, keep, strict=True) if is_kept]
    old, new = (
        json.loads((folder / name / "index.json").read_text())["shards"]
        for folder in (fixtures, tmp_path)
    )
    for key in ("column_names", "column_encodings", "compression", "hashes", "size_limit"):
        assert {json.dumps(shard[key]) for shard in new} == {json.dumps(old[0][key])}
    assert all(set(shard["raw_data"]["hashes"]) == set(old[0]["hashes"]) for shard in new)


def test_columns_of_every_kind_survive_byte_for_byte(tmp_path: Path) -> None:
    package = streaming()
    columns = {
        "input_ids": "ndarray:uint16",
        "free": "ndarray",
        "fixed": "ndarray:float32:2",
        "meta": "json",
        "score": "float32",
        "big": "str_int",
        "blob": "bytes",
        "secret": "pkl",
    }
    random = np.random.default_rng(0)
    samples = [
        {
            "input_ids": random.integers(0, 60_000, 1 + i % 5).astype(np.uint16),
            "free": random.random((2, 3)),
            "fixed": random.random(2).astype(np.float32),
            "meta": {"source": f"source {i % 2}"},
            "score": np.float32(i / 3),
            "big": 10**30 + i,
            "blob": bytes([255, i]),
            "secret": {1, 2, i},
        }
        for i in range(50)
    ]
    with package.MDSWriter(out=str(tmp_path / "in"), columns=columns, size_limit=2000) as writer:
        for sample in samples:
            writer.write(sample)
    unit = unit_of(tmp_path / "in")
    rows = list(unit.rows(Reading(columns=("score", "big", "meta.source"))))
    for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        assert np.array_equal(row.content, sample["input_ids"])
        assert row.columns == (float(np.float32(i / 3)), 10**30 + i, f"source {i % 2}")
        assert row.source == f"source {i % 2}"
    keep = np.arange(50) % 3 != 0
    unit.copy(tmp_path / "out", keep)
    assert encoded(tmp_path / "out") == [
        data for data, is_kept in zip(encoded(tmp_path / "in"), keep, strict=True) if is_kept
    ]


def encoded(folder: Path) -> list[bytes]:
    """The bytes of every sample, by the reader of the package."""
    from streaming.base.format.mds.reader import MDSReader

    readers = [
        MDSReader.from_json(str(folder), "", shard)
        for shard in json.loads((folder / "index.json").read_text())["shards"]
    ]
    return [reader.get_sample_data(i) for reader in readers for i in range(reader.samples)]


def test_nothing_left_is_a_folder_without_shards(fixtures: Path, tmp_path: Path) -> None:
    streaming()
    unit = unit_of(fixtures / "mds_plain")
    unit.copy(tmp_path / "out", np.zeros(200, np.bool_))
    assert json.loads((tmp_path / "out" / "index.json").read_text())["shards"] == []
    assert unit_of(tmp_path / "out").count() == 0
    assert list(unit_of(tmp_path / "out").rows()) == []


def test_a_shard_that_is_damaged_is_lost_alone(fixtures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(fixtures / "mds_plain", folder)
    first, second = json.loads((folder / "index.json").read_text())["shards"]
    path = folder / first["raw_data"]["basename"]
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ShardError, match=r"shard\.00000\.mds, row 0: cannot be read"):
        list(unit_of(folder).rows())
    findings: list[Finding] = []
    rows = list(unit_of(folder).rows(SKIP, findings))
    assert [row.readable for row in rows] == [False] * first["samples"] + [True] * second["samples"]
    assert all(finding.lost for finding in findings[: first["samples"]])


def test_an_index_that_leads_out_of_its_folder_is_refused(fixtures: Path, tmp_path: Path) -> None:
    index = json.loads((fixtures / "mds_plain" / "index.json").read_text())
    index["shards"][0]["raw_data"]["basename"] = "../shard.00000.mds"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "index.json").write_text(json.dumps(index))
    with pytest.raises(ShardError, match="outside of the folder"):
        list(unit_of(tmp_path / "in").rows())


def test_writing_without_the_package_names_the_extra(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "streaming", None)
    unit = unit_of(fixtures / "mds_plain")
    with pytest.raises(ShardError, match=r"auditor\[mosaic\]"):
        unit.copy(tmp_path / "out", np.arange(200) > 3)
    assert not (tmp_path / "out").exists()
    # All of it is kept: its files are.
    unit.copy(tmp_path / "out", np.ones(200, np.bool_))
    for file in unit.files():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
