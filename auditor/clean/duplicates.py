"""Which rows duplicate which: candidates by hashing, decisions by exact comparison.

Pure functions over arrays. Shape legend: **N** rows, **P** permutations, **M** pairs.

A row is dropped only if its exact Jaccard similarity to a row that is *kept* reaches the threshold.
Rows are visited in keep order, so the result depends on that order and on nothing else: not on how
rows were batched, nor on which machine compared them. Clusters (connected components of the
verified pairs) are for reporting; a member of a cluster may well be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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

    ``n_proposed`` pairs were found band by band, most of them in several. ``n_capped_buckets``
    buckets were larger than ``BUCKET_CAP``; ``n_pairs_left_out`` pairs in them were not proposed (a
    pair may still have come from another bucket).
    """

    pairs: NDArray[np.int64]
    n_proposed: int
    n_capped_buckets: int
    n_pairs_left_out: int


_NOTHING: Final = Candidates(
    pairs=np.empty((0, 2), np.int64), n_proposed=0, n_capped_buckets=0, n_pairs_left_out=0
)


def exact_leaders(
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
    of_bands: range | None = None,
    bucket_cap: int = BUCKET_CAP,
    threshold: float = 0.0,
) -> Candidates:
    """Pairs of rows whose signatures agree in all rows of some band.

    With 32 bands of 4 rows a pair of similarity s is found with probability ``1 - (1 - s^4)^32``:
    .9999999 at .8, .9998 at .7, .88 at .5.

    Args:
        signatures: u32 [N, P], P divisible by ``bands``; may be a memory map. Rows without shingles
            are never paired.
        rows: the rows to pair, in keep order, i64.
        of_bands: the bands to look at; default: all of them. What single bands give is put together
            by ``union``.
        threshold: leave out pairs that are not ``plausible`` at it.
    """
    n_permutations = signatures.shape[1]
    if bands < 1 or n_permutations % bands:
        raise ValueError(f"bands must divide {n_permutations} permutations, got {bands!r}")
    rows = rows[_has_shingles(signatures, rows)]
    width = n_permutations // bands
    found = [_NOTHING]
    if len(rows) > 1:
        for band in of_bands or range(bands):
            keys = _band_keys(signatures, rows, band * width, (band + 1) * width)
            pairs = _pairs_of_band(keys, rows, bucket_cap)
            kept = plausible(signatures, pairs.pairs, threshold) if threshold else pairs.pairs
            found.append(replace(pairs, pairs=kept))
    return union(found, len(signatures))


def union(found: Sequence[Candidates], n: int) -> Candidates:
    """Candidates of several bands as one, each pair of the ``n`` rows once."""
    # Merged one by one: most pairs come from many bands, and memory holds each once.
    keys = np.empty(0, np.int64)
    for one in found:
        keys = np.union1d(keys, one.pairs[:, 0] * n + one.pairs[:, 1])
    return Candidates(
        pairs=np.stack([keys // max(n, 1), keys % max(n, 1)], axis=1),
        n_proposed=sum(one.n_proposed for one in found),
        n_capped_buckets=sum(one.n_capped_buckets for one in found),
        n_pairs_left_out=sum(one.n_pairs_left_out for one in found),
    )


def _pairs_of_band(
    keys: NDArray[np.uint64], rows: NDArray[np.int64], bucket_cap: int
) -> Candidates:
    by_key = np.argsort(keys, kind="stable")  # stable: keep order within a bucket
    ordered = keys[by_key]
    starts = np.append(0, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1)
    ends = np.append(starts[1:], len(keys))
    several = ends - starts > 1
    starts, ends = starts[several], ends[several]
    sizes = ends - starts
    hot = sizes > bucket_cap
    limits = np.where(hot, np.minimum(BUCKET_KEEPERS, bucket_cap), sizes)
    # Each row is paired with the earlier rows among the first `limit` of its bucket.
    counts = sizes * limits - limits * (limits + 1) // 2
    pairs = np.empty((int(counts.sum()), 2), np.int64)
    _bucket_pairs(rows[by_key], starts, ends, limits, pairs)
    return Candidates(
        pairs=pairs,
        n_proposed=len(pairs),
        n_capped_buckets=int(hot.sum()),
        n_pairs_left_out=int((sizes * (sizes - 1) // 2 - counts).sum()),
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


@dataclass(frozen=True, kw_only=True)
class Keepers:
    """Which rows stay. **N** rows."""

    keeper: NDArray[np.int64]  # [N], -1 for rows that stay
    similarity: NDArray[np.float64]  # [N] to the keeper, nan for rows that stay


def choose_keepers(
    pairs: NDArray[np.int64],
    similarity: NDArray[np.float64],
    *,
    leader: NDArray[np.int64],
    order: NDArray[np.int64],
    threshold: NDArray[np.float64],
    protected: NDArray[np.bool_],
    copies: int = 1,
) -> Keepers:
    """Keeper of each row that goes.

    Rows are visited in keep order. A row goes when ``copies`` rows like it are kept so far: those
    with its content, and those whose content is similar to it by its own threshold. Its keeper is
    the first kept row of its content, else of the most similar one, the earlier where two are
    equally similar.

    Args:
        pairs, similarity: verified pairs of leaders, i64 [M, 2] and f64 [M].
        leader: i64 [N], the row that stands for all with the same content; -1: the row stays, and
            is nobody's keeper.
        order: i64 [N], all rows in keep order.
        threshold: f64 [N], similarity from which a row counts as like another.
        protected: bool [N], rows that stay whatever is like them.
        copies: number of like rows that stay.
    """
    n = len(order)
    ends = np.concatenate([pairs, pairs[:, ::-1]])
    by_row = np.argsort(ends[:, 0], kind="stable")
    keeper = np.full(n, -1, np.int64)
    best = np.full(n, np.nan)
    rank = np.empty(n, np.int64)
    rank[order] = np.arange(n)
    _greedy(
        order,
        rank,
        leader,
        np.searchsorted(ends[by_row, 0], np.arange(n + 1)),
        ends[by_row, 1],
        np.concatenate([similarity, similarity])[by_row],
        threshold,
        protected,
        copies,
        keeper,
        best,
    )
    return Keepers(keeper=keeper, similarity=best)


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
def _has_shingles(signatures, rows):  # type: ignore[no-untyped-def]
    out = np.zeros(len(rows), np.bool_)
    for i in range(len(rows)):
        # A signature without shingles is EMPTY throughout, one with shingles hardly anywhere.
        for value in signatures[rows[i]]:
            if value != EMPTY:
                out[i] = True
                break
    return out


@njit(nogil=True, cache=True)
def _bucket_pairs(ordered, starts, ends, limits, out):  # type: ignore[no-untyped-def]
    n = 0
    for b in range(len(starts)):
        for later in range(starts[b] + 1, ends[b]):
            for earlier in range(starts[b], min(later, starts[b] + limits[b])):
                out[n, 0] = ordered[earlier]
                out[n, 1] = ordered[later]
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
def _greedy(  # type: ignore[no-untyped-def]
    order, rank, leader, starts, like, similarity, threshold, protected, copies, keeper, best
):
    n_kept = np.zeros(len(order), np.int32)  # by leader
    first = np.full(len(order), -1, np.int64)  # by leader, the first row kept
    for row in order:
        own = leader[row]
        if own < 0:
            continue
        found, highest = first[own], 1.0
        count = n_kept[own]
        for m in range(starts[own], starts[own + 1]):
            other = like[m]
            if n_kept[other] == 0 or similarity[m] < threshold[row]:
                continue
            count += n_kept[other]
            if n_kept[own] == 0 and (
                found < 0
                or similarity[m] > highest
                or (similarity[m] == highest and rank[first[other]] < rank[found])
            ):
                found, highest = first[other], similarity[m]
        if count < copies or protected[row]:
            n_kept[own] += 1
            if first[own] < 0:
                first[own] = row
        else:
            keeper[row] = found
            best[row] = highest


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
