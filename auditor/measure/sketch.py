"""Shingles, MinHash signatures and content hashes of samples.

    >>> sig = signatures_text(["the cat sat on the mat", "the cat sat on a mat"])
    >>> sig.shape, sig.dtype
    ((2, 128), dtype('uint32'))

Shape legend: **N** samples, **P** permutations, **S** shingles of one sample.

Normalisation, version 1 (a manifest records the version; results of two versions do not compare):

- ``word5``: ``re.findall(r"\\w+", text.lower())`` gives the words; a shingle is a run of 5 words.
- ``char5``: ``" ".join(text.lower().split())``; a shingle is a run of 5 code points.
- ``token5``: token ids as they are; a shingle is a run of 5 ids.

A sample of fewer than 5 elements has one shingle: all of them. A sample with no element at all
(no text, or for ``word5`` no word) has no shingle: its signature is ``EMPTY`` throughout and it is
a near-duplicate of nothing, not even of another such sample. Exact hashes still tell those apart
or find them equal. No Unicode normalisation: "é" composed and decomposed are different letters.

Signatures equal datasketch 2.x ``MinHash(scheme="affine32")`` over the same 32-bit shingle hashes
(Broder 1997; MurmurHash3 finaliser, then ``a * h + b mod 2^32`` with odd ``a``, then the minimum).

The kernels release the GIL and read packed buffers, so that a background thread can run them
beside a training loop. They are compiled on first use and cached on disk.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

NORMALISATION_VERSION: Final = 1
"""Raised whenever the same content could get other shingles, signatures or exact hashes."""

EMPTY: Final = np.uint32(0xFFFF_FFFF)
"""Every value of the signature of a sample without shingles."""

TextShingle = Literal["word5", "char5", "auto"]

WORD, CHAR, TOKEN, AUTO = 0, 1, 2, 3
_KINDS: Final = {"word5": WORD, "char5": CHAR, "auto": AUTO}

# Classes of code points, as bits of the table below.
_IS_WORD, _IS_UNSPACED, IS_SPACE = 1, 2, 4

# Scripts written without spaces between words: Thai, Lao, Tibetan, Myanmar, Khmer, kana, Han.
_UNSPACED_RANGES: Final = (
    (0x0E00, 0x0FFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x2E80, 0x2FDF),
    (0x3005, 0x3007),
    (0x3040, 0x30FF),
    (0x31F0, 0x31FF),
    (0x3400, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9D),
    (0x20000, 0x3FFFF),
)
_UNSPACED_SHARE: Final = 1 / 3  # of the word characters, from which on words mean little
_LONG_WORD_CHARS: Final = 40  # mean word length beyond which "words" are base64 and the like

_MULTIPLIER = np.uint64(0x9FB21C651E98DF25)
_SEED = np.uint64(0xCBF29CE484222325)
_RUN = (  # one odd factor per place in a shingle, so that order matters
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xC2B2AE3D27D4EB4F),
    np.uint64(0x165667B19E3779F9),
    np.uint64(0xD6E8FEB86659FD93),
    np.uint64(0xA0761D6478BD642F),
)
_KIND = np.uint64(0xE7037ED1A0B428DB)  # keeps shingles of different kinds and lengths apart


@functools.cache
def classes_table() -> NDArray[np.uint8]:
    """Class bits of every code point, u8 [0x110000], taken from Python's own ``re`` and ``str``."""
    table = np.zeros(0x110000, np.uint8)
    everything = "".join(map(chr, range(0x110000)))
    for pattern, bit in ((r"\w+", _IS_WORD), (r"\s+", IS_SPACE)):
        for match in re.finditer(pattern, everything):
            table[match.start() : match.end()] |= bit
    for low, high in _UNSPACED_RANGES:
        table[low : high + 1] |= _IS_UNSPACED
    return table


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


def pack(contents: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Concatenate byte strings: bytes u8 [total], offsets i64 [N + 1]; item i is o[i] to o[i+1]."""
    offsets = np.zeros(len(contents) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, contents), np.int64, len(contents)), out=offsets[1:])
    return np.frombuffer(b"".join(contents), np.uint8), offsets


def lowered(text: str) -> bytes:
    # "surrogatepass": JSON may hold lone surrogates, and hashing must not fail on them.
    return text.lower().encode("utf-8", "surrogatepass")


def choose_shingle(text: str) -> Literal["word5", "char5"]:
    """The shingle that means something for this text, what ``"auto"`` takes.

    ``char5`` where a third or more of the word characters belong to scripts without spaces, or the
    mean word is longer than 40 characters; else ``word5``. A pair of near-duplicates on either side
    of that border is not compared.
    """
    data, offsets = pack([lowered(text)])
    return "char5" if choose(data, offsets[0], offsets[1], classes_table()) == CHAR else "word5"


def shingle_hashes_text(
    text: str, shingle: TextShingle = "word5", *, bits: Literal[32, 64] = 32
) -> NDArray[Any]:
    """Hashes of a text's shingles in order, with repeats: u32 [S], or u64 [S] for ``bits=64``.

    The 32-bit hashes are the upper halves of the 64-bit ones. MinHash needs no distinct input;
    ``jaccard`` makes its own. Use 64 bits to verify, so that collisions do not matter.
    """
    data, offsets = pack([lowered(text)])
    out = np.empty(len(data) + 1, np.uint64)
    n = _text_hashes(data, offsets[0], offsets[1], _kind(shingle), classes_table(), out)
    return _narrow(out[:n], bits)


def shingle_hashes_tokens(ids: NDArray[Any], *, bits: Literal[32, 64] = 32) -> NDArray[Any]:
    """The same for a 1-D array of integer token ids (``token5``)."""
    flat = np.ascontiguousarray(ids, np.int64)
    if flat.ndim != 1:
        raise ValueError(f"token ids of one sample must be 1-D, got shape {flat.shape}")
    out = np.empty(len(flat) + 1, np.uint64)
    n = token_hashes(flat, 0, len(flat), out)
    return _narrow(out[:n], bits)


def element_hashes_text(
    text: str, shingle: Literal["word5", "char5"] = "word5"
) -> NDArray[np.uint64]:
    """Hashes of the words or code points that shingles are made of, in order, u64 [n_elements]."""
    data, offsets = pack([lowered(text)])
    out = np.empty(len(data) + 1, np.uint64)
    kernel = words if _kind(shingle) == WORD else chars
    return out[: kernel(data, offsets[0], offsets[1], classes_table(), out)]


def signatures_text(
    texts: Sequence[str],
    shingle: TextShingle = "word5",
    n_permutations: int = 128,
    seed: int = 1,
) -> NDArray[np.uint32]:
    """MinHash signatures of texts, u32 [N, P]; ``"auto"`` chooses the shingle text by text."""
    data, offsets = pack([lowered(text) for text in texts])
    a, b = permutations(n_permutations, seed)
    out = np.empty((len(texts), n_permutations), np.uint32)
    _text_signatures(data, offsets, _kind(shingle), classes_table(), a, b, out)
    return out


def signatures_tokens(
    samples: Sequence[NDArray[Any]] | NDArray[Any],
    n_permutations: int = 128,
    seed: int = 1,
) -> NDArray[np.uint32]:
    """MinHash signatures of token samples, u32 [N, P], over ``token5`` shingles.

    ``samples``: a 2-D integer array, one sample per row, or a sequence of 1-D integer arrays.
    Padding is the caller's to remove: it would count as content.
    """
    values, offsets = pack_tokens(samples)
    a, b = permutations(n_permutations, seed)
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


def _kind(shingle: str) -> int:
    try:
        return _KINDS[shingle]
    except KeyError:
        raise ValueError(f"shingle of a text must be one of {[*_KINDS]}, got {shingle!r}") from None


def _narrow(hashes: NDArray[np.uint64], bits: int) -> NDArray[Any]:
    if bits not in (32, 64):
        raise ValueError(f"bits must be 32 or 64, got {bits!r}")
    return hashes if bits == 64 else (hashes >> np.uint64(32)).astype(np.uint32)


# Kernels. Every constant in unsigned arithmetic is typed: numba makes uint64 + int64 a float.


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def mix64(h):  # type: ignore[no-untyped-def]
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


@njit(nogil=True, cache=True)
def decode(data, i, stop):  # type: ignore[no-untyped-def]
    """Code point at byte i of UTF-8 and its width; bytes that are not UTF-8 give U+FFFD."""
    lead = np.int64(data[i])
    if lead < 0x80:
        return lead, 1
    width = 2 if lead < 0xE0 else (3 if lead < 0xF0 else 4)
    if lead < 0xC0 or lead > 0xF4 or i + width > stop:
        return np.int64(0xFFFD), 1
    point = lead & (0xFF >> (width + 1))
    for k in range(1, width):
        point = (point << 6) | (np.int64(data[i + k]) & 0x3F)
    return min(point, np.int64(0x10FFFF)), width


@njit(nogil=True, cache=True)
def choose(data, start, stop, classes):  # type: ignore[no-untyped-def]
    n_words = n_word_chars = n_unspaced = 0
    inside = False
    i = start
    while i < stop:
        point, width = decode(data, i, stop)
        kind = classes[point]
        word = (kind & _IS_WORD) != 0
        if word:
            n_word_chars += 1
            n_words += not inside
            n_unspaced += (kind & _IS_UNSPACED) != 0
        inside = word
        i += width
    unspaced = n_unspaced >= n_word_chars * _UNSPACED_SHARE and n_unspaced > 0
    return CHAR if unspaced or n_word_chars > n_words * _LONG_WORD_CHARS else WORD


@njit(nogil=True, cache=True)
def words(data, start, stop, classes, out):  # type: ignore[no-untyped-def]
    n = 0
    h = _SEED
    inside = False
    i = start
    while i < stop:
        point, width = decode(data, i, stop)
        if classes[point] & _IS_WORD:
            h = (h ^ np.uint64(point)) * _MULTIPLIER
            inside = True
        elif inside:
            out[n] = mix64(h)
            n += 1
            h = _SEED
            inside = False
        i += width
    if inside:
        out[n] = mix64(h)
        n += 1
    return n


@njit(nogil=True, cache=True)
def chars(data, start, stop, classes, out):  # type: ignore[no-untyped-def]
    n = 0
    pending = False
    i = start
    while i < stop:
        point, width = decode(data, i, stop)
        if classes[point] & IS_SPACE:
            pending = n > 0
        else:
            if pending:
                out[n] = mix64(np.uint64(32))
                n += 1
                pending = False
            out[n] = mix64(np.uint64(point))
            n += 1
        i += width
    return n


@njit(nogil=True, cache=True)
def combine(out, n, kind):  # type: ignore[no-untyped-def]
    """Turn element hashes out[:n] into hashes of runs of 5, in place; returns how many."""
    tag = _KIND * np.uint64(kind * 8 + min(n, 5))
    if n == 0:
        return 0
    if n < 5:
        total = tag
        for k in range(n):
            total += out[k] * _RUN[k]
        out[0] = mix64(total)
        return 1
    for s in range(n - 4):
        out[s] = mix64(
            tag
            + out[s] * _RUN[0]
            + out[s + 1] * _RUN[1]
            + out[s + 2] * _RUN[2]
            + out[s + 3] * _RUN[3]
            + out[s + 4] * _RUN[4]
        )
    return n - 4


@njit(nogil=True, cache=True)
def _text_hashes(data, start, stop, kind, classes, out):  # type: ignore[no-untyped-def]
    chosen = choose(data, start, stop, classes) if kind == AUTO else kind
    if chosen == WORD:
        return combine(out, words(data, start, stop, classes, out), WORD)
    return combine(out, chars(data, start, stop, classes, out), CHAR)


@njit(nogil=True, cache=True)
def token_hashes(values, start, stop, out):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        out[i - start] = mix64(np.uint64(values[i]))
    return combine(out, stop - start, TOKEN)


@njit(nogil=True, cache=True)
def minimum(hashes, n, mixed, a, b, out):  # type: ignore[no-untyped-def]
    """MinHash of 64-bit hashes[:n] into out u32 [P]; ``mixed`` is u32 scratch of any length.

    Hashes are taken a block at a time that stays in the first-level cache, and the inner loop runs
    over the block: the compiler makes it one multiply, add and minimum per vector.
    """
    out[:] = EMPTY
    for start in range(0, n, len(mixed)):
        size = min(len(mixed), n - start)
        for s in range(size):
            h = np.uint32(hashes[start + s] >> np.uint64(32))
            h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
            h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
            mixed[s] = h ^ (h >> np.uint32(16))
        for p in range(len(a)):
            factor, term, lowest = a[p], b[p], out[p]
            for s in range(size):
                lowest = min(lowest, np.uint32(mixed[s] * factor + term))
            out[p] = lowest


@njit(nogil=True, cache=True)
def _longest(offsets):  # type: ignore[no-untyped-def]
    longest = 0
    for i in range(len(offsets) - 1):
        longest = max(longest, offsets[i + 1] - offsets[i])
    return longest


@njit(nogil=True, cache=True)
def _text_signatures(data, offsets, kind, classes, a, b, out):  # type: ignore[no-untyped-def]
    hashes = np.empty(_longest(offsets) + 1, np.uint64)
    mixed = np.empty(2048, np.uint32)
    for i in range(len(offsets) - 1):
        n = _text_hashes(data, offsets[i], offsets[i + 1], kind, classes, hashes)
        minimum(hashes, n, mixed, a, b, out[i])


@njit(nogil=True, cache=True)
def _token_signatures(values, offsets, a, b, out):  # type: ignore[no-untyped-def]
    hashes = np.empty(_longest(offsets) + 1, np.uint64)
    mixed = np.empty(2048, np.uint32)
    for i in range(len(offsets) - 1):
        n = token_hashes(values, offsets[i], offsets[i + 1], hashes)
        minimum(hashes, n, mixed, a, b, out[i])
