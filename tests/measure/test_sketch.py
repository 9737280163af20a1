"""Shingles and signatures. Oracles: Python's ``re`` for shingles, datasketch for MinHash."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from datasketch import MinHash
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.measure import sketch

TEXTS = [
    "",
    " \t\n ",
    "!? ...",
    "word",
    "Two words",
    "The quick brown fox jumps over the lazy dog, twice; the quick brown fox.",
    "naïve Straße, İstanbul, ΟΔΥΣΣΕΥΣ and snake_case42",
    "床前明月光,疑是地上霜。举头望明月,低头思故乡。",
    "नमस्ते दुनिया नमस्ते दुनिया नमस्ते",
    "a lone \ud800 surrogate between a few more words",
    "nul \x00 bytes \u2028 separators \u0085 and more",
    "👩‍👩‍👧 🇩🇪 " * 9,
    "AB" * 500,
]

texts = st.one_of(
    st.sampled_from(TEXTS), st.text(max_size=80), st.text("ab c_é\u3042\n", max_size=80)
)


def elements(text: str, shingle: str) -> list[str]:
    """The documented normalisation, in plain Python."""
    lower = text.lower()
    return re.findall(r"\w+", lower) if shingle == "word5" else list(" ".join(lower.split()))


def shingle_tuples(text: str, shingle: str) -> list[tuple[str, ...]]:
    parts = elements(text, shingle)
    return [tuple(parts[i : i + 5]) for i in range(max(len(parts) - 4, min(len(parts), 1)))]


def datasketch_signature(hashes: np.ndarray[Any, Any], n_permutations: int, seed: int) -> Any:
    oracle = MinHash(n_permutations, seed=seed, hashfunc=int, scheme="affine32")
    oracle.update_batch(hashes.tolist())
    return oracle.hashvalues


@settings(deadline=None, max_examples=300)
@given(texts, st.sampled_from(["word5", "char5"]))
def test_shingles_are_those_of_the_documented_normalisation(text: str, shingle: str) -> None:
    expected = shingle_tuples(text, shingle)
    hashes = sketch.shingle_hashes_text(text, shingle, bits=64)
    assert len(hashes) == len(expected)
    # Equal shingles have equal hashes and different shingles different ones.
    assert len(set(zip(expected, hashes.tolist(), strict=True))) == len(set(expected))
    assert len(set(hashes.tolist())) == len(set(expected))


@settings(deadline=None)
@given(texts, texts, st.sampled_from(["word5", "char5"]))
def test_jaccard_equals_sets_of_shingles(one: str, two: str, shingle: str) -> None:
    a, b = set(shingle_tuples(one, shingle)), set(shingle_tuples(two, shingle))
    expected = len(a & b) / len(a | b) if a | b else 0.0
    measured = sketch.jaccard(
        sketch.shingle_hashes_text(one, shingle, bits=64),
        sketch.shingle_hashes_text(two, shingle, bits=64),
    )
    assert measured == expected


@pytest.mark.parametrize("shingle", ["word5", "char5"])
@pytest.mark.parametrize(("n_permutations", "seed"), [(128, 1), (16, 1), (256, 7)])
def test_signatures_equal_datasketch_for_texts(
    shingle: str, n_permutations: int, seed: int
) -> None:
    signatures = sketch.signatures_text(TEXTS, shingle, n_permutations, seed)
    assert signatures.shape == (len(TEXTS), n_permutations)
    assert signatures.dtype == np.uint32
    for text, signature in zip(TEXTS, signatures, strict=True):
        hashes = sketch.shingle_hashes_text(text, shingle)
        assert np.array_equal(signature, datasketch_signature(hashes, n_permutations, seed))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), max_size=6))
def test_signatures_equal_datasketch_for_tokens(samples: list[list[int]]) -> None:
    arrays = [np.array(sample, np.int64) for sample in samples]
    for sample, signature in zip(arrays, sketch.signatures_tokens(arrays), strict=True):
        hashes = sketch.shingle_hashes_tokens(sample)
        assert len(hashes) == max(len(sample) - 4, min(len(sample), 1))
        assert np.array_equal(signature, datasketch_signature(hashes, 128, 1))


def test_signatures_of_more_shingles_than_a_block_equal_datasketch() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 5_000)
    expected = datasketch_signature(sketch.shingle_hashes_tokens(ids), 128, 1)
    assert np.array_equal(sketch.signatures_tokens([ids])[0], expected)


def test_signatures_tokens_take_a_matrix_of_any_integer_type() -> None:
    ids = np.random.default_rng(0).integers(0, 30_000, (4, 64))
    expected = sketch.signatures_tokens(list(ids))
    assert np.array_equal(sketch.signatures_tokens(ids), expected)
    assert np.array_equal(sketch.signatures_tokens(ids.astype(np.uint16)), expected)


def test_signatures_without_shingles_are_empty_and_resemble_nothing() -> None:
    signatures = sketch.signatures_text(["", " \n", "!?"])
    assert (signatures == sketch.EMPTY).all()
    assert sketch.estimate_jaccard(signatures[0], signatures[1]) == 0.0
    nothing = sketch.shingle_hashes_text("")
    assert sketch.jaccard(nothing, nothing) == 0.0


def test_estimate_is_close_to_exact_jaccard() -> None:
    generator = np.random.default_rng(3)
    words = [f"w{i}" for i in generator.integers(0, 5_000, 1_200)]
    one, two = " ".join(words[:1_000]), " ".join(words[200:])
    exact = sketch.jaccard(
        sketch.shingle_hashes_text(one, bits=64), sketch.shingle_hashes_text(two, bits=64)
    )
    a, b = sketch.signatures_text([one, two], n_permutations=1024)
    assert sketch.estimate_jaccard(a, b) == pytest.approx(exact, abs=0.05)


def test_shingles_of_different_kinds_never_coincide() -> None:
    text = "a b c d e f g h"
    words = sketch.shingle_hashes_text(text, "word5", bits=64)
    chars = sketch.shingle_hashes_text(text, "char5", bits=64)
    assert not np.intersect1d(words, chars).size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Plain English prose, with spaces between words.", "word5"),
        ("Ein längerer deutscher Satz mit Umlauten.", "word5"),
        ("床前明月光,疑是地上霜。", "char5"),
        ("これは日本語の文章です。", "char5"),
        ("ภาษาไทยไม่มีช่องว่างระหว่างคำ", "char5"),
        ("한국어에는 띄어쓰기가 있습니다", "word5"),
        ("QUJD" * 200, "char5"),
        ("", "word5"),
    ],
)
def test_choose_shingle_follows_the_script(text: str, expected: str) -> None:
    assert sketch.choose_shingle(text) == expected
    chosen = sketch.signatures_text([text], expected)
    assert np.array_equal(sketch.signatures_text([text], "auto"), chosen)


def test_exact_hash_ignores_case_and_runs_of_whitespace_only() -> None:
    assert sketch.exact_hash_text(" A  b\n") == sketch.exact_hash_text("a b")
    assert sketch.exact_hash_text("a, b") != sketch.exact_hash_text("a b")
    assert sketch.exact_hash_text("") == sketch.exact_hash_text(" \n")
    assert 0 <= sketch.exact_hash_text("\ud800") < 2**63
    ids = np.array([1, 2, 3])
    assert sketch.exact_hash_tokens(ids) == sketch.exact_hash_tokens(ids.astype(np.uint16))
    assert sketch.exact_hash(b"a") != sketch.exact_hash(b"A")


def test_signatures_run_in_threads_with_equal_results() -> None:
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(sketch.signatures_text(TEXTS, "auto")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(found[0], other) for other in found)


@pytest.mark.parametrize("shingle", ["words", "token5", ""])
def test_signatures_text_refuses_an_unknown_shingle(shingle: str) -> None:
    with pytest.raises(ValueError, match=repr(shingle)):
        sketch.signatures_text(["x"], shingle)


def test_bad_arguments_are_refused_with_their_value() -> None:
    with pytest.raises(ValueError, match="0"):
        sketch.signatures_text(["x"], n_permutations=0)
    with pytest.raises(ValueError, match="16"):
        sketch.shingle_hashes_text("x", bits=16)
    with pytest.raises(ValueError, match="2-D"):
        sketch.signatures_tokens(np.arange(5))
    with pytest.raises(ValueError, match="1-D"):
        sketch.shingle_hashes_tokens(np.zeros((2, 2), np.int64))
