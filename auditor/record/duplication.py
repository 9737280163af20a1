"""How duplicated each sample of the stream is: against its batch, the recent window and the run.

Runs on the recorder's thread in a kernel that releases the GIL. Memory is fixed, about 50 MB: a
ring of the last compact sketches, one LSH table over it, and a table of contents met in the run.

Shapes: **n** samples of a batch, **R** rows of the ring, **S** slots of a table.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from auditor.files import atomic
from auditor.measure import compact
from auditor.measure.agreement import least_equal
from auditor.schema import DUPLICATE_SIMILARITY

WINDOW_BATCHES: Final = 64
"""Batches that count as recent."""

RING_ROWS: Final = 32_768
"""Samples remembered at most; with larger batches the window holds fewer batches."""

RUN_SLOTS: Final = 2**20
"""Contents remembered over the run; when they are more, the least recent are forgotten first."""

MIN_SIMILARITY: Final = 0.5
"""Estimates below this are reported as 0: at 128 permutations they say little."""


_MIN_EQUAL = least_equal(MIN_SIMILARITY)
_DUPLICATE_EQUAL = least_equal(DUPLICATE_SIMILARITY)
_PROBES = 8


@dataclass(frozen=True)
class Scores:
    """Of one batch, arrays [n] in the order of its samples.

    ``n_equal_batch``, ``n_equal_window`` u8: equal sketch bytes with the most similar earlier
    sample of the batch, and of the recent window (``agreement.similarity`` gives the Jaccard
    estimate); ``dup_of`` i64: key of the more similar of both, -1 where there is none; ``dup_run``
    i32: earlier exposures in the run, on this rank, of the same content or a near-duplicate of it;
    ``repetition`` f32; ``known`` bool: False where the content was not known.
    """

    n_equal_batch: NDArray[np.uint8]
    n_equal_window: NDArray[np.uint8]
    dup_of: NDArray[np.int64]
    dup_run: NDArray[np.int32]
    repetition: NDArray[np.float32]
    known: NDArray[np.bool_]


class DuplicationScorer:
    """Scores batches in the order in which they were consumed.

    ``n_held_out`` counts samples whose content was given to :meth:`hold_out`: a probe that is
    trained on.
    """

    def __init__(self) -> None:
        self._ring = np.zeros((RING_ROWS, compact.WORDS), np.uint64)
        self._ring_key = np.zeros(RING_ROWS, np.int64)
        self._ring_batch = np.full(RING_ROWS, -1, np.int64)
        self._ring_cluster = np.zeros(RING_ROWS, np.int64)
        self._slot_row = np.full((compact.N_BANDS, 2 * RING_ROWS), -1, np.int64)
        self._run_content = np.zeros(RUN_SLOTS, np.int64)
        self._run_cluster = np.zeros(RUN_SLOTS, np.int64)
        self._run_count = np.zeros(RUN_SLOTS, np.int32)
        self._run_touched = np.zeros(RUN_SLOTS, np.int32)
        self._next_row = 0
        self._held_out = np.zeros(0, np.int64)
        self.n_held_out = 0
        # Compile the kernels now, before training, or load them from numba's cache on disk; loader
        # workers that are forked later inherit them.
        rows = compact.compact(["a", b"a"])
        rows[:] = 0
        self.score(-WINDOW_BATCHES - 1, np.zeros(2, np.int64), rows)

    def hold_out(self, contents: Sequence[Any]) -> None:
        """Contents that training must not contain; those it does contain are counted."""
        hashes = compact.compact(contents)[:, compact.CONTENT]
        self._held_out = np.union1d(self._held_out, hashes[hashes != 0])

    def remember(self, path: Path) -> None:
        """Write which contents the run has seen, for the attempt that follows.

        Raises:
            OSError: it cannot be written.
        """
        slots = np.flatnonzero(self._run_content)
        if not len(slots):
            return
        with atomic(path) as file:
            np.savez(
                file, slots=slots, content=self._run_content[slots],
                cluster=self._run_cluster[slots], count=self._run_count[slots],
                touched=self._run_touched[slots], next_row=np.int64(self._next_row),
            )  # fmt: skip

    def recall(self, path: Path) -> None:
        """Go on with what an earlier attempt remembered; ``dup_run`` counts from there.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not what :meth:`remember` writes.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                read = {name: file[name] for name in file.files}
            slots = read["slots"]
            if len(slots) and not (slots.min() >= 0 and slots.max() < RUN_SLOTS):
                raise ValueError("slots out of range")
            for name, table in (
                ("content", self._run_content), ("cluster", self._run_cluster),
                ("count", self._run_count), ("touched", self._run_touched),
            ):  # fmt: skip
                table[slots] = read[name]
            self._next_row = int(read["next_row"])
        except (zipfile.BadZipFile, KeyError, EOFError, ValueError) as error:
            raise ValueError(f"{path}: not a memory of contents: {error}") from error

    def score(self, batch: int, keys: NDArray[np.int64], rows: NDArray[np.int64]) -> Scores:
        """Score the samples of a batch, sketches i64 [n, WORDS], and remember them."""
        n = len(rows)
        scores = Scores(
            n_equal_batch=np.zeros(n, np.uint8),
            n_equal_window=np.zeros(n, np.uint8),
            dup_of=np.full(n, -1, np.int64),
            dup_run=np.zeros(n, np.int32),
            repetition=compact.repetition_of(rows),
            known=rows[:, compact.CONTENT] != 0,
        )
        _match(
            np.ascontiguousarray(rows).view(np.uint64), np.ascontiguousarray(keys), batch,
            self._next_row, self._ring, self._ring_key, self._ring_batch, self._ring_cluster,
            self._slot_row, self._run_content, self._run_cluster, self._run_count,
            self._run_touched, scores.n_equal_batch, scores.n_equal_window, scores.dup_of,
            scores.dup_run,
        )  # fmt: skip
        self._next_row += n
        if len(self._held_out):
            self.n_held_out += int(np.isin(rows[:, compact.CONTENT], self._held_out).sum())
        return scores


@njit(nogil=True, cache=True)
def _band(row, band):  # type: ignore[no-untyped-def]
    """Hash of a band, 0 where the sample has no shingles."""
    word = row[compact.BANDS + band // 2]
    return (word >> np.uint64(32 * (band % 2))) & np.uint64(0xFFFF_FFFF)


@njit(nogil=True, cache=True)
def _n_equal(a, b):  # type: ignore[no-untyped-def]
    """How many of the lowest bytes are equal: zero bytes of the difference, a word at a time."""
    total = np.uint64(0)
    low_bits = np.uint64(0x7F7F7F7F7F7F7F7F)
    for i in range(compact.BYTES, compact.WORDS):
        x = a[i] ^ b[i]
        zero = ~(((x & low_bits) + low_bits) | x | low_bits) >> np.uint64(7)
        total += (zero * np.uint64(0x0101010101010101)) >> np.uint64(56)
    return np.int64(total)


@njit(nogil=True, cache=True)
def _slot_of(content, run_content, run_touched, now):  # type: ignore[no-untyped-def]
    """The slot of a content: its own, else a free one, else the least recent of its probes."""
    n_slots = len(run_content)
    oldest = -1
    for probe in range(_PROBES):
        slot = (content + probe) % n_slots
        if run_content[slot] == content or run_content[slot] == 0:
            oldest = slot
            break
        if oldest < 0 or run_touched[slot] < run_touched[oldest]:
            oldest = slot
    run_touched[oldest] = now
    return oldest


@njit(nogil=True, cache=True)
def _match(  # type: ignore[no-untyped-def]
    rows, keys, batch, next_row, ring, ring_key, ring_batch, ring_cluster, slot_row,
    run_content, run_cluster, run_count, run_touched, equal_batch, equal_window, dup_of, dup_run,
):  # fmt: skip
    """Look every row up among the window and the rows before it, then enter the batch.

    Slots keep the latest row of a band hash only, so the batch enters after all its rows have been
    looked up: rows of the batch must not hide those of the window. Inside the batch the comparison
    is with every earlier row of equal band hash, found through a second table.

    Samples of equal content, and near-duplicates that met in a window, share a cluster: the content
    hash of its first member. ``dup_run`` counts the cluster's earlier exposures.
    """
    n, n_rows, n_slots = rows.shape[0], ring.shape[0], slot_row.shape[1]
    n_bands = slot_row.shape[0]
    clusters = np.empty(n, np.int64)
    local_slots = 1
    while local_slots < 4 * n:
        local_slots *= 2
    local = np.full((n_bands, local_slots), -1, np.int64)
    for i in range(n):
        content = np.int64(rows[i, compact.CONTENT])
        clusters[i] = content
        if content == 0:
            continue
        most = _MIN_EQUAL - 1
        partner = np.int64(0)
        if _band(rows[i], 0) != np.uint64(0):
            for band in range(n_bands):
                h = _band(rows[i], band)
                row = slot_row[band, np.int64(h % np.uint64(n_slots))]
                if row >= 0 and row > next_row - n_rows:
                    place = row % n_rows
                    recent = ring_batch[place] >= batch - WINDOW_BATCHES
                    if recent and _band(ring[place], band) == h:
                        n_equal = _n_equal(rows[i], ring[place])
                        if n_equal >= _MIN_EQUAL and n_equal > equal_window[i]:
                            equal_window[i] = n_equal
                            if n_equal > most:
                                most = n_equal
                                dup_of[i] = ring_key[place]
                                partner = ring_cluster[place]
                slot = np.int64(h % np.uint64(local_slots))
                j = local[band, slot]
                if j >= 0 and _band(rows[j], band) == h:
                    n_equal = _n_equal(rows[i], rows[j])
                    if n_equal >= _MIN_EQUAL and n_equal > equal_batch[i]:
                        equal_batch[i] = n_equal
                        if n_equal > most:
                            most = n_equal
                            dup_of[i] = keys[j]
                            partner = clusters[j]
                local[band, slot] = i
        now = np.int32((next_row + i) // 256)
        slot = _slot_of(content, run_content, run_touched, now)
        if run_content[slot] == content:
            clusters[i] = run_cluster[slot]
        else:
            if most >= _DUPLICATE_EQUAL:
                clusters[i] = partner
            run_content[slot] = content
            run_cluster[slot] = clusters[i]
            run_count[slot] = 0
        first = slot
        if clusters[i] != content:
            first = _slot_of(clusters[i], run_content, run_touched, now)
            if run_content[first] != clusters[i]:
                run_content[first] = clusters[i]
                run_cluster[first] = clusters[i]
                run_count[first] = 0
        dup_run[i] = run_count[first]
        run_count[first] += 1
    for i in range(n):
        place = (next_row + i) % n_rows
        ring[place] = rows[i]
        ring_key[place] = keys[i]
        ring_batch[place] = batch
        ring_cluster[place] = clusters[i]
        if rows[i, compact.CONTENT] != np.uint64(0) and _band(rows[i], 0) != np.uint64(0):
            for band in range(n_bands):
                h = _band(rows[i], band)
                slot_row[band, np.int64(h % np.uint64(n_slots))] = next_row + i
