"""What cleaning must know of every sample, measured in one call for many of them.

Shape legend: **N** samples, **P** permutations, **S** distinct shingles of all samples together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.measure.repetition import character_ids, repetition_batch, word_ids
from auditor.measure.sketch import (
    TextShingle,
    choose_shingle,
    exact_hash_text,
    exact_hash_tokens,
    pack_tokens,
    shingle_hashes_text,
    shingle_hashes_tokens,
    signatures_text,
    signatures_tokens,
)


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
) -> Facts:
    """Facts of texts; ``"auto"`` chooses word or character shingles text by text."""
    elements = [_elements(text, shingle) for text in texts]
    exact = np.array([exact_hash_text(text) for text in texts], np.int64)
    return _facts(
        exact, signatures_text(texts, shingle, n_permutations, seed), elements, repetition
    )


def facts_of_tokens(
    samples: Sequence[NDArray[Any]],
    n_permutations: int = 128,
    seed: int = 1,
    *,
    repetition: bool,
) -> Facts:
    """Facts of 1-D integer arrays of token ids."""
    exact = np.array([exact_hash_tokens(ids) for ids in samples], np.int64)
    return _facts(exact, signatures_tokens(samples, n_permutations, seed), samples, repetition)


def distinct_hashes(
    texts: Sequence[str], shingle: TextShingle
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Distinct 64-bit shingle hashes of each text, sorted: u64 [S], and offsets i64 [N + 1]."""
    return _joined([np.unique(shingle_hashes_text(text, shingle, bits=64)) for text in texts])


def distinct_hashes_tokens(
    samples: Sequence[NDArray[Any]],
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The same for 1-D integer arrays of token ids."""
    return _joined([np.unique(shingle_hashes_tokens(ids, bits=64)) for ids in samples])


def _elements(text: str, shingle: TextShingle) -> NDArray[np.int64]:
    chosen = choose_shingle(text) if shingle == "auto" else shingle
    return word_ids(text) if chosen == "word5" else character_ids(text)


def _facts(
    exact: NDArray[np.int64],
    signatures: NDArray[np.uint32],
    elements: Sequence[NDArray[Any]],
    repetition: bool,
) -> Facts:
    values, offsets = pack_tokens(elements)
    n = len(exact)
    share, repeats = np.zeros(n, np.float32), np.zeros(n, np.int64)
    if repetition:
        share, copies = repetition_batch(values, offsets)
        repeats = copies.astype(np.int64)
    return Facts(
        exact=exact,
        signatures=signatures,
        share=share,
        repeats=repeats,
        n_elements=np.diff(offsets),
    )


def _joined(
    parts: list[NDArray[np.uint64]],
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return np.concatenate(parts) if parts else np.empty(0, np.uint64), offsets
