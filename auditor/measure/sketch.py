"""Shingles, MinHash signatures and content hashes of samples.

    >>> sig = signatures_text(["the cat sat on the mat", "the cat sat on a mat"])
    >>> sig.shape, sig.dtype
    ((2, 128), dtype('uint32'))

Shape legend: **N** samples, **P** permutations, **S** shingles of one sample.

Normalisation, version 2 (a manifest records the version; results of two versions do not compare):

- ``word5``: ``re.findall(r"\\w+", text.lower())`` gives the words; a shingle is a run of 5 words.
- ``char5``: ``" ".join(text.lower().split())``; a shingle is a run of 5 code points.
- ``token5``: token ids as they are; a shingle is a run of 5 ids.

Version 1 took the same shingles and other hashes of them.

A sample of fewer than 5 elements has one shingle: all of them. A sample with no element at all
(no text, or for ``word5`` no word) has no shingle: its signature is ``EMPTY`` throughout and it is
a near-duplicate of nothing, not even of another such sample. Exact hashes still tell those apart
or find them equal. No Unicode normalisation: "é" composed and decomposed are different letters.

Two schemes of signatures, which do not compare with each other:

- ``affine32`` equals datasketch 2.x ``MinHash(scheme="affine32")`` over the same 32-bit shingle
  hashes (Broder 1997; MurmurHash3 finaliser, then ``a * h + b mod 2^32`` with odd ``a``, then the
  minimum). Its cost grows with S times P.
- ``oph``: one permutation (Li, Owen, Zhang 2012), whose range is cut into P bins; a bin holds the
  least value that fell into it. An empty bin takes the value of another, drawn by a hash of the
  bin alone (optimal densification, Shrivastava 2017). Its cost grows with S plus P; its estimate
  has the same mean, and a larger variance where S is not much more than P.

The kernels release the GIL and read packed buffers, so that a background thread can run them
beside a training loop. They are compiled on first use and kept on disk.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from auditor.measure import text as kernels
from auditor.measure.compiled import kernel
from auditor.measure.text import AUTO, CHAR, TOKEN, WORD, mix64
from auditor.measure.vector import LANES, PADDING, lowest_lanes, shingle_block

NORMALISATION_VERSION: Final = 2
"""Raised whenever the same content could get other shingles, signatures or exact hashes."""

EMPTY: Final = np.uint32(0xFFFF_FFFF)
"""Every value of the signature of a sample without shingles."""

TextShingle = Literal["word5", "char5", "auto"]

Scheme = Literal["affine32", "oph"]

_KINDS: Final = {"word5": WORD, "char5": CHAR, "auto": AUTO}

_KIND = np.uint64(0xE7037ED1A0B428DB)  # keeps shingles of different kinds and lengths apart
BLOCK: Final = 2048  # shingles that are hashed and permuted while in the first-level cache


@functools.cache
def permutations(
    n_permutations: int = 128, seed: int = 1
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Factors ``a`` (odd) and terms ``b``, u32 [P] each, drawn as datasketch's affine32 does."""
    if not 1 <= n_permutations <= 4096:
        raise ValueError(f"n_permutations must be within 1..4096, got {n_permutations!r}")
    generator = np.random.RandomState(seed)
    a = generator.randint(0, 1 << 31, n_permutations, dtype=np.uint32)
    b = generator.randint(0, 1 << 32, n_permutations, dtype=np.uint32)
    return a * np.uint32(2) + np.uint32(1), b


def factors(
    scheme: Scheme, n_permutations: int, seed: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """What the kernels take a scheme by: ``permutations``, or for ``oph`` no ``a`` and one ``b``.

    The one ``b`` is the seed's, exclusive-or'ed to a shingle hash before the finaliser.
    """
    a, b = permutations(n_permutations, seed)
    if scheme == "affine32":
        return a, b
    if scheme == "oph":
        return a[:0], b[:1]
    raise ValueError(f"scheme must be 'affine32' or 'oph', got {scheme!r}")


def choose_shingle(text: str) -> Literal["word5", "char5"]:
    """The shingle that means something for this text, what ``"auto"`` takes.

    ``char5`` where a third or more of the word characters belong to scripts without spaces, or the
    mean word is longer than 40 characters; else ``word5``. A pair of near-duplicates on either side
    of that border is not compared.
    """
    data, offsets = kernels.pack_texts([text])
    return "char5" if _chosen(data, offsets, kernels.points_table()) == CHAR else "word5"


def shingle_hashes_text(
    text: str, shingle: TextShingle = "word5", *, bits: Literal[32, 64] = 32
) -> NDArray[Any]:
    """Hashes of a text's shingles in order, with repeats: u32 [S], or u64 [S] for ``bits=64``.

    The 32-bit hashes are the upper halves of the 64-bit ones. MinHash needs no distinct input;
    ``jaccard`` makes its own. Use 64 bits to verify, so that collisions do not matter.
    """
    data, offsets = kernels.pack_texts([text])
    hashes, _ = _text_hashes(data, offsets, kind_of(shingle), kernels.points_table(), False)
    return _narrow(hashes, bits)


def shingle_hashes_tokens(ids: NDArray[Any], *, bits: Literal[32, 64] = 32) -> NDArray[Any]:
    """The same for a 1-D array of integer token ids (``token5``)."""
    flat = np.ascontiguousarray(ids, np.int64)
    if flat.ndim != 1:
        raise ValueError(f"token ids of one sample must be 1-D, got shape {flat.shape}")
    hashes, _ = _token_hashes(flat, np.array([0, len(flat)]), False)
    return _narrow(hashes, bits)


def distinct_hashes_text(
    texts: Sequence[str], shingle: TextShingle = "word5"
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Distinct 64-bit shingle hashes of each text, sorted: u64 [total], offsets i64 [N + 1]."""
    data, offsets = kernels.pack_texts(texts)
    hashes, found = _text_hashes(data, offsets, kind_of(shingle), kernels.points_table(), True)
    return hashes, found


def distinct_hashes_tokens(
    samples: Sequence[NDArray[Any]] | NDArray[Any],
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The same for token samples, as ``signatures_tokens`` takes them."""
    values, offsets = pack_tokens(samples)
    hashes, found = _token_hashes(values, offsets, True)
    return hashes, found


def element_hashes_text(
    text: str, shingle: Literal["word5", "char5"] = "word5"
) -> NDArray[np.uint64]:
    """Hashes of the words or code points that shingles are made of, in order, u64 [n_elements]."""
    data, offsets = kernels.pack_texts([text])
    hashes: NDArray[np.uint64] = _elements(data, offsets, kind_of(shingle), kernels.points_table())
    return hashes


def signatures_text(
    texts: Sequence[str],
    shingle: TextShingle = "word5",
    n_permutations: int = 128,
    seed: int = 1,
    *,
    scheme: Scheme = "affine32",
) -> NDArray[np.uint32]:
    """MinHash signatures of texts, u32 [N, P]; ``"auto"`` chooses the shingle text by text."""
    data, offsets = kernels.pack_texts(texts)
    a, b = factors(scheme, n_permutations, seed)
    out = np.empty((len(texts), n_permutations), np.uint32)
    _text_signatures(data, offsets, kind_of(shingle), kernels.points_table(), a, b, out)
    return out


def signatures_tokens(
    samples: Sequence[NDArray[Any]] | NDArray[Any],
    n_permutations: int = 128,
    seed: int = 1,
    *,
    scheme: Scheme = "affine32",
) -> NDArray[np.uint32]:
    """MinHash signatures of token samples, u32 [N, P], over ``token5`` shingles.

    ``samples``: a 2-D integer array, one sample per row, or a sequence of 1-D integer arrays.
    Padding is the caller's to remove: it would count as content.
    """
    values, offsets = pack_tokens(samples)
    a, b = factors(scheme, n_permutations, seed)
    out = np.empty((len(offsets) - 1, n_permutations), np.uint32)
    _token_signatures(values, offsets, a, b, out)
    return out


def pack_tokens(
    samples: Sequence[NDArray[Any]] | NDArray[Any],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Concatenate token samples: ids i64 [total], offsets i64 [N + 1]."""
    if isinstance(samples, np.ndarray):
        if samples.ndim != 2:
            raise ValueError(f"an array of token samples must be 2-D, got shape {samples.shape}")
        n, length = samples.shape
        return np.ascontiguousarray(samples, np.int64).ravel(), np.arange(n + 1) * length
    offsets = np.zeros(len(samples) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, samples), np.int64, len(samples)), out=offsets[1:])
    parts = [np.asarray(sample, np.int64) for sample in samples]
    return np.concatenate(parts) if parts else np.empty(0, np.int64), offsets


def exact_hash(content: bytes) -> int:
    """63-bit BLAKE2b hash of bytes: equal content, equal hash.

    Among 10^8 distinct contents, some two share a hash with a probability of 5 in 10,000.
    """
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF_FFFF_FFFF


def exact_hash_text(text: str) -> int:
    """``exact_hash`` of the text in lower case, runs of whitespace made one space, stripped."""
    return exact_hash(" ".join(text.lower().split()).encode("utf-8", "surrogatepass"))


def exact_hash_tokens(ids: NDArray[Any]) -> int:
    """``exact_hash`` of token ids, independent of their integer type."""
    return exact_hash(np.ascontiguousarray(ids, "<i8").tobytes())


def jaccard(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Exact Jaccard similarity of two arrays of shingle hashes, as sets; 0.0 if both are empty."""
    return float(jaccard_sorted(np.unique(a), np.unique(b)))


def estimate_jaccard(sig_a: NDArray[np.uint32], sig_b: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Share of equal values of signatures [..., P], f64 [...]; samples without shingles give 0."""
    empty = np.all(sig_a == EMPTY, axis=-1) | np.all(sig_b == EMPTY, axis=-1)
    return np.where(empty, 0.0, np.mean(sig_a == sig_b, axis=-1))


def kind_of(shingle: str) -> int:
    """The kernels' number of a shingle of texts."""
    try:
        return _KINDS[shingle]
    except KeyError:
        raise ValueError(f"shingle of a text must be one of {[*_KINDS]}, got {shingle!r}") from None


def _narrow(hashes: NDArray[np.uint64], bits: int) -> NDArray[Any]:
    if bits not in (32, 64):
        raise ValueError(f"bits must be 32 or 64, got {bits!r}")
    return hashes if bits == 64 else (hashes >> np.uint64(32)).astype(np.uint32)


# Kernels. Every constant in unsigned arithmetic is typed: numba makes uint64 + int64 a float.


@kernel
def jaccard_sorted(a, b):  # type: ignore[no-untyped-def]
    """Jaccard similarity of two sorted arrays without repeats, by one merge."""
    i = j = shared = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            shared += 1
            i += 1
            j += 1
        elif a[i] < b[j]:
            i += 1
        else:
            j += 1
    union = len(a) + len(b) - shared
    return shared / union if union else 0.0


@kernel
def _turned(h, bits):  # type: ignore[no-untyped-def]
    return (h << np.uint64(bits)) | (h >> np.uint64(64 - bits))


@kernel
def _shingle(elements, s, tag):  # type: ignore[no-untyped-def]
    """Hash of the 5 elements from s on: rotated by their place, so that order matters."""
    return (
        tag
        ^ elements[s]
        ^ _turned(elements[s + 1], 13)
        ^ _turned(elements[s + 2], 26)
        ^ _turned(elements[s + 3], 39)
        ^ _turned(elements[s + 4], 52)
    )


@kernel
def _tag(kind, n):  # type: ignore[no-untyped-def]
    return mix64(_KIND * np.uint64(kind * 8 + min(n, 5)))


@kernel
def count_shingles(n):  # type: ignore[no-untyped-def]
    """Shingles of n elements."""
    return max(n - 4, min(n, 1))


@kernel
def combine(elements, n, kind, out):  # type: ignore[no-untyped-def]
    """Hashes of the shingles of elements[:n], mixed u64, to ``out``; returns how many.

    ``elements`` has 4 places more than n, which may be overwritten.
    """
    if 0 < n < 5:
        elements[n:5] = 0
    tag = _tag(kind, n)
    count = count_shingles(n)
    for s in range(count):
        out[s] = _shingle(elements, s, tag)
    return count


@kernel
def sign(elements, n, kind, mixed, a, b, out):  # type: ignore[no-untyped-def]
    """Signature of elements[:n], mixed u64, into out u32 [P], by the scheme of ``factors``.

    ``elements`` has room for PADDING + 4 more, which may be overwritten; ``mixed`` is scratch, u32,
    a multiple of 64. Shingles are taken a block at a time that stays in the first-level cache.
    """
    out[:] = EMPTY
    if 0 < n < 5:
        elements[n:5] = 0
    tag = _tag(kind, n)
    count = count_shingles(n)
    one_permutation = len(a) == 0
    flip = b[0] if one_permutation else np.uint32(0)
    for start in range(0, count, len(mixed)):
        size = min(len(mixed), count - start)
        for s in range(0, size, 64):
            shingle_block(elements, start + s, tag, flip, mixed, s)
        if one_permutation:
            _into_bins(mixed[:size], out)
        else:
            _permuted(mixed, size, a, b, out)
    if one_permutation and count:
        _densify(out)


@kernel
def _permuted(mixed, size, a, b, out):  # type: ignore[no-untyped-def]
    whole = len(out) - len(out) % LANES
    for p in range(0, whole, LANES):
        lowest_lanes(mixed, size, a, b, p, out)
    for p in range(whole, len(out)):
        factor, term, lowest = a[p], b[p], out[p]
        for s in range(size):
            lowest = min(lowest, np.uint32(mixed[s] * factor + term))
        out[p] = lowest


@kernel
def _into_bins(mixed, out):  # type: ignore[no-untyped-def]
    n_bins = np.uint64(len(out))
    for h in mixed:
        place = (np.uint64(h) * n_bins) >> np.uint64(32)
        out[place] = min(out[place], h)


@kernel
def _densify(out):  # type: ignore[no-untyped-def]
    """Fill each empty bin with the value of the first full one among bins drawn for it.

    ``EMPTY`` itself, a value of 1 in 2^32, counts as an empty bin.
    """
    n_bins = np.uint64(len(out))
    full = out != EMPTY
    if not full.any():
        out[-1] = EMPTY - np.uint32(1)
        full[-1] = True
    for p in range(len(out)):
        attempt = np.uint64(0)
        place = np.int64(p)
        while not full[place]:
            attempt += np.uint64(1)
            drawn = mix64((np.uint64(p) << np.uint64(32)) | attempt) >> np.uint64(32)
            place = np.int64((drawn * n_bins) >> np.uint64(32))
        out[p] = out[place]


@kernel
def text_scratch(offsets):  # type: ignore[no-untyped-def]
    """Buffers for the longest text: bytes twice, bit fields twice, edges, elements, shingles."""
    size = kernels.capacity(offsets)
    low = np.empty(size, np.uint8)
    content = np.empty(size, np.uint8)
    word_bits = np.empty(size // 64 + 2, np.uint64)
    space_bits = np.empty(size // 64 + 2, np.uint64)
    edges = np.empty(size + 2, np.int64)
    elements = np.empty(size + 2 * PADDING, np.uint64)
    return low, content, word_bits, space_bits, edges, elements


@kernel
def _elements_of(data, start, stop, kind, table, scratch):  # type: ignore[no-untyped-def]
    """Element hashes of a text into its scratch; returns how many, and the kind taken."""
    low, content, word_bits, space_bits, edges, elements = scratch
    n, n_letters, n_unspaced, n_letter_bytes = kernels.lower(
        data, start, stop, table, low, word_bits, space_bits
    )
    if kind == AUTO:
        kind = kernels.choose(n, word_bits, n_letters, n_unspaced, n_letter_bytes)
    if kind == WORD:
        return kernels.words(low, n, word_bits, edges, elements), WORD
    count = kernels.characters(
        content, 0, kernels.collapse(low, n, space_bits, content, 0), elements
    )
    kernels.mix_all(elements, count)
    return count, CHAR


@kernel
def _chosen(data, offsets, table):  # type: ignore[no-untyped-def]
    return _elements_of(data, offsets[0], offsets[1], AUTO, table, text_scratch(offsets))[1]


@kernel
def _elements(data, offsets, kind, table):  # type: ignore[no-untyped-def]
    scratch = text_scratch(offsets)
    n, _ = _elements_of(data, offsets[0], offsets[1], kind, table, scratch)
    return scratch[5][:n]


@kernel
def _text_signatures(data, offsets, kind, table, a, b, out):  # type: ignore[no-untyped-def]
    scratch = text_scratch(offsets)
    mixed = np.empty(BLOCK, np.uint32)
    for i in range(len(offsets) - 1):
        n, chosen = _elements_of(data, offsets[i], offsets[i + 1], kind, table, scratch)
        sign(scratch[5], n, chosen, mixed, a, b, out[i])


@kernel
def token_scratch(offsets):  # type: ignore[no-untyped-def]
    """A buffer for the elements of the longest sample, u64."""
    return np.empty(kernels.capacity(offsets) + PADDING, np.uint64)


@kernel
def token_elements(values, start, stop, out):  # type: ignore[no-untyped-def]
    """Element hashes of ids values[start:stop] to ``out`` u64; returns how many."""
    for i in range(start, stop):
        out[i - start] = mix64(np.uint64(values[i]))
    return stop - start


@kernel
def _token_signatures(values, offsets, a, b, out):  # type: ignore[no-untyped-def]
    elements = token_scratch(offsets)
    mixed = np.empty(BLOCK, np.uint32)
    for i in range(len(offsets) - 1):
        n = token_elements(values, offsets[i], offsets[i + 1], elements)
        sign(elements, n, TOKEN, mixed, a, b, out[i])


@kernel
def _text_hashes(data, offsets, kind, table, distinct):  # type: ignore[no-untyped-def]
    scratch = text_scratch(offsets)
    out = np.empty(offsets[-1] + len(offsets), np.uint64)  # a code point has a byte or more
    found = np.zeros(len(offsets), np.int64)
    for i in range(len(offsets) - 1):
        n, chosen = _elements_of(data, offsets[i], offsets[i + 1], kind, table, scratch)
        found[i + 1] = _append(scratch[5], n, chosen, distinct, out, found[i])
    return out[: found[-1]], found


@kernel
def _token_hashes(values, offsets, distinct):  # type: ignore[no-untyped-def]
    elements = token_scratch(offsets)
    out = np.empty(offsets[-1] + len(offsets), np.uint64)
    found = np.zeros(len(offsets), np.int64)
    for i in range(len(offsets) - 1):
        n = token_elements(values, offsets[i], offsets[i + 1], elements)
        found[i + 1] = _append(elements, n, TOKEN, distinct, out, found[i])
    return out[: found[-1]], found


@kernel
def _append(elements, n, kind, distinct, out, at):  # type: ignore[no-untyped-def]
    """Append the shingles of one sample to ``out``, sorted and without repeats where so asked."""
    count = combine(elements, n, kind, out[at:])
    if not distinct or count < 2:
        return at + count
    part = out[at : at + count]
    part.sort()
    kept = 1
    for s in range(1, count):
        if part[s] != part[s - 1]:
            part[kept] = part[s]
            kept += 1
    return at + kept
