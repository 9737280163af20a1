"""From shards to cleaned shards: every row accounted for, every drop justified."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonl_files import write_jsonl

from auditor.clean.config import DedupeConfig
from auditor.clean.dedupe import dedupe
from auditor.clean.manifest import Manifest, load_manifest
from auditor.clean.shards import MARKER
from auditor.clean.verify import verify
from auditor.errors import ShardError
from auditor.measure.sketch import jaccard, shingle_hashes_text
from auditor.schema import ROWS

LOREM = " ".join(f"word{i}" for i in range(60))
NEAR = LOREM.replace("word59", "other")  # shares 55 of 57 shingles with LOREM
VERSE = "for the which, if you do, I shall be most glad, and you will be most blessed in the end"
CHANT = "buy now " * 40


def decisions(manifest: Manifest) -> list[str]:
    return [reason or "kept" for reason in manifest.rows["reason"].to_list()]


def clean(tmp_path: Path, texts: list[Any], **config: Any) -> Manifest:
    path = write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": text} for text in texts])
    return dedupe([path], tmp_path / "out", config=DedupeConfig(**config))


def check_conserved(manifest: Manifest) -> None:
    """Kept and dropped add up, keepers are kept and similar enough, order is kept."""
    rows = manifest.rows
    counts = manifest.counts
    dropped = sum(counts[name] for name in ("exact", "near", "repetition", "unreadable"))
    assert counts["rows_in"] == rows.height == counts["rows_out"] + dropped
    assert rows.columns == list(ROWS)
    kept = set(rows.filter(pl.col("decision") == "kept").select("shard", "row").iter_rows())
    threshold = manifest.document["parameters"]["threshold"]
    for row in rows.iter_rows(named=True):
        assert (row["reason"] is None) == (row["decision"] == "kept")
        assert row["weight"] == (row["decision"] == "kept")
        if row["reason"] in ("exact", "near"):
            assert (row["keeper_shard"], row["keeper_row"]) in kept
            assert row["jaccard"] >= np.float32(threshold)
            assert row["cluster"] is not None
        else:
            assert row["keeper_shard"] is row["keeper_row"] is row["jaccard"] is None
    for shard in manifest.shards:
        parents = manifest.document["shards"]
        parent = next(entry["parent"] for entry in parents if entry["shard"] == shard.name)
        if shard.format == "jsonl" and not parent.endswith((".gz", ".zst")):
            lines = [line for line in Path(parent).read_bytes().split(b"\n") if line.strip()]
            keep = manifest.keep(shard.name)
            expected = [line for line, is_kept in zip(lines, keep, strict=True) if is_kept]
            children = shard.path.read_bytes().split(b"\n")
            assert [line for line in children if line.strip()] == expected


def test_dedupe_gives_each_row_one_reason(tmp_path: Path) -> None:
    rows = [LOREM, LOREM.upper() + "\n", NEAR, VERSE, CHANT, CHANT, "", " ", None, VERSE]
    manifest = clean(tmp_path, rows)
    assert decisions(manifest) == [
        *("kept", "exact", "near", "kept", "repetition", "repetition"),
        *("kept", "exact", "kept", "exact"),
    ]
    assert manifest.rows["keeper_row"].to_list() == [
        *(None, 0, 0, None, None, None, None, 6, None, 3)
    ]
    assert manifest.rows["cluster"].to_list() == [0, 0, 0, 1, None, None, 2, 2, None, 1]
    near = jaccard(shingle_hashes_text(LOREM), shingle_hashes_text(NEAR))
    assert manifest.rows["jaccard"][2] == pytest.approx(near)
    assert manifest.counts["without_content"] == 1
    check_conserved(manifest)
    assert verify(tmp_path / "out").ok
    assert not (tmp_path / "out" / MARKER).exists()


def test_dedupe_names_the_kept_row_for_copies_of_a_near_duplicate(tmp_path: Path) -> None:
    manifest = clean(tmp_path, [LOREM, NEAR, NEAR])
    assert decisions(manifest) == ["kept", "near", "near"]
    assert manifest.rows["keeper_row"].to_list() == [None, 0, 0]


def test_dedupe_can_keep_the_longest(tmp_path: Path) -> None:
    manifest = clean(tmp_path, [LOREM, LOREM + " at the very end"], keep="longest")
    assert decisions(manifest) == ["near", "kept"]
    check_conserved(manifest)


def test_dedupe_can_leave_repetition_alone(tmp_path: Path) -> None:
    assert decisions(clean(tmp_path, [CHANT, CHANT], repetition=False)) == ["kept", "exact"]


def test_dedupe_finds_chinese_near_duplicates_by_characters(tmp_path: Path) -> None:
    poem = "慈母手中线,游子身上衣。临行密密缝,意恐迟迟归。谁言寸草心,报得三春晖。" * 2
    revised = poem[:-1] + "!"
    assert decisions(clean(tmp_path, [poem, revised])) == ["kept", "near"]


def test_dedupe_reads_token_ids(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, (3, 200))
    ids[2] = ids[0]
    ids[2, -1] += 1
    rows = [*ids.tolist(), ids[1].tolist(), [7] * 100]
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "a.parquet")
    manifest = dedupe([tmp_path / "a.parquet"], tmp_path / "out")
    assert decisions(manifest) == ["kept", "kept", "near", "exact", "repetition"]
    check_conserved(manifest)


@pytest.mark.parametrize(
    ("column", "value", "shingle"), [("text", "x", "token5"), ("tokens", [1], "word5")]
)
def test_dedupe_refuses_shingles_that_do_not_fit_the_content(
    tmp_path: Path, column: str, value: Any, shingle: Any
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{column: value}])
    with pytest.raises(ShardError, match=rf"{shingle}.*--shingle"):
        dedupe([path], tmp_path / "out", config=DedupeConfig(shingle=shingle))
    assert dedupe([path], tmp_path / "out").counts["rows_out"] == 1


def test_dedupe_drops_and_counts_unreadable_rows_on_request(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": "cut\n{"text": "y"}\n')
    with pytest.raises(ShardError, match="row 1"):
        dedupe([path], tmp_path / "out")
    manifest = dedupe([path], tmp_path / "out", config=DedupeConfig(on_error="skip"))
    assert decisions(manifest) == ["kept", "unreadable", "kept"]
    assert (tmp_path / "out/data/a.jsonl").read_bytes() == b'{"text": "x"}\n{"text": "y"}\n'


def test_dedupe_works_across_shards_and_formats(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a" / "x.jsonl.gz", [{"text": LOREM}, {"text": VERSE}])
    write_jsonl(tmp_path / "in" / "b.jsonl.zst", [{"text": NEAR}])
    pq.write_table(pa.table({"text": [VERSE, "new"]}), tmp_path / "in" / "c.parquet")
    manifest = dedupe([tmp_path / "in"], tmp_path / "out")
    assert manifest.rows.select("shard", "reason", "keeper_shard").rows() == [
        ("a/x.jsonl.gz", None, None),
        ("a/x.jsonl.gz", None, None),
        ("b.jsonl.zst", "near", "a/x.jsonl.gz"),
        ("c.parquet", "exact", "a/x.jsonl.gz"),
        ("c.parquet", None, None),
    ]
    assert verify(tmp_path / "out").ok
    assert pq.read_table(tmp_path / "out/data/c.parquet").to_pylist() == [{"text": "new"}]


def test_dedupe_leaves_its_inputs_untouched(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in" / "a.jsonl.gz", [{"text": LOREM}, {"text": LOREM}])
    before = path.read_bytes(), path.stat()
    dedupe([path], tmp_path / "out")
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before[0], before[1].st_mtime_ns)
    assert [p.name for p in path.parent.iterdir()] == ["a.jsonl.gz"]


def test_dedupe_dry_run_decides_and_writes_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": LOREM}, {"text": LOREM}])
    manifest = dedupe([path], tmp_path / "out", dry_run=True)
    assert decisions(manifest) == ["kept", "exact"]
    assert not (tmp_path / "out").exists()
    assert manifest.counts == dedupe([path], tmp_path / "out").counts


def test_dedupe_result_does_not_depend_on_how_rows_are_sharded(tmp_path: Path) -> None:
    texts = [LOREM, VERSE, NEAR, VERSE, LOREM, *(LOREM[i * 9 :] for i in range(12))]
    one = clean(tmp_path, texts)
    for i, text in enumerate(texts):
        write_jsonl(tmp_path / "split" / f"part-{i}.jsonl", [{"text": text}])
    many = dedupe([tmp_path / "split"], tmp_path / "out-split")
    columns = ["reason", "cluster", "jaccard"]
    assert many.rows.select(columns).equals(one.rows.select(columns))


def test_dedupe_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", [{"text": LOREM}, {"text": name}])

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "write" and 0 < done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dedupe([tmp_path / "in"], tmp_path / "out", progress=stop)
    assert not (tmp_path / "out" / "manifest.json").exists()
    first = (tmp_path / "out" / "data" / "a.jsonl").stat()
    manifest = dedupe([tmp_path / "in"], tmp_path / "out")
    assert (tmp_path / "out" / "data" / "a.jsonl").stat().st_ino == first.st_ino
    assert decisions(manifest) == ["kept", "kept", "exact", "kept"]
    assert verify(tmp_path / "out").ok
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        *("data", "manifest.json", "rows.parquet")
    ]
    with pytest.raises(ShardError, match="not empty"):
        dedupe([tmp_path / "in"], tmp_path / "out")


def test_dedupe_starts_over_for_other_settings_or_inputs(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": LOREM}, {"text": NEAR}])

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dedupe([path], tmp_path / "out", progress=stop)
    write_jsonl(path, [{"text": LOREM}, {"text": NEAR}, {"text": VERSE}])
    with pytest.raises(KeyboardInterrupt):
        dedupe([path], tmp_path / "out", progress=stop)
    manifest = dedupe([path], tmp_path / "out", config=DedupeConfig(threshold=1.0))
    assert decisions(manifest) == ["kept", "kept", "kept"]


def test_dedupe_reports_progress_in_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": LOREM}, {"text": NEAR + name}])
    size = (tmp_path / "a.jsonl").stat().st_size
    told: list[tuple[str, int, int]] = []
    dedupe([tmp_path / "*.jsonl"], tmp_path / "out", progress=lambda *event: told.append(event))
    assert told == [
        (stage, done * size, 2 * size)
        for stage in ("read", "compare", "write")
        for done in (0, 1, 2)
    ]


def test_dedupe_projects_epochs_and_keeps_them_within_the_budget(tmp_path: Path) -> None:
    small = [{"text": LOREM, "source": "small"}] * 50
    large = [{"text": f"row {i} of many", "source": "large"} for i in range(150)]
    path = write_jsonl(tmp_path / "a.jsonl", small + large)
    manifest = dedupe(
        [path], tmp_path / "out", source_weights={"small": 0.5, "large": 0.5}, n_samples=400
    )
    entry = manifest.document["sources"]["small"]
    assert (entry["rows_in"], entry["rows_out"]) == (50, 1)
    assert entry["projected_epochs_at_old_weight"] == pytest.approx(200)
    assert entry["projected_epochs"] == pytest.approx(4)
    assert manifest.weights == pytest.approx({"small": 0.01, "large": 0.99})
    assert manifest.document["mix"]["capped"] == ["small"]
    assert manifest.document["mix"]["unmatched"] == []


def test_weights_of_sources_that_the_shards_do_not_name_are_left_out_and_listed(
    tmp_path: Path,
) -> None:
    rows = [{"text": f"row {i} of many", "source": "ab"[i % 4 == 0]} for i in range(40)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    partly = dedupe([path], tmp_path / "out", source_weights={"a": 1, "web": 3}, dry_run=True)
    assert partly.document["mix"]["unmatched"] == ["web"]
    assert partly.document["sources"]["a"]["weight_before"] == 1.0
    none = dedupe([path], tmp_path / "out", source_weights={"web": 1}, dry_run=True)
    assert none.document["mix"]["unmatched"] == ["web"]
    assert none.document["sources"]["b"]["weight_before"] == pytest.approx(0.25)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_padding_under_an_attention_mask_is_no_repetition(form: str, tmp_path: Path) -> None:
    rows = [
        {
            "input_ids": [*range(100 * i, 100 * i + 20), *[0] * 44],
            "attention_mask": [1] * 20 + [0] * 44,
        }
        for i in range(8)
    ]
    path = tmp_path / f"a.{form}"
    if form == "jsonl":
        write_jsonl(path, rows)
    else:
        pl.DataFrame(rows).write_parquet(path)
    assert dedupe([path], tmp_path / "out").counts["rows_out"] == 8


corpus = st.lists(
    st.tuples(
        st.sampled_from([LOREM, VERSE, CHANT, "", "short", None]),
        st.integers(0, 59),
        st.booleans(),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(corpus, st.integers(1, 4), st.sampled_from(["first", "longest"]))
def test_dedupe_conserves_rows_and_finds_nothing_the_second_time(
    drawn: list[tuple[str | None, int, bool]], n_shards: int, keep: Any
) -> None:
    texts = [
        text.replace(f"word{i}", "changed") if text and changed else text
        for text, i, changed in drawn
    ]
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for i in range(n_shards):
            rows = [{"text": text} for text in texts[i::n_shards]]
            write_jsonl(root / "in" / f"{i}.jsonl", rows)
        config = DedupeConfig(keep=keep)
        first = dedupe([root / "in"], root / "out", config=config)
        check_conserved(first)
        assert verify(root / "out").ok
        second = dedupe([root / "out" / "data"], root / "again", config=config)
        assert second.counts["rows_out"] == second.counts["rows_in"] == first.counts["rows_out"]


def test_dedupe_of_real_revisions_drops_only_verified_rows(corpora: Path, tmp_path: Path) -> None:
    shutil.copy(corpora / "B_neardup" / "docs-00-of-04.jsonl.zst", tmp_path / "a.jsonl.zst")
    manifest = dedupe([tmp_path / "a.jsonl.zst"], tmp_path / "out")
    check_conserved(manifest)
    assert manifest.counts["near"] > 100
    texts = [row.content for row in _rows_of(tmp_path / "a.jsonl.zst")]
    for row in manifest.rows.filter(pl.col("reason") == "near").head(40).iter_rows(named=True):
        pair = (str(texts[row["row"]]), str(texts[row["keeper_row"]]))
        exact = jaccard(*(shingle_hashes_text(text, "auto", bits=64) for text in pair))
        assert row["jaccard"] == pytest.approx(exact)
        assert exact >= 0.8


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Two of its rows are one letter 200,000 times.
        ("one_long_word.jsonl", {"rows_in": 3, "repetition": 2}),
        ("duplicate_ids.jsonl", {"rows_in": 4, "exact": 1}),
        ("zst_long_window_27.jsonl.zst", {"rows_in": 1800, "rows_out": 60}),
        ("lone_surrogates.jsonl", {"rows_in": 4}),
        ("missing_or_null_text.jsonl", {"rows_in": 6, "without_content": 3}),
        ("text_nulls.parquet", {"rows_in": 20, "without_content": 5}),
        ("schema_c_dictionary.parquet", {"rows_in": 20, "rows_out": 5}),
        ("empty_file.jsonl", {"rows_in": 0, "rows_out": 0}),
        ("zero_rows.parquet", {"rows_in": 0, "rows_out": 0}),
        ("rtl_arabic_persian.jsonl", {"rows_in": 11}),
    ],
)
def test_awkward_file_is_cleaned(
    corpora: Path, tmp_path: Path, name: str, expected: dict[str, int]
) -> None:
    path = corpora / "C_awkward" / name
    before = sha256(path.read_bytes()).hexdigest()
    manifest = dedupe([path], tmp_path / "out")
    assert manifest.counts.items() >= expected.items()
    assert verify(tmp_path / "out").ok
    assert load_manifest(tmp_path / "out").document["shards"][0]["parent_sha256"] == before


def test_awkward_chinese_pair_is_found_by_characters(corpora: Path, tmp_path: Path) -> None:
    """A short poem with every full stop replaced: similarity .58 by characters."""
    path = corpora / "C_awkward" / "chinese_no_spaces.jsonl"
    manifest = dedupe([path], tmp_path / "out", config=DedupeConfig(threshold=0.55))
    (found,) = manifest.rows.filter(pl.col("reason") == "near").iter_rows(named=True)
    assert (found["row"], found["keeper_row"]) == (20, 0)


def test_config_refuses_bad_values_with_the_value() -> None:
    for bad in (
        {"threshold": 0.0},
        {"threshold": 1.5},
        {"shingle": "word7"},
        {"keep": "best"},
        {"on_error": "ignore"},
        {"n_permutations": 0},
        {"bands": 33},
        {"max_epochs": 0},
    ):
        (value,) = bad.values()
        with pytest.raises(ValueError, match=str(value)):
            DedupeConfig(**bad)  # type: ignore[arg-type]


def test_import_needs_neither_torch_nor_datasets() -> None:
    code = "import sys, auditor.clean.dedupe; print([m for m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(json.loads(found.stdout.replace("'", '"')))
    assert not modules & {"torch", "datasets"}


def _rows_of(path: Path) -> Any:
    from auditor.clean.shards import find_shards

    return find_shards([path]).shards[0].rows()
