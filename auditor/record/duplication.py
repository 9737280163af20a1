"""How duplicated each sample of the stream is: MinHash against the batch and the recent window.

Runs on the recorder's thread in kernels that release the GIL. Memory is fixed: a ring of the last
signatures, one LSH table over it, and a bounded count of contents.

Shapes: **B** samples in a batch, **P** permutations, **R** rows in the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from auditor.measure import sketch
from auditor.measure.repetition import repetition_batch, word_ids

WINDOW_BATCHES: Final = 64
"""Batches that count as recent."""

RING_ROWS: Final = 32_768
"""Samples remembered at most; with larger batches the window holds fewer batches."""

N_PERMUTATIONS: Final = 128
N_BANDS: Final = 32
ROWS_PER_BAND: Final = N_PERMUTATIONS // N_BANDS

MIN_SIMILARITY: Final = 0.5
"""Estimates below this are reported as 0: at 128 permutations they say little."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class BoundedCounts:
    """How often a key was met, in bounded memory: when full it starts over and undercounts."""

    def __init__(self, limit: int = 500_000) -> None:
        self._limit = limit
        self._counts: dict[int, int] = {}

    def add(self, key: int) -> int:
        """Count the key; returns how often it was met before."""
        before = self._counts.get(key, 0)
        if before == 0 and len(self._counts) >= self._limit:
            self._counts.clear()
        self._counts[key] = before + 1
        return before


class DuplicationScorer:
    """Scores batches in the order in which they were consumed.

    ``n_held_out`` counts samples whose content hash is in ``held_out``: a probe that is trained on.
    """

    def __init__(self) -> None:
        self._ring = np.zeros((RING_ROWS, N_PERMUTATIONS), np.uint32)
        self._ring_key = np.zeros(RING_ROWS, np.int64)
        self._ring_batch = np.full(RING_ROWS, -1, np.int64)
        n_slots = 2 * RING_ROWS
        self._slot_hash = np.zeros((N_BANDS, n_slots), np.uint64)
        self._slot_row = np.full((N_BANDS, n_slots), -1, np.int64)
        self._next_row = 0
        self._contents = BoundedCounts()
        self.held_out: frozenset[int] = frozenset()
        self.n_held_out = 0
        self._compile()

    def _compile(self) -> None:
        """Compile the kernels now, before training, or load them from numba's cache on disk."""
        for content in ("a", np.zeros(1, np.int64)):
            self.score(-WINDOW_BATCHES - 1, np.zeros(1, np.int64), [content])
        self._contents = BoundedCounts()

    def score(
        self, batch: int, keys: NDArray[np.int64], contents: Sequence[Any]
    ) -> dict[str, NDArray[Any]]:
        """Columns of one batch, each [n], of the samples whose content is known.

        ``position`` i32; ``dup_batch`` and ``dup_window`` f32, highest estimated Jaccard to an
        earlier row of the batch and to the rows of the recent window; ``dup_of`` i64, the key of
        the row that gave the higher, -1 where neither is similar; ``dup_run`` i32, earlier
        exposures of the same content; ``repetition`` f32. Empty when no content is known.
        """
        columns: list[dict[str, NDArray[Any]]] = []
        for kind in (str, bytes, np.ndarray):
            positions = [i for i, content in enumerate(contents) if isinstance(content, kind)]
            if positions:
                columns.append(
                    self._score(batch, keys, positions, [contents[i] for i in positions])
                )
        if not columns:
            return {}
        merged = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
        order = np.argsort(merged["position"])
        return {name: values[order] for name, values in merged.items()}

    def _score(
        self, batch: int, keys: NDArray[np.int64], positions: list[int], contents: list[Any]
    ) -> dict[str, NDArray[Any]]:
        if isinstance(contents[0], str):
            signatures = sketch.signatures_text(contents, "auto", N_PERMUTATIONS)
            hashes = [sketch.exact_hash_text(text) for text in contents]
            values, offsets = sketch.pack_tokens([word_ids(text) for text in contents])
        else:
            tokens = [
                np.frombuffer(one, np.uint8) if isinstance(one, bytes) else one for one in contents
            ]
            signatures = sketch.signatures_tokens(tokens, N_PERMUTATIONS)
            hashes = [sketch.exact_hash_tokens(one) for one in tokens]
            values, offsets = sketch.pack_tokens(tokens)
        n = len(positions)
        dup_batch, dup_window = np.zeros(n, np.float32), np.zeros(n, np.float32)
        dup_of = np.full(n, -1, np.int64)
        _match(
            signatures,
            keys[positions],
            batch,
            self._next_row,
            self._ring,
            self._ring_key,
            self._ring_batch,
            self._slot_hash,
            self._slot_row,
            dup_batch,
            dup_window,
            dup_of,
        )
        self._next_row += n
        self.n_held_out += sum(one in self.held_out for one in hashes)
        return {
            "position": np.asarray(positions, np.int32),
            "dup_batch": dup_batch,
            "dup_window": dup_window,
            "dup_of": dup_of,
            "dup_run": np.asarray([self._contents.add(one) for one in hashes], np.int32),
            "repetition": repetition_batch(values, offsets)[0],
        }


@njit(nogil=True, cache=True)
def _band_hash(signature, band):  # type: ignore[no-untyped-def]
    h = np.uint64(band + 1)
    for i in range(band * ROWS_PER_BAND, (band + 1) * ROWS_PER_BAND):
        h = (h ^ np.uint64(signature[i])) * _MULTIPLIER
        h ^= h >> np.uint64(29)
    return h


@njit(nogil=True, cache=True)
def _similarity(a, b):  # type: ignore[no-untyped-def]
    n_equal = 0
    for i in range(a.size):
        if a[i] == b[i]:
            n_equal += 1
    return n_equal / a.size


@njit(nogil=True, cache=True)
def _match(  # type: ignore[no-untyped-def]
    signatures, keys, batch, next_row, ring, ring_key, ring_batch,
    slot_hash, slot_row, dup_batch, dup_window, dup_of,
):  # fmt: skip
    """Look every row up among the window and the rows before it, then enter the batch.

    Slots keep the latest row of a band hash only, so the batch enters after all its rows have been
    looked up: rows of the batch must not hide those of the window. Inside the batch the comparison
    is with every earlier row of equal first value in some band, found through a second table.
    """
    n, n_rows, n_slots = signatures.shape[0], ring.shape[0], slot_hash.shape[1]
    n_bands = slot_hash.shape[0]
    hashes = np.empty((n, n_bands), np.uint64)
    local_slots = 1
    while local_slots < 4 * n:
        local_slots *= 2
    local = np.full((n_bands, local_slots), -1, np.int64)
    for i in range(n):
        empty = True
        for p in range(signatures.shape[1]):
            if signatures[i, p] != np.uint32(0xFFFFFFFF):
                empty = False
                break
        if empty:
            for band in range(n_bands):
                hashes[i, band] = np.uint64(0)
            continue
        best = MIN_SIMILARITY
        for band in range(n_bands):
            h = _band_hash(signatures[i], band)
            hashes[i, band] = h
            slot = np.int64(h % np.uint64(n_slots))
            row = slot_row[band, slot]
            if row >= 0 and slot_hash[band, slot] == h and row > next_row - n_rows:
                place = row % n_rows
                if ring_batch[place] >= batch - WINDOW_BATCHES:
                    similarity = _similarity(signatures[i], ring[place])
                    if similarity >= MIN_SIMILARITY and similarity > dup_window[i]:
                        dup_window[i] = similarity
                        if similarity >= best:
                            best = similarity
                            dup_of[i] = ring_key[place]
            slot = np.int64(h % np.uint64(local_slots))
            j = local[band, slot]
            if j >= 0 and hashes[j, band] == h:
                similarity = _similarity(signatures[i], signatures[j])
                if similarity >= MIN_SIMILARITY and similarity > dup_batch[i]:
                    dup_batch[i] = similarity
                    if similarity > best or dup_of[i] < 0:
                        best = similarity
                        dup_of[i] = keys[j]
            local[band, slot] = i
    for i in range(n):
        place = (next_row + i) % n_rows
        ring[place] = signatures[i]
        ring_key[place] = keys[i]
        ring_batch[place] = batch
        for band in range(n_bands):
            h = hashes[i, band]
            if h != np.uint64(0):
                slot = np.int64(h % np.uint64(n_slots))
                slot_hash[band, slot] = h
                slot_row[band, slot] = next_row + i
