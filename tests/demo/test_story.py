"""The demo, from beginning to end, and its verdicts on several seeds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from click.testing import CliRunner

from auditor import Run, load_manifest
from auditor.clean.verify import verify
from auditor.cli import main
from auditor.demo.corpus import (
    DECOY,
    PLANTED,
    WEIGHTS,
    WINDOW_BYTES,
    ShardRows,
    build,
    collate,
    encode,
)

FIRST_SEED = 200
"""No threshold was chosen on the seeds from here on."""


def test_corpus_is_what_the_story_says(tmp_path: Path) -> None:
    corpus = build(tmp_path, seed=0, steps=420, plant=True)
    rows = pl.DataFrame(ShardRows(corpus.shards).rows)
    per_source = rows.group_by("source").agg(
        n=pl.len(), distinct=pl.col("text").n_unique(), ids=pl.col("id").n_unique()
    )
    assert set(per_source["source"]) == set(WEIGHTS)
    assert (per_source["ids"] == per_source["n"]).all()
    planted = rows.filter(pl.col("source") == PLANTED)["text"].to_list()
    n_clean = round(WEIGHTS[PLANTED] * 200 * 16)
    assert len(set(planted[n_clean:])) == 4
    assert not set(planted[:n_clean]) & set(planted[n_clean:])
    decoy = rows.filter(pl.col("source") == DECOY)["text"].to_list()
    # As many repeats as the planted source, give or take a tenth, and all along.
    n_repeats = [len(texts) - len(set(texts)) for texts in (planted, decoy)]
    assert n_repeats[1] == pytest.approx(n_repeats[0], rel=0.1)
    assert len(set(decoy[:300])) == 300
    held_out = {bytes(row[row >= 0].astype(np.uint8)) for row in corpus.held_out.numpy()}
    assert not held_out & {text.encode() for text in rows["text"]}


def test_same_seed_same_corpus_and_clean_differs_in_the_planted_source_only(
    tmp_path: Path,
) -> None:
    first = build(tmp_path / "a", seed=1, steps=300, plant=True)
    again = build(tmp_path / "b", seed=1, steps=300, plant=True)
    clean = build(tmp_path / "c", seed=1, steps=300, plant=False)
    for a, b, c in zip(first.shards, again.shards, clean.shards, strict=True):
        assert a.read_bytes() == b.read_bytes()
        assert (a.read_bytes() == c.read_bytes()) == (a.name != f"{PLANTED}.jsonl.zst")
    assert clean.onset_step is None


def test_text_becomes_bytes_and_padding() -> None:
    assert encode("ab").tolist() == [97, 98] + [-1] * (WINDOW_BYTES - 2)
    batch = collate([{"text": "x" * 200}, {"text": "é" * 200}])
    assert batch.shape == (2, WINDOW_BYTES)
    assert batch.dtype == torch.int64


@pytest.mark.slow
def test_demo_tells_the_whole_story(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    result = CliRunner().invoke(main, ["demo", "--quick", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"names {PLANTED}: the planted source" in result.output
    for words in ("held-out loss", "repeated exposure", "at random", "every 5 steps", "epochs"):
        assert words in result.output
    runs = ["run-1-as-it-is", "run-2-cleaned", "run-3-at-random"]
    for name in runs[:2]:
        assert (out / name / "derived/report.html").stat().st_size > 100_000
    for name in runs:
        trained = Run.open(out / name).scan("exposures").filter(pl.col("state") == "trained")
        assert trained.select(pl.len()).collect().item() == 300 * 16
        assert Run.open(out / name).gaps() == []
    assert verify(out / "cleaned").ok
    manifest = load_manifest(out / "cleaned")
    cleaned = Run.open(out / runs[1]).scan("exposures").collect()
    kept = manifest.rows.filter(pl.col("decision") == "kept")
    assert set(cleaned["sample_id"]) <= set(kept["sample_id"])
    # The report implicates rows of the planted source; what is like none of them stays.
    arguments = ["dedupe", str(out / runs[0]), "--only-implicated", "--out", str(out / "narrow")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    dropped = load_manifest(out / "narrow").rows.filter(pl.col("decision") == "dropped")
    assert dropped.height > 100
    assert set(dropped["source"]) == {PLANTED}
    listed = out / "implicated.jsonl"
    arguments = ["report", str(out / runs[0]), "--implicated", str(listed), "--no-text", "--json"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    samples = pl.read_ndjson(listed)
    assert set(samples["source"]) == {PLANTED}
    assert "preview" not in samples.columns
    named = set(dropped["cluster"]) | {None}
    rows = load_manifest(out / "narrow").rows
    assert set(rows.filter(pl.col("sample_id").is_in(samples["sample_id"]))["cluster"]) <= named
    # The third arm removed as many rows.
    n_removed = manifest.counts["rows_in"] - manifest.counts["rows_out"]
    assert n_removed > 1000


@pytest.mark.slow
def test_report_blames_the_planted_source_and_no_other(tmp_path: Path) -> None:
    """Real trainings with a fault of the data, another fault, and none; a decoy in each."""
    script = Path(__file__).parents[2] / "benchmarks" / "attribution.py"
    kinds = "duplicate burst,noise,lr spike,constant"
    arguments = ["--kinds", kinds, "--seeds", "2", "--first-seed", str(FIRST_SEED), "--json"]
    done = subprocess.run(
        [sys.executable, script, "--runs", tmp_path, *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert [one["kind"] for one in outcomes] == [kind for kind in kinds.split(",") for _ in "ab"]
    for one in outcomes:
        assert one["blamed"] == one["planted"], one
        assert (one["events"] > 0) == (one["kind"] != "constant"), one
        assert one["moved"] == (one["planted"] is not None), one
