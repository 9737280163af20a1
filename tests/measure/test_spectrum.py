"""Ranks against a float64 SVD, entropy against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.measure.spectrum import (
    attention_entropy,
    effective_rank,
    largest_values_of_gram,
    rank_ratio,
    singular_values,
    variant_of,
)


def ratio_by_svd(rows: np.ndarray, variant: str, k: int = 20) -> float:
    """The definition, step by step, through numpy's SVD in float64."""
    x = rows.astype(np.float64)
    if variant == "centred":
        x = x - x.mean(axis=0)
    if variant == "column":
        x = x / np.sqrt((x**2).mean(axis=0))
    s = np.linalg.svd(x, compute_uv=False)[:k]
    p = s / s.sum()
    p = p[p > 0]
    most = min(len(x) - (variant == "centred"), x.shape[1], k)
    return float(np.exp(-(p * np.log(p)).sum()) / most)


@pytest.mark.parametrize("variant", ["raw", "centred", "column"])
@pytest.mark.parametrize(("n", "d"), [(512, 64), (512, 768), (30, 64), (64, 30), (21, 20)])
@pytest.mark.parametrize("decay", [0.0, 0.05, 1.0])
def test_rank_ratio_equals_float64_svd(variant: str, n: int, d: int, decay: float) -> None:
    rng = np.random.default_rng(n * d)
    rows = rng.normal(size=(n, d)) @ np.diag(np.exp(-decay * np.arange(d))) + 0.3
    rows = rows.astype(np.float32)
    assert rank_ratio(rows, variant) == pytest.approx(ratio_by_svd(rows, variant), abs=1e-3)


ORDER = np.arange(512)
RNG = np.random.default_rng(6)
SPECTRA = {
    "flat": np.ones(512),
    "rank one": np.where(ORDER < 1, 1.0, 1e-6),
    "one huge": np.where(ORDER < 1, 1e3, 1.0),
    "five huge": np.where(ORDER < 5, 1e3 * (1 + ORDER), 1.0),
    "cluster across the 20th": np.where(
        ORDER < 15, 3.0, np.where(ORDER < 60, 1 + 1e-3 * (60 - ORDER), 0.5)
    ),
    "step at the 19th": np.where(ORDER < 19, 1.0, 0.99),
    "ten and a floor": np.where(ORDER < 10, 1.0, 0.6),
    "a hundred alike": np.where(ORDER < 10, 10.0, np.where(ORDER < 100, 1.0, 0.1)),
    "exponential": np.exp(-0.05 * ORDER),
    "slow exponential and one large": np.exp(-1e-3 * ORDER) * np.where(ORDER < 1, 10.0, 1.0),
    "power law": 1.0 / (1 + ORDER),
    "slow power law and one large": (1.0 + ORDER) ** -0.1 * np.where(ORDER < 1, 10.0, 1.0),
    "uniform and one large": np.where(ORDER < 1, 10.0, RNG.uniform(0.5, 1.0, 512)),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_largest_values_give_the_ratio_of_spectra_that_are_hard_to_find(name: str) -> None:
    s = np.sort(SPECTRA[name])[::-1]
    basis = np.linalg.qr(np.random.default_rng(7).normal(size=(512, 512)))[0]
    found = largest_values_of_gram((basis * s**2) @ basis.T)
    assert found.shape == (20,)
    assert effective_rank(found) / 20 == pytest.approx(effective_rank(s[:20]) / 20, abs=1e-3)


@pytest.mark.parametrize("mean", [0.0, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("variant", ["raw", "centred", "column"])
def test_rank_ratio_of_noise_beside_a_common_direction(variant: str, mean: float) -> None:
    """The edge of the noise is dense, and one large value makes the ratio feel all the others."""
    for width in (300, 512, 2048):
        rows = (np.random.default_rng(width).normal(size=(512, width)) + mean).astype(np.float32)
        assert rank_ratio(rows, variant) == pytest.approx(ratio_by_svd(rows, variant), abs=1e-3)


def test_largest_values_do_not_depend_on_what_was_decomposed_before() -> None:
    rows = np.random.default_rng(8).normal(size=(2, 400, 300)) * np.exp(-0.02 * np.arange(300))
    first, second = (largest_values_of_gram(one.T @ one) for one in rows)
    assert np.array_equal(largest_values_of_gram(rows[1].T @ rows[1]), second)
    assert np.array_equal(largest_values_of_gram(rows[0].T @ rows[0]), first)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_largest_values_of_degenerate_matrices(value: float) -> None:
    found = largest_values_of_gram(np.full((400, 400), value))
    assert np.array_equal(found, np.full(20, 0.0 if value == 0.0 else math.nan), equal_nan=True)


def test_large_mean_does_not_drown_what_is_left_once_centred() -> None:
    rows = np.random.default_rng(9).normal(size=(400, 500)) * np.exp(-0.03 * np.arange(500))
    shifted = rows + 1e4
    assert rank_ratio(shifted, "centred") == pytest.approx(ratio_by_svd(rows, "centred"), abs=1e-6)
    assert rank_ratio(shifted, "raw") == pytest.approx(ratio_by_svd(shifted, "raw"), abs=1e-6)


@given(st.integers(1, 20))
def test_effective_rank_of_equal_values_is_their_number(n: int) -> None:
    assert effective_rank(np.full(n, 3.5)) == pytest.approx(n)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_rank_ratio_does_not_depend_on_scale(scale: float) -> None:
    rows = np.random.default_rng(1).normal(size=(100, 40))
    assert rank_ratio(rows * scale) == pytest.approx(rank_ratio(rows), rel=1e-6)


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((50, 8)),
        np.full((50, 8), np.nan),
        np.full((50, 8), np.inf),
        np.empty((0, 8)),
    ],
    ids=["zero", "nan", "inf", "no rows"],
)
@pytest.mark.parametrize("variant", ["raw", "centred", "column"])
def test_rank_ratio_is_undefined_where_there_is_no_rank(rows: np.ndarray, variant: str) -> None:
    assert math.isnan(rank_ratio(rows, variant))


def test_equal_rows_have_rank_one_raw_and_none_centred() -> None:
    rows = np.tile(np.random.default_rng(2).normal(size=(1, 40)), (100, 1))
    assert rank_ratio(rows, "raw") == pytest.approx(1 / 20, abs=1e-3)
    assert math.isnan(rank_ratio(rows, "centred"))


def test_one_row_has_rank_one() -> None:
    assert rank_ratio(np.ones((1, 40))) == pytest.approx(1.0)  # of at most one
    assert math.isnan(rank_ratio(np.ones((1, 40)), "centred"))


def test_column_variant_is_blind_to_outlying_dimensions_and_raw_is_not() -> None:
    """Large models have a few dimensions of huge magnitude; they must not look like collapse."""
    rng = np.random.default_rng(3)
    healthy = rng.normal(size=(512, 256))
    outlying = healthy.copy()
    outlying[:, 7] += 200.0
    outlying[:, 19] *= 100.0
    assert rank_ratio(outlying, "raw") < 0.3
    assert rank_ratio(outlying, "column") == pytest.approx(rank_ratio(healthy, "column"), abs=0.1)
    common = healthy + 6.0 * rng.normal(size=(1, 256))  # a direction common to all columns
    assert rank_ratio(common, "column") < rank_ratio(healthy, "column") - 0.2


def test_singular_values_equal_numpys() -> None:
    rows = np.random.default_rng(4).normal(size=(80, 30))
    expected = np.linalg.svd(rows, compute_uv=False)
    np.testing.assert_allclose(singular_values(rows), expected, rtol=1e-9)


def test_entropy_equals_its_definition() -> None:
    rng = np.random.default_rng(5)
    p = rng.dirichlet(np.ones(11), size=(3, 4, 7))
    p[0, 0, 0] = np.eye(11)[3]  # all on one key: no entropy
    by_hand = np.zeros((3, 4))
    for b in range(3):
        for h in range(4):
            rows = [-sum(x * math.log(x) for x in p[b, h, q] if x > 0) for q in range(7)]
            by_hand[b, h] = sum(rows) / 7
    np.testing.assert_allclose(attention_entropy(p), by_hand, rtol=1e-12)
    assert attention_entropy(np.full((1, 16), 1 / 16)) == pytest.approx(math.log(16))


def test_unknown_variant_is_named() -> None:
    with pytest.raises(ValueError, match="'whitened'"):
        variant_of(np.ones((2, 2)), "whitened")
