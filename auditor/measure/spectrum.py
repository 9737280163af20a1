"""Effective rank and attention entropy: pure functions over numpy arrays.

Shapes: **n** rows (positions or samples), **D** width, **H** heads, **Q** queries, **K** keys.

Source: O. Roy and M. Vetterli, "The effective rank: a measure of effective dimensionality",
EUSIPCO 2007.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

K_LARGEST: Final = 20
"""Singular values that a rank ratio is taken over."""

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
    eigenvalues = np.linalg.eigvalsh(gram)[::-1]
    return np.sqrt(np.clip(eigenvalues, 0.0, None))


def singular_values(matrix: np.ndarray) -> np.ndarray:
    """Singular values of [n, D], largest first, through the smaller of its two Gram matrices.

    In float64 the Gram matrix costs half the digits: values below 1e-8 of the largest are noise.
    """
    matrix = np.asarray(matrix, dtype=np.float64)
    if matrix.size == 0 or not np.isfinite(matrix).all():
        return np.full(min(matrix.shape), np.nan)
    scale = float(np.abs(matrix).max())
    if scale == 0.0:
        return np.zeros(min(matrix.shape))
    matrix = matrix / scale  # keeps the squares of huge and of tiny values in range
    gram = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
    return scale * singular_values_of_gram(gram)


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


def spectrum(rows: np.ndarray, variant: str = "raw") -> Spectrum:
    """Spectrum of an activation matrix [n, D] in one of the forms of :data:`VARIANTS`.

    Undefined, all NaN: no rows, values that are not finite, equal rows once centred.
    """
    rows = np.asarray(rows)
    centred = variant == "centred"
    shape = (rows.shape[0], rows.shape[1])
    undefined = Spectrum(np.full(min(shape), math.nan), shape, centred)
    if rows.size == 0 or not np.isfinite(rows).all():
        return undefined
    matrix = variant_of(rows, variant)
    if centred and np.abs(matrix).max() <= 1e-7 * np.abs(rows).max():
        return undefined  # equal rows: what centring leaves is rounding
    return Spectrum(singular_values(matrix), shape, centred)


def rank_ratio(rows: np.ndarray, variant: str = "raw", k: int = K_LARGEST) -> float:
    """Rank ratio of an activation matrix [n, D] in one of the forms of :data:`VARIANTS`.

    NaN where undefined: no rows, a zero matrix, values that are not finite.
    """
    return spectrum(rows, variant).ratio(k)


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
