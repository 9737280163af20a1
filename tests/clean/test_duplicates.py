"""Candidates, verification and the choice of keepers, against brute force."""

from __future__ import annotations

import csv
import gzip
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.clean.duplicates import (
    BUCKET_KEEPERS,
    Keepers,
    candidates,
    choose_keepers,
    clusters,
    exact_leaders,
    plausible,
    union,
    verify_pairs,
)
from auditor.measure.sketch import jaccard, shingle_hashes_text, signatures_text

NO_PAIRS = np.empty((0, 2), np.int64)


def verified(texts: list[str], pairs: np.ndarray, shingle: str = "word5") -> np.ndarray:
    hashes = [np.unique(shingle_hashes_text(text, shingle, bits=64)) for text in texts]
    ends = np.cumsum([len(each) for each in hashes])
    return verify_pairs(pairs, np.concatenate(hashes), np.append(0, ends[:-1]), ends)


def revisions(n_documents: int, n_revisions: int) -> list[str]:
    """Documents of 120 words, each with revisions in which a few words differ."""
    generator = np.random.default_rng(5)
    texts = []
    for _ in range(n_documents):
        words = generator.integers(0, 3000, 120).astype(str)
        for _ in range(n_revisions):
            revised = words.copy()
            changed = generator.integers(0, 120, generator.integers(0, 9))
            revised[changed] = generator.integers(0, 3000, len(changed)).astype(str)
            texts.append(" ".join(revised))
    return texts


def test_verified_candidates_are_all_pairs_at_the_threshold() -> None:
    texts = revisions(30, 5)
    signatures = signatures_text(texts)
    rows = np.arange(len(texts))
    pairs = plausible(signatures, candidates(signatures, rows).pairs, 0.7)
    found = {tuple(p) for p in pairs[verified(texts, pairs) >= 0.7].tolist()}
    hashes = [shingle_hashes_text(text, bits=64) for text in texts]
    expected = {(i, j) for i, j in combinations(rows, 2) if jaccard(hashes[i], hashes[j]) >= 0.7}
    assert len(expected) > 50
    assert found == expected


@pytest.mark.parametrize(("shingle", "column"), [("word5", "j_word5"), ("char5", "j_char5")])
def test_pairs_of_real_revisions_agree_with_brute_force(
    corpora: Path, shingle: str, column: str
) -> None:
    """Recall and exact similarity on one quarter of a corpus whose pairs were all compared."""
    path = corpora / "B_neardup" / "docs-00-of-04.jsonl.zst"
    raw = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True)
    documents = [json.loads(line) for line in raw.read().split(b"\n") if line]
    number = {document["id"]: i for i, document in enumerate(documents)}
    with gzip.open(corpora / "B_neardup" / "pairs.csv.gz", "rt", newline="") as file:
        known = {
            tuple(sorted((number[pair["id_a"]], number[pair["id_b"]]))): float(pair[column])
            for pair in csv.DictReader(file)
            if pair["id_a"] in number and pair["id_b"] in number and pair[column]
        }
    texts = [document["text"] for document in documents]
    signatures = signatures_text(texts, shingle)
    pairs = candidates(signatures, np.arange(len(texts))).pairs
    pairs = plausible(signatures, pairs, 0.7)
    similarity = verified(texts, pairs, shingle)
    found = {
        tuple(p): s for p, s in zip(pairs.tolist(), similarity.tolist(), strict=True) if s >= 0.7
    }
    assert set(found) == {pair for pair, s in known.items() if s >= 0.7}
    for pair, similar in found.items():
        assert similar == pytest.approx(known[pair], abs=1e-6)


def test_candidates_ignore_rows_without_shingles() -> None:
    signatures = signatures_text(["", "", "!!", "!!"])
    assert len(candidates(signatures, np.arange(4)).pairs) == 0
    assert len(candidates(signatures, np.arange(0)).pairs) == 0


def test_candidates_of_a_hot_bucket_keep_its_first_rows_and_report_the_cap() -> None:
    signatures = signatures_text(["the same five words again"] * 300)
    order = np.arange(300)[::-1].copy()
    found = candidates(signatures, order, bands=32, bucket_cap=256)
    assert found.n_capped_buckets == 32
    first = set(order[:BUCKET_KEEPERS].tolist())
    assert {a for a, _ in found.pairs.tolist()} == first
    assert {b for _, b in found.pairs.tolist()} == set(order[1:].tolist())
    n_pairs = BUCKET_KEEPERS * 300 - BUCKET_KEEPERS * (BUCKET_KEEPERS + 1) // 2
    assert len(found.pairs) == n_pairs
    assert found.n_pairs_left_out == 32 * (300 * 299 // 2 - n_pairs)
    assert candidates(signatures, order, bucket_cap=300).n_capped_buckets == 0


def test_candidates_refuse_bands_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="33"):
        candidates(signatures_text(["x", "y"]), np.arange(2), bands=33)


def test_bands_apart_and_together_give_the_same_pairs() -> None:
    texts = revisions(30, 5)
    signatures = signatures_text(texts)
    rows = np.arange(len(texts))[::-1].copy()
    whole = candidates(signatures, rows, threshold=0.7)
    parts = [
        candidates(signatures, rows, of_bands=range(low, low + 8), threshold=0.7)
        for low in (0, 8, 16, 24)
    ]
    joined = union(parts, len(texts))
    assert joined.pairs.tolist() == whole.pairs.tolist()
    assert joined.n_proposed == whole.n_proposed > len(whole.pairs)
    unfiltered = candidates(signatures, rows).pairs
    assert whole.pairs.tolist() == plausible(signatures, unfiltered, 0.7).tolist()


def test_exact_leaders_follow_the_keep_order_and_skip_unusable_rows() -> None:
    hashes = np.array([5, 7, 5, 7, 5])
    usable = np.array([True, True, True, True, False])
    assert exact_leaders(hashes, np.arange(5), usable).tolist() == [0, 1, 0, 1, -1]
    backwards = np.arange(5)[::-1]
    assert exact_leaders(hashes, backwards, usable).tolist() == [2, 3, 2, 3, -1]


def choose(pairs: np.ndarray, similarity: np.ndarray, n: int) -> Keepers:
    return choose_keepers(
        pairs,
        similarity,
        leader=np.arange(n),
        order=np.arange(n),
        threshold=np.full(n, 0.8),
        protected=np.zeros(n, np.bool_),
    )


def test_choose_keepers_does_not_drop_along_a_chain() -> None:
    """1 resembles 0 and 2 resembles 1, but 2 does not resemble 0: 2 stays."""
    pairs = np.array([[0, 1], [1, 2]])
    chosen = choose(pairs, np.array([0.9, 0.85]), 3)
    assert chosen.keeper.tolist() == [-1, 0, -1]
    assert chosen.similarity[1] == 0.9
    assert clusters(3, pairs).tolist() == [0, 0, 0]


def test_choose_keepers_names_the_most_similar_kept_row() -> None:
    pairs = np.array([[0, 2], [1, 2], [0, 3], [1, 3]])
    similarity = np.array([0.82, 0.95, 0.9, 0.9])
    assert choose(pairs, similarity, 4).keeper.tolist() == [-1, -1, 1, 0]


@st.composite
def corpora_of_groups(draw: st.DrawFn) -> dict[str, Any]:
    """Rows with contents, similarities of contents, an order, thresholds and protected rows."""
    n = draw(st.integers(1, 12))
    contents = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    similar = {
        (a, b): draw(st.sampled_from([0.0, 0.6, 0.8, 0.9])) for a, b in combinations(range(6), 2)
    }
    return {
        "contents": contents,
        "similar": similar,
        "order": draw(st.permutations(range(n))),
        "threshold": draw(st.lists(st.sampled_from([0.6, 0.8]), min_size=n, max_size=n)),
        "protected": draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        "usable": draw(
            st.lists(st.sampled_from([True, True, True, False]), min_size=n, max_size=n)
        ),
        "copies": draw(st.integers(1, 3)),
    }


@settings(deadline=None, max_examples=300)
@given(corpora_of_groups())
def test_choose_keepers_equals_one_row_after_another(drawn: dict[str, Any]) -> None:
    contents, order, usable = drawn["contents"], drawn["order"], drawn["usable"]

    def similarity(a: int, b: int) -> float:
        pair = tuple(sorted((contents[a], contents[b])))
        return 1.0 if pair[0] == pair[1] else drawn["similar"][pair]

    kept: list[int] = []
    keeper_of = {}
    for row in order:
        if not usable[row]:
            continue
        like = [other for other in kept if similarity(row, other) >= drawn["threshold"][row]]
        if len(like) < drawn["copies"] or drawn["protected"][row]:
            kept.append(row)
        else:
            keeper_of[row] = max(
                like, key=lambda other: (similarity(row, other), -kept.index(other))
            )

    leader = exact_leaders(np.array(contents), np.array(order), np.array(usable))
    leaders = [row for row in order if leader[row] == row]
    pairs = np.array(list(combinations(leaders, 2)), np.int64).reshape(-1, 2)
    chosen = choose_keepers(
        pairs,
        np.array([similarity(a, b) for a, b in pairs.tolist()]),
        leader=leader,
        order=np.array(order),
        threshold=np.array(drawn["threshold"]),
        protected=np.array(drawn["protected"]),
        copies=drawn["copies"],
    )
    found = {int(row): int(chosen.keeper[row]) for row in np.flatnonzero(chosen.keeper >= 0)}
    assert found == keeper_of
    for row, keeper in found.items():
        assert chosen.similarity[row] == similarity(row, keeper)


def test_clusters_are_numbered_by_their_first_row() -> None:
    edges = np.array([[5, 6], [4, 1], [1, 3]])
    assert clusters(8, edges).tolist() == [-1, 0, -1, 0, 0, 1, 1, -1]
    assert clusters(2, NO_PAIRS).tolist() == [-1, -1]
