"""What is kept of a sample's content: a fixed number of words, made once, compared many times.

    >>> compact(["one two three four five six", "one two three four five six"]).shape
    (2, 34)

A row is int64 [WORDS]:

- word 0: 63-bit hash of the content, as normalised for exact comparison; 0: content unknown;
- word 1: share of the sample covered by repeated n-grams, the bits of a float32;
- words 2..17: hashes of the ``N_BANDS`` LSH bands of the MinHash signature, u32 each;
- words 18..33: the lowest byte of each of its ``N_PERMUTATIONS`` values.

The lowest bytes estimate the Jaccard similarity (``agreement.similarity``). So a sample needs 272
bytes where its signature has 512, and neither its text nor its signature has to leave the process
that read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from auditor.measure import repetition, sketch
from auditor.measure import text as kernels
from auditor.measure.agreement import N_PERMUTATIONS
from auditor.measure.compiled import kernel

N_BANDS: Final = 32
ROWS_PER_BAND: Final = N_PERMUTATIONS // N_BANDS

CONTENT, REPETITION, BANDS, BYTES = 0, 1, 2, 2 + N_BANDS // 2
WORDS: Final = BYTES + N_PERMUTATIONS // 8
"""int64 words of a row."""

_BAND_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_CONTENT_FACTOR = np.uint64(0x9FB21C651E98DF25)
_CONTENT_SEED = np.uint64(0xCBF29CE484222325)
_KEPT = np.uint64(0x7FFF_FFFF_FFFF_FFFF)


def compact(contents: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
    """Rows i64 [n, WORDS] of contents: texts, bytes, 1-D arrays of token ids, or a 2-D array.

    A content that is None, or of another kind, gives a row of zeros. Text is compared by word or
    character shingles (``sketch.choose_shingle``), tokens and bytes by their own.
    """
    if isinstance(contents, np.ndarray) and contents.ndim == 2:
        return _of_tokens(contents)
    out = np.zeros((len(contents), WORDS), np.int64)
    texts = [i for i, one in enumerate(contents) if isinstance(one, str)]
    if texts:
        out[texts] = _of_texts([contents[i] for i in texts])
    tokens = [i for i, one in enumerate(contents) if isinstance(one, bytes | np.ndarray)]
    if tokens:
        out[tokens] = _of_tokens([_ids(contents[i]) for i in tokens])
    return out


def repetition_of(rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """The shares in word 1, f32 [n]."""
    return rows[:, REPETITION].astype(np.uint32).view(np.float32)


def _ids(content: bytes | NDArray[Any]) -> NDArray[Any]:
    return np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content


def _of_texts(texts: list[str]) -> NDArray[np.int64]:
    data, offsets = kernels.pack_texts(texts)
    a, b = sketch.permutations(N_PERMUTATIONS)
    out = np.zeros((len(texts), WORDS), np.int64)
    _text_rows(data, offsets, kernels.points_table(), a, b, out)
    return out


def _of_tokens(samples: Sequence[NDArray[Any]] | NDArray[Any]) -> NDArray[np.int64]:
    values, offsets = sketch.pack_tokens(samples)
    a, b = sketch.permutations(N_PERMUTATIONS)
    out = np.zeros((len(offsets) - 1, WORDS), np.int64)
    _token_rows(values, offsets, a, b, out)
    return out


@kernel
def _fill(signature, content, share, row, as_float):  # type: ignore[no-untyped-def]
    """Write one row; ``as_float`` is f32 scratch [1]. A content hash of 0 would mean none."""
    row[CONTENT] = np.int64(max(content, np.uint64(1)))
    as_float[0] = share
    row[REPETITION] = np.int64(as_float.view(np.uint32)[0])
    empty = True
    for value in signature:
        if value != sketch.EMPTY:
            empty = False
            break
    for i in range(BANDS, WORDS):
        row[i] = 0
    if empty:  # without shingles: a near-duplicate of nothing
        return
    for band in range(N_BANDS):
        h = np.uint64(band + 1)
        for i in range(band * ROWS_PER_BAND, (band + 1) * ROWS_PER_BAND):
            h = (h ^ np.uint64(signature[i])) * _BAND_FACTOR
            h ^= h >> np.uint64(29)
        h = max(h >> np.uint64(32), np.uint64(1))
        row[BANDS + band // 2] |= np.int64(h << np.uint64(32 * (band % 2)))
    for i in range(N_PERMUTATIONS):
        low = np.uint64(signature[i]) & np.uint64(0xFF)
        row[BYTES + i // 8] |= np.int64(low << np.uint64(8 * (i % 8)))


@kernel
def _text_rows(data, offsets, table, a, b, out):  # type: ignore[no-untyped-def]
    scratch = sketch.text_scratch(offsets)
    low, content, word_bits, space_bits, edges, elements = scratch
    covered = np.empty(len(elements), np.uint8)
    mixed = np.empty(sketch.BLOCK, np.uint32)
    signature = np.empty(N_PERMUTATIONS, np.uint32)
    as_float = np.empty(1, np.float32)
    for i in range(len(offsets) - 1):
        n, n_letters, n_unspaced, n_letter_bytes = kernels.lower(
            data, offsets[i], offsets[i + 1], table, low, word_bits, space_bits
        )
        size = kernels.collapse(low, n, space_bits, content, 0)
        kind = kernels.choose(n, word_bits, n_letters, n_unspaced, n_letter_bytes)
        if kind == kernels.WORD:
            count = kernels.words(low, n, word_bits, edges, elements)
        else:
            count = kernels.word_characters(low, n, word_bits, elements)
        n_repeatable = count
        if count == 0:  # a text of punctuation alone
            n_repeatable = kernels.characters(content, 0, size, elements)
        share = 0.0
        if n_repeatable > 0:
            share = repetition.stretches(elements, n_repeatable, covered)[0] / n_repeatable
        if kind == kernels.CHAR:
            count = kernels.characters(content, 0, size, elements)
            kernels.mix_all(elements, count)
        sketch.sign(elements, count, kind, mixed, a, b, signature)
        _fill(signature, kernels.content_hash(content, 0, size), share, out[i], as_float)


@kernel
def _token_rows(values, offsets, a, b, out):  # type: ignore[no-untyped-def]
    elements = sketch.token_scratch(offsets)
    covered = np.empty(len(elements), np.uint8)
    mixed = np.empty(sketch.BLOCK, np.uint32)
    signature = np.empty(N_PERMUTATIONS, np.uint32)
    as_float = np.empty(1, np.float32)
    for i in range(len(offsets) - 1):
        n = sketch.token_elements(values, offsets[i], offsets[i + 1], elements)
        share = 0.0
        h = _CONTENT_SEED
        if n > 0:
            share = repetition.stretches(elements, n, covered)[0] / n
            for k in range(n):
                h = (h ^ elements[k]) * _CONTENT_FACTOR
                h ^= h >> np.uint64(31)
        sketch.sign(elements, n, kernels.TOKEN, mixed, a, b, signature)
        _fill(signature, kernels.mix64(h) & _KEPT, share, out[i], as_float)
