"""What cleaning must know of every sample, measured in one call for many of them.

Shape legend: **N** samples, **P** permutations, **S** distinct shingles of all samples together.

All that Python does per text is to encode it. The kernels release the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.measure import sketch
from auditor.measure import text as kernels
from auditor.measure.blake2b import blake2b_64
from auditor.measure.compiled import kernel
from auditor.measure.repetition import stretches
from auditor.measure.sketch import Scheme, TextShingle, kind_of, pack_tokens

_KEPT = np.uint64(0x7FFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Measurements of N samples, in their order.

    Without ``repetition``, ``share`` and ``repeats`` are 0.
    """

    exact: NDArray[np.int64]  # [N] hash of the normalised content, 0 to 2^63 - 1
    signatures: NDArray[np.uint32]  # [N, P]
    share: NDArray[np.float32]  # [N] share covered by consecutive repeats, 0 to 1
    repeats: NDArray[np.int64]  # [N] longest run of consecutive repeats, in copies
    n_elements: NDArray[np.int64]  # [N] words, characters of words, or ids: what may repeat


def facts_of_texts(
    texts: Sequence[str],
    shingle: TextShingle,
    n_permutations: int = 128,
    seed: int = 1,
    *,
    repetition: bool,
    scheme: Scheme = "affine32",
) -> Facts:
    """Facts of texts; ``"auto"`` chooses word or character shingles text by text.

    ``exact`` is ``exact_hash_text``, and repetition is counted in the words of texts compared by
    words (``word_ids``), else in the characters of words (``character_ids``); of texts without
    words in all their characters, runs of whitespace counted once.
    """
    data, offsets = kernels.pack_texts(texts)
    facts = _empty(len(texts), n_permutations)
    _of_texts(
        data,
        offsets,
        kind_of(shingle),
        kernels.points_table(),
        *sketch.factors(scheme, n_permutations, seed),
        repetition,
        facts.exact,
        facts.signatures,
        facts.share,
        facts.repeats,
        facts.n_elements,
    )
    return facts


def facts_of_tokens(
    samples: Sequence[NDArray[Any]],
    n_permutations: int = 128,
    seed: int = 1,
    *,
    repetition: bool,
    scheme: Scheme = "affine32",
) -> Facts:
    """Facts of 1-D integer arrays of token ids; ``exact`` is ``exact_hash_tokens``."""
    values, offsets = pack_tokens(samples)
    facts = _empty(len(offsets) - 1, n_permutations)
    _of_tokens(
        values,
        values.astype("<i8", copy=False).view(np.uint8),
        offsets,
        *sketch.factors(scheme, n_permutations, seed),
        repetition,
        facts.exact,
        facts.signatures,
        facts.share,
        facts.repeats,
        facts.n_elements,
    )
    return facts


def distinct_hashes(
    texts: Sequence[str], shingle: TextShingle
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Distinct 64-bit shingle hashes of each text, sorted: u64 [S], and offsets i64 [N + 1]."""
    return sketch.distinct_hashes_text(texts, shingle)


def distinct_hashes_tokens(
    samples: Sequence[NDArray[Any]],
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The same for 1-D integer arrays of token ids."""
    return sketch.distinct_hashes_tokens(samples)


def _empty(n: int, n_permutations: int) -> Facts:
    return Facts(
        exact=np.zeros(n, np.int64),
        signatures=np.empty((n, n_permutations), np.uint32),
        share=np.zeros(n, np.float32),
        repeats=np.zeros(n, np.int64),
        n_elements=np.zeros(n, np.int64),
    )


@kernel
def _of_texts(  # type: ignore[no-untyped-def]
    data, offsets, kind, table, a, b, repetition, exact, signatures, share, repeats, n_elements
):
    scratch = sketch.text_scratch(offsets)
    low, content, word_bits, space_bits, edges, elements = scratch
    covered = np.empty(len(elements), np.uint8)
    mixed = np.empty(sketch.BLOCK, np.uint32)
    h, m = np.empty(8, np.uint64), np.empty(16, np.uint64)
    for i in range(len(offsets) - 1):
        n, n_letters, n_unspaced, n_letter_bytes = kernels.lower(
            data, offsets[i], offsets[i + 1], table, low, word_bits, space_bits
        )
        chosen = kind
        if kind == kernels.AUTO:
            chosen = kernels.choose(n, word_bits, n_letters, n_unspaced, n_letter_bytes)
        size = kernels.collapse(low, n, space_bits, content, 0)
        exact[i] = blake2b_64(content, 0, size, h, m) & _KEPT
        if chosen == kernels.WORD:
            count = kernels.words(low, n, word_bits, edges, elements)
        elif repetition:
            count = kernels.word_characters(low, n, word_bits, elements)
        else:
            count = kernels.count_words(n, word_bits, n_letters, n_letter_bytes)[1]
        n_elements[i] = count
        if repetition and count == 0:  # a text of punctuation alone
            n_elements[i] = kernels.characters(content, 0, size, elements)
        if repetition and n_elements[i]:
            n_covered, repeats[i] = stretches(elements, n_elements[i], covered)
            share[i] = n_covered / n_elements[i]
        if chosen == kernels.CHAR:
            count = kernels.characters(content, 0, size, elements)
            kernels.mix_all(elements, count)
        sketch.sign(elements, count, chosen, mixed, a, b, signatures[i])


@kernel
def _of_tokens(  # type: ignore[no-untyped-def]
    values, content, offsets, a, b, repetition, exact, signatures, share, repeats, n_elements
):
    elements = sketch.token_scratch(offsets)
    covered = np.empty(len(elements), np.uint8)
    mixed = np.empty(sketch.BLOCK, np.uint32)
    h, m = np.empty(8, np.uint64), np.empty(16, np.uint64)
    for i in range(len(offsets) - 1):
        exact[i] = blake2b_64(content, 8 * offsets[i], 8 * offsets[i + 1], h, m) & _KEPT
        n = sketch.token_elements(values, offsets[i], offsets[i + 1], elements)
        n_elements[i] = n
        if repetition and n:
            n_covered, repeats[i] = stretches(elements, n, covered)
            share[i] = n_covered / n
        sketch.sign(elements, n, kernels.TOKEN, mixed, a, b, signatures[i])
