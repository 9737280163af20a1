"""JSON Lines: what parsing must not change, and what bounds it."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonl_files import write_jsonl

from auditor.clean.formats import jsonl
from auditor.clean.row import MAX_FINDINGS, Finding, Findings, Reading
from auditor.clean.shards import Shard, find_shards
from auditor.errors import ShardError

SKIP = Reading(on_error="skip")


def shard(path: Path) -> Shard:
    return find_shards([path]).shards[0]


NUMBERS = st.integers(-(10**25), 10**25) | st.floats() | st.sampled_from([2**63, 2**64, -0.0])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    rows=st.lists(
        st.fixed_dictionaries({"text": VALUES, "id": VALUES}, optional={"score": VALUES}),
        min_size=1,
        max_size=5,
    ),
    ascii_only=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_rows_are_the_same_with_orjson_and_without(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], ascii_only: bool
) -> None:
    pytest.importorskip("orjson", reason="not installed: pip install orjson")
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    reading = Reading(on_error="skip", columns=("score",))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            findings: list[Finding] = []
            read = list(jsonl.rows(path, reading, Findings(findings)))
            found.append(([told(row) for row in read], findings))
            patch.setattr(jsonl, "orjson", None)
    assert found[0] == found[1]


def told(row: Any) -> str:
    """A row in full, with NaN equal to itself and types told apart."""
    return repr(row._replace(content=repr(np.asarray(row.content).tolist())))


def test_columns_asked_for_come_along(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{"text": "x", "meta": {"score": 0.5}, "lang": "en"}, {"text": "y"}, [1]],
    )
    rows = shard(path).rows(Reading(columns=("meta.score", "lang")))
    assert [row.columns for row in rows] == [(0.5, "en"), (None, None), (None, None)]


def test_findings_beyond_a_bound_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 1}\n' * MAX_FINDINGS + '{"cut\n' * 5 + '{"text": "x"}\n')
    findings: list[Finding] = []
    assert len(list(shard(path).rows(SKIP, findings))) == MAX_FINDINGS + 6
    assert len(findings) == MAX_FINDINGS + 1
    assert findings[-1] == Finding(None, "5 further findings, 5 of lost rows", lost=True)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_too_long_is_refused_by_row_and_never_held(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_BYTES", 1 << 20)
    data = b'{"text": "x"}\n' + b"a" * (160 << 20) + b'\n{"text": "y"}\n'
    packed = {"": data, ".gz": gzip.compress(data, 1), ".zst": zstandard.compress(data)}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    del data, packed
    with pytest.raises(ShardError, match=r"row 1: .*longer than 1 MB"):
        list(shard(path).rows())
    findings: list[Finding] = []
    tracemalloc.start()
    rows = list(shard(path).rows(SKIP, findings))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row.content for row in rows] == ["x", None, "y"]
    assert [(finding.row, finding.lost) for finding in findings] == [(1, True)]
    assert peak < 72 << 20
    shard(path).copy(tmp_path / f"out.jsonl{suffix}", np.array([True, False, True]), SKIP)
    assert [row.content for row in shard(tmp_path / f"out.jsonl{suffix}").rows()] == ["x", "y"]
