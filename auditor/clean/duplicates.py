"""Which rows duplicate which: candidates by hashing, decisions by exact comparison.

Pure functions over arrays. Shape legend: **N** rows, **P** permutations, **M** pairs.

A row is dropped only if its exact Jaccard similarity to a row that is *kept* reaches the threshold.
Rows are visited in keep order, so the result depends on that order and on nothing else: not on how
rows were batched, nor on which machine compared them. Clusters (connected components of the
verified pairs) are for reporting; a member of a cluster may well be kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from auditor.measure.sketch import EMPTY, jaccard_sorted

BUCKET_CAP: Final = 256
"""Rows of one LSH bucket up to which all pairs are taken."""

BUCKET_KEEPERS: Final = 64
"""In a larger bucket, every row is paired with this many of its first rows in keep order."""

_SIGMAS: Final = 6.0


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Pairs worth comparing, rows i64 [M, 2], the earlier in keep order first.

    ``n_capped_buckets`` buckets were larger than ``BUCKET_CAP``; ``n_pairs_left_out`` pairs in them
    were not proposed (a pair may still have come from another bucket).
    """

    pairs: NDArray[np.int64]
    n_capped_buckets: int
    n_pairs_left_out: int


def keep_order(n: int, lengths: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Rows in the order in which they are considered: as they come, or the longest first."""
    if lengths is None:
        return np.arange(n)
    return np.argsort(-lengths, kind="stable")


def exact_keepers(
    hashes: NDArray[np.int64], order: NDArray[np.int64], usable: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """For each row the first row in keep order with the same hash, i64 [N]; itself if it is that.

    Rows that are not usable (bool [N]) get -1 and are nobody's keeper.
    """
    keeper = np.full(len(hashes), -1, np.int64)
    rows = order[usable[order]]
    _, first, inverse = np.unique(hashes[rows], return_index=True, return_inverse=True)
    keeper[rows] = rows[first[inverse]]
    return keeper


def candidates(
    signatures: NDArray[np.uint32],
    rows: NDArray[np.int64],
    *,
    bands: int = 32,
    bucket_cap: int = BUCKET_CAP,
) -> Candidates:
    """Pairs of rows whose signatures agree in all rows of some band.

    With 32 bands of 4 rows a pair of similarity s is found with probability ``1 - (1 - s^4)^32``:
    .9999999 at .8, .9998 at .7, .88 at .5.

    Args:
        signatures: u32 [N, P], P divisible by ``bands``. Rows without shingles are never paired.
        rows: the rows to pair, in keep order, i64.
    """
    n_permutations = signatures.shape[1]
    if bands < 1 or n_permutations % bands:
        raise ValueError(f"bands must divide {n_permutations} permutations, got {bands!r}")
    rows = rows[~np.all(signatures[rows] == EMPTY, axis=1)]
    if len(rows) < 2:
        return Candidates(pairs=np.empty((0, 2), np.int64), n_capped_buckets=0, n_pairs_left_out=0)
    width = n_permutations // bands
    found = np.empty(0, np.uint64)
    n_capped = n_left_out = 0
    for band in range(bands):
        keys = _band_keys(signatures, rows, band * width, (band + 1) * width)
        by_key = np.argsort(keys, kind="stable")  # stable: keep order within a bucket
        ordered = keys[by_key]
        starts = np.append(0, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1)
        ends = np.append(starts[1:], len(keys))
        several = ends - starts > 1
        starts, ends = starts[several], ends[several]
        sizes = ends - starts
        hot = sizes > bucket_cap
        n_capped += int(hot.sum())
        limits = np.where(hot, np.minimum(BUCKET_KEEPERS, bucket_cap), sizes)
        # Each row is paired with the earlier rows among the first `limit` of its bucket.
        counts = sizes * limits - limits * (limits + 1) // 2
        n_left_out += int((sizes * (sizes - 1) // 2 - counts).sum())
        pairs = np.empty(int(counts.sum()), np.uint64)
        _bucket_pairs(by_key, starts, ends, limits, pairs)
        # Merged band by band: most pairs come from many bands, and memory holds each once.
        found = np.union1d(found, pairs)
    positions = np.stack([found >> np.uint64(32), found & np.uint64(0xFFFFFFFF)], axis=1)
    return Candidates(
        pairs=rows[positions.astype(np.int64)],
        n_capped_buckets=n_capped,
        n_pairs_left_out=n_left_out,
    )


def plausible(
    signatures: NDArray[np.uint32], pairs: NDArray[np.int64], threshold: float
) -> NDArray[np.int64]:
    """The pairs whose estimated similarity is not six standard errors below the threshold.

    A pair at the threshold fails this with a probability near 1e-9; most pairs proposed by an
    unlucky band do fail it, and need no exact comparison.
    """
    n_permutations = signatures.shape[1]
    error = np.sqrt(threshold * (1 - threshold) / n_permutations)
    agree = _agreement(signatures, pairs)
    return pairs[agree >= (threshold - _SIGMAS * error) * n_permutations]


def verify_pairs(
    pairs: NDArray[np.int64], hashes: NDArray[np.uint64], starts: NDArray[np.int64], stops: Any
) -> NDArray[np.float64]:
    """Exact Jaccard similarity of each pair, f64 [M].

    ``hashes`` holds each row's distinct shingle hashes, sorted, at ``starts[row]:stops[row]``; it
    may be a memory map.
    """
    out = np.empty(len(pairs), np.float64)
    _verify(pairs, hashes, starts, stops, out)
    return out


def choose_keepers(
    pairs: NDArray[np.int64],
    similarity: NDArray[np.float64],
    order: NDArray[np.int64],
    threshold: float,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Keeper of each row and similarity to it, i64 [N] and f64 [N]; -1 and nan for rows kept.

    Rows are visited in keep order. A row with a verified pair to rows kept so far is dropped, and
    its keeper is the most similar of them, the earlier one where two are equally similar.
    """
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    chosen = similarity >= threshold
    pairs, similarity = pairs[chosen], similarity[chosen]
    earlier = rank[pairs].min(axis=1) if len(pairs) else np.empty(0, np.int64)
    later = rank[pairs].max(axis=1) if len(pairs) else np.empty(0, np.int64)
    by_row = np.lexsort((earlier, -similarity, later))
    keeper = np.full(len(order), -1, np.int64)
    jaccard = np.full(len(order), np.nan)
    _greedy(order[earlier[by_row]], order[later[by_row]], similarity[by_row], keeper, jaccard)
    return keeper, jaccard


def clusters(n: int, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cluster number of each row, i64 [n], -1 where it has no edge.

    Clusters are the connected components, numbered by their first row.
    """
    parent = np.arange(n)
    _unite(parent, edges)
    members = np.zeros(n, np.bool_)
    members[edges.ravel()] = True
    # Roots are the smallest member, so their order is the order of first appearance.
    number = np.full(n, -1, np.int64)
    number[members] = np.unique(parent[members], return_inverse=True)[1]
    return number


@njit(nogil=True, cache=True)
def _band_keys(signatures, rows, low, high):  # type: ignore[no-untyped-def]
    keys = np.empty(len(rows), np.uint64)
    for i in range(len(rows)):
        h = np.uint64(0xCBF29CE484222325)
        for k in range(low, high):
            h = (h ^ np.uint64(signatures[rows[i], k])) * np.uint64(0x9FB21C651E98DF25)
            h ^= h >> np.uint64(29)
        keys[i] = h
    return keys


@njit(nogil=True, cache=True)
def _bucket_pairs(by_key, starts, ends, limits, out):  # type: ignore[no-untyped-def]
    n = 0
    for b in range(len(starts)):
        for later in range(starts[b] + 1, ends[b]):
            for earlier in range(starts[b], min(later, starts[b] + limits[b])):
                out[n] = (np.uint64(by_key[earlier]) << np.uint64(32)) | np.uint64(by_key[later])
                n += 1


@njit(nogil=True, cache=True)
def _agreement(signatures, pairs):  # type: ignore[no-untyped-def]
    out = np.zeros(len(pairs), np.int32)
    for m in range(len(pairs)):
        a, b = signatures[pairs[m, 0]], signatures[pairs[m, 1]]
        for p in range(len(a)):
            out[m] += a[p] == b[p]
    return out


@njit(nogil=True, cache=True)
def _verify(pairs, hashes, starts, stops, out):  # type: ignore[no-untyped-def]
    for m in range(len(pairs)):
        a, b = pairs[m, 0], pairs[m, 1]
        out[m] = jaccard_sorted(hashes[starts[a] : stops[a]], hashes[starts[b] : stops[b]])


@njit(nogil=True, cache=True)
def _greedy(earlier, later, similarity, keeper, jaccard):  # type: ignore[no-untyped-def]
    for m in range(len(later)):
        row = later[m]
        if keeper[row] < 0 and keeper[earlier[m]] < 0:
            keeper[row] = earlier[m]
            jaccard[row] = similarity[m]


@njit(nogil=True, cache=True)
def _root(parent, row):  # type: ignore[no-untyped-def]
    while parent[row] != row:
        parent[row] = parent[parent[row]]
        row = parent[row]
    return row


@njit(nogil=True, cache=True)
def _unite(parent, edges):  # type: ignore[no-untyped-def]
    for m in range(len(edges)):
        a, b = _root(parent, edges[m, 0]), _root(parent, edges[m, 1])
        parent[max(a, b)] = min(a, b)
    for row in range(len(parent)):
        parent[row] = _root(parent, row)
