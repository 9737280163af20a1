"""From equal sketch bytes to an estimate of Jaccard similarity.

b-bit minwise hashing (Li and König 2010) with b = 8: of two MinHash signatures only the lowest byte
of each value is compared. Unequal values agree in it by chance once in 256 times, which the
estimate takes off.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

N_PERMUTATIONS: Final = 128
_BY_CHANCE = 1 / 256


def similarity(n_equal: NDArray[Any]) -> NDArray[np.float32]:
    """Estimated Jaccard similarity, f32, from how many of ``N_PERMUTATIONS`` bytes are equal."""
    agreement = np.asarray(n_equal, np.float64) / N_PERMUTATIONS
    return np.clip((agreement - _BY_CHANCE) / (1 - _BY_CHANCE), 0, 1).astype(np.float32)


def least_equal(least: float) -> int:
    """The smallest number of equal bytes that estimates a similarity of at least ``least``."""
    return int(np.flatnonzero(similarity(np.arange(N_PERMUTATIONS + 1)) >= least)[0])
