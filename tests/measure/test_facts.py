"""Facts of many samples at once equal the measurements of one sample at a time."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.measure import facts, sketch
from auditor.measure.repetition import character_ids, repetition, word_ids

TEXTS = [
    "",
    " \t\n ",
    "!? ...",
    "word",
    "The quick brown fox jumps over the lazy dog, twice; the quick brown fox.",
    "naïve Straße, İstanbul, ΟΔΥΣΣΕΥΣ and snake_case42",
    "床前明月光,疑是地上霜。举头望明月,低头思故乡。",
    "a lone \ud800 surrogate between a few more words",
    "nul \x00 bytes \u2028 separators \u0085 and more",
    "so so " * 20,
    "AB" * 500,
    "~" * 64,
    "-- -- \t --  ",
]
texts = st.one_of(
    st.sampled_from(TEXTS), st.text(max_size=80), st.text("ab c_é\u3042\n", max_size=80)
)


def elements(text: str, shingle: str) -> Any:
    chosen = sketch.choose_shingle(text) if shingle == "auto" else shingle
    ids = word_ids(text) if chosen == "word5" else character_ids(text)
    if len(ids):
        return ids
    characters = " ".join(text.lower().split()).encode("utf-32-le", "surrogatepass")
    return np.frombuffer(characters, "<u4").astype(np.int64)


@settings(deadline=None)
@given(st.lists(texts, max_size=6), st.sampled_from(["word5", "char5", "auto"]))
def test_facts_of_texts_are_those_of_each_text(batch: list[str], shingle: Any) -> None:
    found = facts.facts_of_texts(batch, shingle, 16, 3, repetition=True)
    assert found.exact.tolist() == [sketch.exact_hash_text(text) for text in batch]
    assert np.array_equal(found.signatures, sketch.signatures_text(batch, shingle, 16, 3))
    for text, share, repeats, n in zip(
        batch, found.share, found.repeats, found.n_elements, strict=True
    ):
        ids = elements(text, shingle)
        assert n == len(ids)
        expected_share, expected_repeats = repetition(ids)
        assert share == pytest.approx(expected_share)
        assert repeats == expected_repeats


def test_every_letter_is_lowered_and_classed_as_python_does() -> None:
    letters = [f"a{chr(point)}b" for point in range(0x20000)]
    found = facts.facts_of_texts(letters, "word5", 1, repetition=False)
    assert found.exact.tolist() == [sketch.exact_hash_text(text) for text in letters]
    n_words = [len(re.findall(r"\w+", text.lower())) for text in letters]
    assert found.n_elements.tolist() == n_words


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), max_size=6))
def test_facts_of_tokens_are_those_of_each_sample(samples: list[list[int]]) -> None:
    arrays = [np.array(sample, np.int64) for sample in samples]
    found = facts.facts_of_tokens(arrays, 16, 3, repetition=True)
    assert found.exact.tolist() == [sketch.exact_hash_tokens(ids) for ids in arrays]
    assert np.array_equal(found.signatures, sketch.signatures_tokens(arrays, 16, 3))
    assert found.n_elements.tolist() == [len(ids) for ids in arrays]
    for ids, share, repeats in zip(arrays, found.share, found.repeats, strict=True):
        expected_share, expected_repeats = repetition(ids)
        assert share == pytest.approx(expected_share)
        assert repeats == expected_repeats


def test_repetition_is_measured_on_request_only() -> None:
    repeated = ["so " * 40]
    assert facts.facts_of_texts(repeated, "word5", repetition=True).repeats.tolist() == [40]
    without = facts.facts_of_texts(repeated, "word5", repetition=False)
    assert without.repeats.tolist() == [0]
    assert without.share.tolist() == [0.0]


@pytest.mark.parametrize("shingle", ["word5", "char5", "auto"])
def test_distinct_hashes_are_the_set_of_each_text(shingle: Any) -> None:
    hashes, offsets = facts.distinct_hashes(TEXTS, shingle)
    for i, text in enumerate(TEXTS):
        expected = sorted(set(sketch.shingle_hashes_text(text, shingle, bits=64).tolist()))
        assert hashes[offsets[i] : offsets[i + 1]].tolist() == expected
    assert offsets[-1] == len(hashes)
    assert facts.distinct_hashes([], shingle)[1].tolist() == [0]


def test_distinct_hashes_of_tokens_are_the_set_of_each_sample() -> None:
    generator = np.random.default_rng(0)
    samples = [generator.integers(0, 3, n) for n in (0, 3, 5, 2000)]
    hashes, offsets = facts.distinct_hashes_tokens(samples)
    for i, ids in enumerate(samples):
        expected = sorted(set(sketch.shingle_hashes_tokens(ids, bits=64).tolist()))
        assert hashes[offsets[i] : offsets[i + 1]].tolist() == expected
