"""Duplication of a stream, against exact Jaccard similarity and planted repeats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, TensorDataset

from auditor import AuditedSampler, Run
from auditor.measure import sketch
from auditor.measure.agreement import N_PERMUTATIONS, least_equal, similarity
from auditor.measure.compact import CONTENT, WORDS, compact, repetition_of
from auditor.measure.facts import facts_of_texts
from auditor.record.duplication import RUN_SLOTS, WINDOW_BATCHES, DuplicationScorer


def documents(n: int, seed: int, length: int = 128) -> NDArray[np.int64]:
    """Token samples that have nothing in common."""
    return np.random.default_rng(seed).integers(0, 2**31, (n, length))


def edited(sample: NDArray[np.int64], n_edits: int, seed: int) -> NDArray[np.int64]:
    """The sample with so many tokens replaced."""
    generator = np.random.default_rng(seed)
    copy = sample.copy()
    copy[generator.choice(len(copy), n_edits, replace=False)] = generator.integers(2**31, 2**32)
    return copy


def exact_jaccard(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Of the sets of 5-grams, by brute force."""
    left, right = ({tuple(one[i : i + 5]) for i in range(len(one) - 4)} for one in (a, b))
    return len(left & right) / len(left | right)


def test_estimates_err_no_more_than_the_theory_of_their_permutations_allows() -> None:
    """Standard error of P permutations and 8 bits: sqrt(C (1 - C) / P) * 256 / 255."""
    originals = documents(400, 0)
    pairs = [(one, edited(one, i % 9, i)) for i, one in enumerate(originals)]
    truth = np.asarray([exact_jaccard(a, b) for a, b in pairs])
    left, right = (compact(np.stack(side)) for side in zip(*pairs, strict=True))
    equal = (left.view(np.uint8) == right.view(np.uint8)).reshape(len(pairs), -1)
    estimates = similarity(equal[:, -N_PERMUTATIONS:].sum(axis=1))
    chance = truth + (1 - truth) / 256
    expected = np.sqrt(chance * (1 - chance) / N_PERMUTATIONS) * 256 / 255 * np.sqrt(2 / np.pi)
    assert np.abs(estimates - truth).mean() <= expected.mean() * 1.15
    assert abs((estimates - truth).mean()) <= 0.01  # and not to one side


@pytest.mark.parametrize("distance", [1, 2, 17, WINDOW_BATCHES - 1, WINDOW_BATCHES])
def test_repeat_within_the_window_is_found_whatever_its_distance(distance: int) -> None:
    scorer = DuplicationScorer()
    planted = documents(1, 99)[0]
    for batch in range(distance + 1):
        samples = documents(16, batch)
        if batch in (0, distance):
            samples[5] = planted
        scores = scorer.score(batch, np.arange(16) + 16 * batch, compact(samples))
        if batch < distance:
            assert not scores.n_equal_window.any()
    assert scores.n_equal_window.tolist() == [0] * 5 + [N_PERMUTATIONS] + [0] * 10
    assert scores.dup_of[5] == 5


def test_repeat_beyond_the_window_is_known_to_the_run_only() -> None:
    scorer = DuplicationScorer()
    planted = documents(1, 99)
    for batch in range(WINDOW_BATCHES + 2):
        repeats = batch in (0, WINDOW_BATCHES + 1)
        samples = planted if repeats else documents(1, batch)
        scores = scorer.score(batch, np.array([batch]), compact(samples))
    assert scores.n_equal_window[0] == 0
    assert scores.dup_run[0] == 1


def test_near_duplicates_of_one_document_are_one_cluster_over_the_run() -> None:
    """Each version is close to the one before it; the first is told by its content again."""
    scorer = DuplicationScorer()
    version = documents(1, 1)[0]
    first = version.copy()
    counts = []
    for batch in range(20):
        version = edited(version, 1, batch)
        counts.append(scorer.score(batch, np.array([batch]), compact(version[None])).dup_run[0])
    assert counts == list(range(20))
    assert exact_jaccard(first, version) < 0.5
    assert scorer.score(20, np.array([20]), compact(documents(1, 2))).dup_run[0] == 0


def test_near_duplicates_inside_a_batch_are_found_and_unrelated_samples_are_not() -> None:
    scorer = DuplicationScorer()
    samples = documents(64, 3)
    for row in range(0, 64, 8):
        samples[row + 3] = edited(samples[row], 1, row)
    scores = scorer.score(0, np.arange(64), compact(samples))
    found = similarity(scores.n_equal_batch) >= 0.8
    assert np.flatnonzero(found).tolist() == list(range(3, 64, 8))
    assert scores.dup_of[found].tolist() == list(range(0, 64, 8))
    assert (scores.n_equal_batch[~found] < least_equal(0.5)).all()


def test_contents_of_all_kinds_are_scored_and_unknown_ones_are_not() -> None:
    rows = compact(
        ["a b c d e f", None, b"bytes of a sample", np.arange(30), 3.5, "", "  A b c d e F"]
    )
    assert (rows[:, CONTENT] != 0).tolist() == [True, False, True, True, False, True, True]
    assert rows[0, CONTENT] == rows[6, CONTENT]  # but for case and space at the ends
    scores = DuplicationScorer().score(0, np.arange(7), rows)
    assert scores.known.tolist() == [True, False, True, True, False, True, True]
    assert scores.dup_run.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert rows.shape == (7, WORDS)


def test_sketches_hold_what_the_parts_they_are_made_of_say() -> None:
    texts = [
        "the cat sat on the mat and the dog sat on the log " * 3,
        "no no no no no no no",
        "日本語の文章です",
        "春眠不觉晓" * 4 + "处处闻啼",
        "x" * 64,
        "~" * 64,
    ]
    rows = compact(texts)
    signatures = sketch.signatures_text(texts, "auto", N_PERMUTATIONS)
    lowest = rows.view(np.uint8).reshape(len(texts), -1)[:, -N_PERMUTATIONS:]
    assert (lowest == (signatures & 0xFF))[:-1].all()
    assert not lowest[-1].any()  # without shingles
    facts = facts_of_texts(texts, "auto", N_PERMUTATIONS, repetition=True)  # as cleaning has them
    assert repetition_of(rows).tolist() == pytest.approx(facts.share.tolist())
    assert facts.share.tolist() == pytest.approx([1.0, 1.0, 0.0, 20 / 24, 1.0, 1.0])


def test_memory_stays_as_it_is_however_long_the_run() -> None:
    scorer = DuplicationScorer()
    held = {
        name: value.nbytes for name, value in vars(scorer).items() if isinstance(value, np.ndarray)
    }
    for batch in range(300):
        scorer.score(batch, np.arange(512), compact(documents(512, batch, length=8)))
    assert held == {
        name: value.nbytes for name, value in vars(scorer).items() if isinstance(value, np.ndarray)
    }
    assert sum(held.values()) < 64 * 2**20
    assert np.count_nonzero(scorer._run_content) <= min(RUN_SLOTS, 300 * 512)


# -- from one attempt to the next ------------------------------------------------------------


def test_what_the_run_has_seen_is_remembered_across_attempts(tmp_path: Path) -> None:
    """One scorer over the whole stream, and one that was stopped and followed in the middle."""
    few = documents(60, 0)
    drawn = np.random.default_rng(1).integers(0, len(few), (40, 16))

    def dup_run(scorer: DuplicationScorer, batches: range) -> list[NDArray[np.int32]]:
        return [
            scorer.score(batch, drawn[batch], compact(few[drawn[batch]])).dup_run
            for batch in batches
        ]

    expected = dup_run(DuplicationScorer(), range(40))
    first, second = DuplicationScorer(), DuplicationScorer()
    found = dup_run(first, range(20))
    first.remember(tmp_path / "contents.npz")
    second.recall(tmp_path / "contents.npz")
    found += dup_run(second, range(20, 40))
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"\x00" * 100])
def test_memory_that_is_broken_is_an_error_that_names_the_file(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "contents.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"contents\.npz"):
        DuplicationScorer().recall(path)


def test_resumed_run_counts_exposures_from_where_it_left_off(tmp_path: Path) -> None:
    tokens = torch.from_numpy(documents(24, 5))
    for _ in range(3):  # three process lives
        loader = AuditedSampler(
            DataLoader(TensorDataset(tokens), batch_size=8), run=tmp_path / "run"
        )
        for _ in loader:
            pass
        loader.close()
    table = Run.open(tmp_path / "run").scan("exposures", view="all").collect()
    assert dict(table.group_by("attempt").agg(pl.col("dup_run").unique()).iter_rows()) == {
        0: [0], 1: [1], 2: [2],
    }  # fmt: skip


def test_broken_memory_costs_the_count_and_nothing_else(tmp_path: Path) -> None:
    tokens = torch.from_numpy(documents(24, 5))
    for _ in range(2):
        loader = AuditedSampler(
            DataLoader(TensorDataset(tokens), batch_size=8), run=tmp_path / "run"
        )
        assert len(list(loader)) == 3
        loader.close()
        (memory,) = (tmp_path / "run").glob("exposures/*/contents.npz")
        memory.write_bytes(memory.read_bytes()[:100])
    run = Run.open(tmp_path / "run")
    assert run.scan("exposures", view="all").collect()["dup_run"].to_list() == [0] * 48
    assert any("contents" in gap for gap in run.gaps())
