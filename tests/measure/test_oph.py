"""One-permutation hashing with optimal densification, against a plain Python reading of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.measure import sketch

MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def finalised(h: int) -> int:
    """MurmurHash3's 32-bit finaliser."""
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK32
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK32
    return h ^ h >> 16


def mix64(h: int) -> int:
    """MurmurHash3's 64-bit finaliser."""
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & MASK64
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & MASK64
    return h ^ h >> 33


def one_permutation(shingles: list[int], n_bins: int, seed: int) -> list[int]:
    """The least value of each bin, and for an empty bin that of the first full one drawn for it."""
    flip = int(sketch.permutations(n_bins, seed)[1][0])
    values = {finalised(h ^ flip) for h in shingles}
    bins: dict[int, int] = {}
    for value in sorted(values, reverse=True):
        bins[value * n_bins >> 32] = value
    out = []
    for place in range(n_bins):
        attempt, donor = 0, place
        while donor not in bins:
            attempt += 1
            donor = (mix64(place << 32 | attempt) >> 32) * n_bins >> 32
        out.append(bins[donor])
    return out


@settings(deadline=None)
@given(
    st.text("ab cdé\u3042\n", min_size=1, max_size=200).filter(str.strip),
    st.sampled_from([(128, 1), (16, 7), (100, 3)]),
)
def test_signatures_of_texts_equal_plain_python(text: str, setting: tuple[int, int]) -> None:
    found = sketch.signatures_text([text], "char5", *setting, scheme="oph")[0]
    shingles = sketch.shingle_hashes_text(text, "char5").tolist()
    assert found.tolist() == one_permutation(shingles, *setting)


@pytest.mark.parametrize("length", [1, 4, 5, 600, 5000])
def test_signatures_of_tokens_equal_plain_python(length: int) -> None:
    ids = np.random.default_rng(length).integers(0, 50_000, length)
    found = sketch.signatures_tokens([ids], 128, 1, scheme="oph")[0]
    assert found.tolist() == one_permutation(sketch.shingle_hashes_tokens(ids).tolist(), 128, 1)


def test_a_sample_without_shingles_is_empty_throughout() -> None:
    assert (sketch.signatures_text([" \n"], "char5", scheme="oph") == sketch.EMPTY).all()


def pairs(jaccard: float, n_shingles: int, n_pairs: int) -> list[tuple[Any, Any]]:
    """Pairs of random token samples that share a run at their begin; Jaccard about as given."""
    generator = np.random.default_rng(5)
    shared = round(2 * jaccard / (1 + jaccard) * n_shingles)
    found = []
    for _ in range(n_pairs):
        one, two = generator.integers(0, 2**31, (2, n_shingles + 4))
        two[: shared + 4] = one[: shared + 4]
        found.append((one, two))
    return found


@pytest.mark.parametrize("jaccard", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("n_shingles", [60, 300, 3000])
def test_the_estimate_of_exact_jaccard_is_unbiased_and_as_close_as_promised(
    jaccard: float, n_shingles: int
) -> None:
    both = pairs(jaccard, n_shingles, 300)
    exact = [
        sketch.jaccard(
            sketch.shingle_hashes_tokens(one, bits=64), sketch.shingle_hashes_tokens(two, bits=64)
        )
        for one, two in both
    ]
    estimate = sketch.estimate_jaccard(
        sketch.signatures_tokens([one for one, _ in both], scheme="oph"),
        sketch.signatures_tokens([two for _, two in both], scheme="oph"),
    )
    error = estimate - np.array(exact)
    # Of 128 independent permutations it would be sqrt(J (1 - J) / 128), .035 to .044; a set of
    # fewer shingles than bins has fewer independent values.
    deviation = np.sqrt(jaccard * (1 - jaccard) / min(128, n_shingles))
    assert abs(error.mean()) < 4 * deviation / np.sqrt(300)
    assert error.std() < 1.2 * deviation


def test_an_unknown_scheme_is_refused_by_name() -> None:
    scheme: Any = "simhash"
    with pytest.raises(ValueError, match="simhash"):
        sketch.signatures_text(["x"], scheme=scheme)
