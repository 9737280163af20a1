"""Repetition inside a sample: n-grams repeated consecutively.

    >>> repetition(np.array([5, 7, 1, 2, 1, 2, 1, 2, 9]))   # "1 2" three times in a row
    (0.6666666666666666, 3)

The rule is OLMo 2's (arXiv 2501.00656, section 3.1): a sequence in which an n-gram, n = 1 to 13
elements, occurs 32 or more times in a row is flagged, and its loss masked there. Elements are
whatever the caller has as integers: token ids, bytes or hashed words (``word_ids``).

Definitions. A *stretch* of period n is a maximal range in which every element equals the one n
places before it, together with the first n; it holds ``length // n`` complete copies.

- **longest repeats**: the most complete copies in any stretch of period 1..13; 1 where nothing
  repeats, 0 for an empty sample.
- **share**: elements inside a stretch of at least ``MIN_COPIES`` = 3 copies, whatever its period,
  the incomplete last copy included, divided by the elements of the sample, 0..1.

Why 3: two copies in a row are ordinary language ("that that", "had had", a doubled space), three
seldom are, and a sample of 64 to 128 elements cannot hold 32 copies of anything but a short
n-gram, so the flag alone would be blind there. Measured on corpora read as bytes in windows of 64:
the mean share is .00 to .02 in prose and verse, .04 to .06 where lines are indented, .21 in source
code (its indentation); read as words, .004 or less everywhere.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from auditor.measure.sketch import element_hashes_text

MAX_PERIOD: Final = 13
"""Longest n-gram looked for, in elements (OLMo 2)."""

FLAG_REPEATS: Final = 32
"""Consecutive copies from which a sample is flagged (OLMo 2)."""

MIN_COPIES: Final = 3
"""Consecutive copies from which a stretch counts towards the share."""


def repetition(ids: NDArray[Any]) -> tuple[float, int]:
    """Share covered by repeats (0..1) and longest repeats (copies) of one 1-D integer sample."""
    values = np.ascontiguousarray(ids, np.int64)
    if values.ndim != 1:
        raise ValueError(f"a sample must be 1-D, got shape {values.shape}")
    share, repeats = repetition_batch(values, np.array([0, len(values)]))
    # From the integer count, so that the share of one sample is exact in float64.
    return round(float(share[0]) * len(values)) / max(len(values), 1), int(repeats[0])


def repetition_batch(
    values: NDArray[np.int64], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The same for packed samples: values i64 [total], offsets i64 [N + 1].

    Returns the shares f32 [N] and the longest repeats i32 [N]. Releases the GIL. Take padding off
    first: it is a repeated token like any other.
    """
    n = len(offsets) - 1
    share = np.zeros(n, np.float32)
    repeats = np.zeros(n, np.int32)
    _batch(
        np.ascontiguousarray(values, np.int64),
        np.ascontiguousarray(offsets, np.int64),
        share,
        repeats,
    )
    return share, repeats


def flagged(repeats: NDArray[np.int32]) -> NDArray[np.bool_]:
    """OLMo 2's flag, bool [N], from the longest repeats."""
    return np.asarray(repeats) >= FLAG_REPEATS


def word_ids(text: str) -> NDArray[np.int64]:
    """Words of a text (``\\w+`` in lower case) as integers, i64 [n_words]; equal words alike."""
    return element_hashes_text(text, "word5").view(np.int64)


def character_ids(text: str) -> NDArray[np.int64]:
    """The code points of a text's words as integers, i64 [n_chars], for scripts without spaces.

    Punctuation is left out, so that a ruled line or a table border is not taken for repetition.
    """
    return element_hashes_text("".join(re.findall(r"\w+", text)), "char5").view(np.int64)


@njit(nogil=True, cache=True)
def _batch(values, offsets, share, repeats):  # type: ignore[no-untyped-def]
    longest = 0
    for i in range(len(offsets) - 1):
        longest = max(longest, offsets[i + 1] - offsets[i])
    covered = np.empty(longest, np.uint8)
    for i in range(len(offsets) - 1):
        sample = values[offsets[i] : offsets[i + 1]]
        if len(sample) == 0:
            continue
        n_covered, copies = stretches(sample, covered[: len(sample)])
        share[i] = n_covered / len(sample)
        repeats[i] = copies


@njit(nogil=True, cache=True)
def stretches(sample, covered):  # type: ignore[no-untyped-def]
    """Elements covered and most copies; ``covered`` is scratch, u8, as long as the sample."""
    covered[:] = 0
    n = len(sample)
    most = 1
    for period in range(1, min(MAX_PERIOD, n - 1) + 1):
        begin = 0  # of the stretch that ends before i
        for i in range(period, n + 1):
            if i < n and sample[i] == sample[i - period]:
                continue
            copies = (i - begin) // period
            if copies > 1:
                most = max(most, copies)
                if copies >= MIN_COPIES:
                    covered[begin:i] = 1
            begin = i - period + 1
    return np.int64(covered.sum()), most
