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
from numpy.typing import NDArray

from auditor.measure.compiled import kernel
from auditor.measure.sketch import element_hashes_text
from auditor.measure.vector import PADDING, equal_block, trailing_zeros

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
    """The code points of a text's words (``\\w+`` in lower case), i64 [n_chars].

    For scripts without spaces. Punctuation is left out, so that a ruled line or a table border is
    not taken for repetition.
    """
    points = "".join(re.findall(r"\w+", text.lower())).encode("utf-32-le", "surrogatepass")
    return np.frombuffer(points, "<u4").astype(np.int64)


@kernel
def _batch(values, offsets, share, repeats):  # type: ignore[no-untyped-def]
    longest = 0
    for i in range(len(offsets) - 1):
        longest = max(longest, offsets[i + 1] - offsets[i])
    sample = np.empty(longest + PADDING, np.int64)
    covered = np.empty(longest, np.uint8)
    for i in range(len(offsets) - 1):
        n = offsets[i + 1] - offsets[i]
        if n == 0:
            continue
        sample[:n] = values[offsets[i] : offsets[i + 1]]
        n_covered, copies = stretches(sample, n, covered)
        share[i] = n_covered / n
        repeats[i] = copies


@kernel
def stretches(sample, n, covered):  # type: ignore[no-untyped-def]
    """Elements covered and most copies of sample[:n], 8-byte integers, n >= 1.

    ``sample`` has PADDING more places, and ``covered`` u8 [n] is scratch. A stretch of 2 copies has
    as many equalities in a row as its period, so that blocks without 1, 2 or 4 in a row are passed
    over.
    """
    most = 1
    any_covered = False
    for period in range(1, min(MAX_PERIOD, n - 1) + 1):
        i = period
        while i < n:
            equal = equal_block(sample, i, i - period)
            if n - i < 64:
                equal &= (np.uint64(1) << np.uint64(n - i)) - np.uint64(1)
            # The last places of a block are looked at again as the first of the next, so that the
            # first equality of a run is seen together with those after it.
            runs = equal
            step = 64
            if period > 1:
                runs &= runs >> np.uint64(1)
                step = 63
            if period > 3:
                runs &= runs >> np.uint64(2)
                step = 61
            if not runs:
                i += step
                continue
            first = i + trailing_zeros(runs)
            stop = first + 1
            while stop < n and sample[stop] == sample[stop - period]:
                stop += 1
            copies = (stop - first + period) // period
            if copies > 1:
                most = max(most, copies)
                if copies >= MIN_COPIES:
                    if not any_covered:
                        covered[:n] = 0
                        any_covered = True
                    covered[first - period : stop] = 1
            i = stop + 1
    if not any_covered:
        return 0, most
    return np.int64(covered[:n].sum()), most
