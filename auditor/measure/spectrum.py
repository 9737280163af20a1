"""Effective rank and attention entropy: pure functions over numpy arrays.

Shapes: **n** rows (positions or samples), **D** width, **H** heads, **Q** queries, **K** keys.

Source: O. Roy and M. Vetterli, "The effective rank: a measure of effective dimensionality",
EUSIPCO 2007.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

K_LARGEST: Final = 20
"""Singular values that a rank ratio is taken over."""

MAX_BLOCKS: Final = 6
STILL: Final = 1e-5
"""Of block Lanczos: blocks of k directions at most, and the change of the rank ratio from one to
the next that ends it. Chosen on activations of small GPTs and on the spectra of
`tests/measure/test_spectrum.py`."""

WHOLE_ROWS: Final = 256
"""Up to this size all values cost no more than the largest."""

VARIANTS: Final = ("raw", "centred", "column")
"""Forms of one activation matrix.

``raw`` is the matrix as it is: it sees a growing common direction, and a single outlying dimension
blinds it. ``centred`` has the mean row taken away: it sees neither. ``column`` has each column
divided by its root mean square: outlying dimensions weigh as much as any other, and a direction
common to all columns still shows.
"""


def variant_of(rows: np.ndarray, variant: str) -> np.ndarray:
    """The matrix [n, D] in one of the forms of :data:`VARIANTS`, float64."""
    rows = np.asarray(rows, dtype=np.float64)
    if variant == "raw":
        return rows
    if variant == "centred":
        return rows - rows.mean(axis=0)
    if variant == "column":
        scale = np.sqrt(np.square(rows).mean(axis=0))
        return rows / np.where(scale > 0, scale, 1.0)
    raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")


def singular_values_of_gram(gram: np.ndarray) -> np.ndarray:
    """Singular values, largest first, of a matrix whose Gram matrix [m, m] is given.

    Rounding makes the eigenvalues of a nearly singular Gram matrix slightly negative: they are
    zero. All NaN when the Gram matrix is not finite.
    """
    gram = np.asarray(gram, dtype=np.float64)
    if not np.isfinite(gram).all():
        return np.full(len(gram), np.nan)
    return _roots(np.linalg.eigvalsh(gram))


def largest_values_of_gram(gram: np.ndarray, k: int = K_LARGEST) -> np.ndarray:
    """The k largest singular values, largest first, of a matrix whose Gram matrix [m, m] is given.

    By block Lanczos, at less than half the cost of all values where they fall off, as those of
    activations do. Blocks are added until the effective rank of the k values stands still;
    where it does not, all values are computed. The rank ratio is within 1e-3 of the exact one
    (`tests/measure/test_spectrum.py`). The start is the same for every matrix of a size: the result
    depends on nothing but the matrix. All NaN when the Gram matrix is not finite.

    Source: G. Golub and R. Underwood, "The block Lanczos method for computing eigenvalues",
    Mathematical Software III, 1977; here with full reorthogonalisation.
    """
    gram = np.asarray(gram, dtype=np.float64)
    m = len(gram)
    if m > max(WHOLE_ROWS, k * MAX_BLOCKS) and np.isfinite(gram).all():
        found = _by_lanczos(gram, k)
        if found is not None:
            return found
    return singular_values_of_gram(gram)[:k]


def _by_lanczos(gram: np.ndarray, k: int) -> np.ndarray | None:
    """None where ``MAX_BLOCKS`` blocks of k directions are not enough."""
    basis = np.empty((len(gram), k * MAX_BLOCKS))
    projected = np.zeros((k * MAX_BLOCKS, k * MAX_BLOCKS))
    block, before = _start(len(gram), k), math.inf
    for low in range(0, k * MAX_BLOCKS, k):
        high = low + k
        basis[:, low:high] = block
        known, applied = basis[:, :high], gram @ block
        projected[:high, low:high] = along = known.T @ applied
        projected[low:high, :high] = along.T
        values = _roots(np.linalg.eigvalsh(projected[:high, :high]))[:k]
        rank = effective_rank(values)
        if abs(rank - before) <= STILL * k:
            return values
        before = rank
        # Twice: of a block that is all but spanned already, the first leaves rounding.
        block = np.linalg.qr(applied - known @ along)[0]
        block = np.linalg.qr(block - known @ (known.T @ block))[0]
    return None


def _roots(eigenvalues: np.ndarray) -> np.ndarray:
    return np.sqrt(np.clip(eigenvalues[::-1], 0.0, None))


@functools.lru_cache(maxsize=8)
def _start(m: int, k: int) -> np.ndarray:
    """An orthonormal block [m, k], the same whenever it is asked for."""
    return np.linalg.qr(np.random.default_rng(0).standard_normal((m, k)))[0]


def singular_values(matrix: np.ndarray) -> np.ndarray:
    """Singular values of [n, D], largest first, through the smaller of its two Gram matrices.

    In float64 the Gram matrix costs half the digits: values below 1e-8 of the largest are noise.
    """
    return Forms(matrix).spectrum("raw").values


def effective_rank(values: np.ndarray) -> float:
    """exp of the entropy of the singular values divided by their sum: from 1 to their number.

    NaN, for undefined, when the values are all zero or not all finite.
    """
    total = float(np.sum(values))
    if not math.isfinite(total) or total <= 0.0:
        return math.nan
    p = np.asarray(values, dtype=np.float64) / total
    p = p[p > 0.0]
    return float(np.exp(-np.sum(p * np.log(p))))


def rank_ratio_of_values(
    values: np.ndarray, *, shape: tuple[int, int], centred: bool, k: int = K_LARGEST
) -> float:
    """Effective rank of the k largest ``values`` over the most it could be, in (0, 1].

    ``shape`` is the matrix's (n, D). A centred matrix has lost one row's freedom, so the most is
    min(n - 1, D, k). NaN where undefined.
    """
    most = min(shape[0] - 1 if centred else shape[0], shape[1], k)
    if most < 1:
        return math.nan
    return effective_rank(np.sort(values)[::-1][:k]) / most


@dataclass(frozen=True)
class Spectrum:
    """Singular values of one form of an activation matrix, largest first; NaN where undefined.

    ``shape``: (n, D) of the matrix; ``centred``: the form has lost one row's freedom.
    """

    values: NDArray[np.float64]
    shape: tuple[int, int]
    centred: bool

    def ratio(self, k: int | None = K_LARGEST) -> float:
        """Rank ratio over the ``k`` largest values, over all of them where ``k`` is None."""
        return rank_ratio_of_values(
            self.values, shape=self.shape, centred=self.centred, k=k or len(self.values)
        )

    @property
    def effective_rank(self) -> float:
        return effective_rank(self.values)

    @property
    def gap(self) -> float:
        """Largest singular value over the second: large when one direction dominates."""
        if len(self.values) < 2 or not self.values[1] > 0.0:
            return math.nan
        return float(self.values[0] / self.values[1])


class Forms:
    """Spectra of one activation matrix [n, D] in the forms of :data:`VARIANTS`.

    The forms share what they can of their Gram matrices, which cost as much as the spectra.
    """

    def __init__(self, rows: np.ndarray) -> None:
        rows = np.asarray(rows)
        self.shape = (rows.shape[0], rows.shape[1])
        self._scale = _largest(rows) if rows.size else math.nan
        if not math.isfinite(self._scale):
            return
        # Scaled, the squares of huge and of tiny values stay in range.
        centred = np.divide(rows, self._scale or 1.0, dtype=np.float64)
        self._mean = centred.mean(axis=0)
        # In place: fresh memory for so large a matrix costs as much as what is done to it.
        centred -= self._mean
        self._centred_rows = centred
        # Equal rows: what centring leaves is rounding.
        self._constant = _largest(centred) <= 1e-7
        self._tall = self.shape[0] >= self.shape[1]
        self._centred = centred.T @ centred if self._tall else centred @ centred.T
        # The mean is added back, not taken away: nothing is lost where it is much larger.
        if self._tall:
            self._raw = self._centred + self.shape[0] * np.outer(self._mean, self._mean)
        else:
            along = centred @ self._mean
            self._raw = self._centred + along + along[:, None] + self._mean @ self._mean

    def _gram(self, variant: str) -> NDArray[np.float64] | None:
        """The smaller Gram matrix [m, m] of a form, its rows scaled; None where undefined."""
        if variant not in VARIANTS:
            raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
        if not math.isfinite(self._scale) or (variant == "centred" and self._constant):
            return None
        if variant == "centred":
            return self._centred
        if variant == "raw":
            return self._raw
        if not self._tall:
            matrix = variant_of(self._centred_rows + self._mean, variant)
            return matrix @ matrix.T
        size = np.sqrt(self._raw.diagonal() / self.shape[0])
        size = np.where(size > 0.0, size, 1.0)
        return self._raw / size / size[:, None]

    def ratio(self, variant: str, k: int = K_LARGEST) -> float:
        """Rank ratio of a form over its ``k`` largest singular values; NaN where undefined."""
        gram = self._gram(variant)
        if gram is None:
            return math.nan
        values, centred = largest_values_of_gram(gram, k), variant == "centred"
        return rank_ratio_of_values(values, shape=self.shape, centred=centred, k=k)

    def spectrum(self, variant: str) -> Spectrum:
        """All singular values of a form; all NaN where undefined."""
        gram, centred = self._gram(variant), variant == "centred"
        if gram is None:
            return Spectrum(np.full(min(self.shape), math.nan), self.shape, centred)
        unit = 1.0 if variant == "column" else self._scale
        return Spectrum(unit * singular_values_of_gram(gram), self.shape, centred)


def _largest(values: np.ndarray) -> float:
    """Largest absolute value; NaN where one is NaN."""
    return max(float(values.max()), -float(values.min()))


def rank_ratio(rows: np.ndarray, variant: str = "raw", k: int = K_LARGEST) -> float:
    """Rank ratio of an activation matrix [n, D] in one of the forms of :data:`VARIANTS`.

    NaN where undefined: no rows, a zero matrix, equal rows once centred, values that are not
    finite.
    """
    return Forms(rows).ratio(variant, k)


def residual_similarity(inputs: np.ndarray, outputs: np.ndarray) -> float:
    """Mean cosine between rows of a block's input and output, both [n, D], in [-1, 1].

    Near 1 the block hands on a scaled copy of what it was given. NaN where no row has a direction.
    """
    a, b = np.asarray(inputs, np.float64), np.asarray(outputs, np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    known = np.isfinite(norms) & (norms > 0.0)
    if not known.any():
        return math.nan
    return float(((a * b).sum(axis=1)[known] / norms[known]).mean())


def attention_entropy(probabilities: np.ndarray) -> np.ndarray:
    """Entropy in nats of attention rows [..., Q, K], mean over queries: [...].

    Source: the definition, -sum_k p ln p with 0 ln 0 = 0.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    logs = np.log(p, out=np.zeros_like(p), where=p > 0.0)
    return -(p * logs).sum(axis=-1).mean(axis=-1)
