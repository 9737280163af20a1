"""The deduplication benchmark runs, and its corpus is what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dedupe_corpus

    return dedupe_corpus


def test_every_part_runs_at_a_small_size_without_peers() -> None:
    arguments = ["--mb", "0.3", "--signature-mb", "0.1", "--rounds", "1", "--without-peers"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "dedupe.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for part in ("word5: ", "char5: ", "candidates of", "end to end"):
        assert part in done.stdout
    # Both of our ways keep the same number of rows.
    kept = {line.split("│")[-2] for line in done.stdout.split("end to end")[1].splitlines()[4:6]}
    assert len(kept) == 1
    assert int(kept.pop()) > 0


def test_recombined_texts_are_of_the_size_and_the_seed_and_hold_known_duplicates(
    corpus: Any,
) -> None:
    sources = corpus.random_texts(100_000)
    texts = list(corpus.recombined(sources, 2_000_000, seed=3))
    assert texts == list(corpus.recombined(sources, 2_000_000, seed=3))
    assert texts != list(corpus.recombined(sources, 2_000_000, seed=4))
    assert 2_000_000 <= sum(len(text.encode()) for text in texts) < 2_100_000
    known = {part for text in sources["random"] for part in corpus.sentences(text)}
    assert all(part in known for text in texts for part in corpus.sentences(text))
    n_exact = len(texts) - len(set(texts))
    # Some of the copies that are to be near ones have no sentence changed.
    assert 0.03 * len(texts) < n_exact < 0.12 * len(texts)
