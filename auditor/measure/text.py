"""Kernels from UTF-8 to the words and characters that shingles are made of.

A text goes through stages, each a pass over bytes, 64 at a time where they are ASCII:

1. ``lower``: lower case as ``str.lower`` gives it, with a bit per byte for word characters
   (``\\w``) and one for whitespace;
2. ``words``: a hash per run of word characters; or ``collapse``: whitespace made one blank and
   stripped, as ``" ".join(text.split())``; then ``characters``: its code points.

Classes and lower case are those of Python's own ``re`` and ``str``, by a table of all code points.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from auditor.measure.compiled import kernel
from auditor.measure.vector import (
    PADDING,
    blank_block,
    count_ones,
    load_u64,
    lower_block,
    not_ascii,
    trailing_zeros,
    widen_block,
)

WORD, CHAR, TOKEN, AUTO = 0, 1, 2, 3

# An entry of the table: the code point in lower case, and above it these class bits.
_POINT: Final = np.uint32(0x1F_FFFF)
_IS_WORD: Final = np.uint32(1 << 21)
_IS_UNSPACED: Final = np.uint32(1 << 22)
_IS_SPACE: Final = np.uint32(1 << 23)

# In lower case these depend on their neighbours or become two code points: left to ``str.lower``.
_LOWERED_IN_CONTEXT: Final = ("\u0130", "\u03a3")

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

_FIRST = np.uint64(0x9FB21C651E98DF25)
_SECOND = np.uint64(0x9E3779B97F4A7C15)
_SEED = np.uint64(0xCBF29CE484222325)
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_KEPT = np.uint64(0x7FFF_FFFF_FFFF_FFFF)


@functools.cache
def points_table() -> NDArray[np.uint32]:
    """Lower case and class bits of every code point, u32 [0x110000]."""
    points = np.arange(0x110000, dtype="<u4")
    everything = points.tobytes().decode("utf-32-le", "surrogatepass")
    single = everything
    for letter in _LOWERED_IN_CONTEXT:
        single = single.replace(letter, " ")
    lower = single.lower().encode("utf-32-le", "surrogatepass")
    table = np.frombuffer(lower, "<u4").astype(np.uint32)
    classes = np.zeros(0x110000, np.uint32)
    for pattern, bit in ((r"\w+", _IS_WORD), (r"\s+", _IS_SPACE)):
        for match in re.finditer(pattern, everything):
            classes[match.start() : match.end()] |= bit
    for low, high in _UNSPACED_RANGES:
        classes[low : high + 1] |= _IS_UNSPACED
    return table | classes[table]


def pack_texts(texts: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """UTF-8 of all texts, u8 [total + PADDING], and offsets i64 [N + 1], for the kernels below."""
    # "surrogatepass": JSON may hold lone surrogates, and hashing must not fail on them.
    parts = [
        text.encode()
        if text.isascii()
        else (
            text.lower() if any(letter in text for letter in _LOWERED_IN_CONTEXT) else text
        ).encode("utf-8", "surrogatepass")
        for text in texts
    ]
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=offsets[1:])
    parts.append(bytes(PADDING))
    return np.frombuffer(b"".join(parts), np.uint8), offsets


# Kernels. Every constant in unsigned arithmetic is typed: numba makes uint64 + int64 a float.


@kernel
def capacity(offsets):  # type: ignore[no-untyped-def]
    """Bytes that the longest text can have in lower case (2 may become 3), and padding."""
    longest = 0
    for i in range(len(offsets) - 1):
        longest = max(longest, offsets[i + 1] - offsets[i])
    return longest + longest // 2 + 2 * PADDING


@kernel
def mix64(h):  # type: ignore[no-untyped-def]
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


@kernel
def _decode(data, i):  # type: ignore[no-untyped-def]
    """Code point of the UTF-8 at byte i, other than ASCII, and its width."""
    lead = np.int64(data[i])
    width = np.int64(2 if lead < 0xE0 else (3 if lead < 0xF0 else 4))
    point = lead & (0xFF >> (width + 1))
    for k in range(1, width):
        point = (point << 6) | (np.int64(data[i + k]) & 0x3F)
    return point, width


@kernel
def _encode(point, out, o):  # type: ignore[no-untyped-def]
    """Write a code point as UTF-8 at byte o; returns its width."""
    if point < 0x80:
        out[o] = point
        return 1
    if point < 0x800:
        out[o] = 0xC0 | (point >> 6)
        out[o + 1] = 0x80 | (point & 0x3F)
        return 2
    if point < 0x10000:
        out[o] = 0xE0 | (point >> 12)
        out[o + 1] = 0x80 | ((point >> 6) & 0x3F)
        out[o + 2] = 0x80 | (point & 0x3F)
        return 3
    out[o] = 0xF0 | (point >> 18)
    out[o + 1] = 0x80 | ((point >> 12) & 0x3F)
    out[o + 2] = 0x80 | ((point >> 6) & 0x3F)
    out[o + 3] = 0x80 | (point & 0x3F)
    return 4


@kernel
def _append_bits(bits, o, mask):  # type: ignore[no-untyped-def]
    """Put a mask at bit o of a bit field in which no bit from o on is set."""
    q, r = o >> 6, np.uint64(o & 63)
    bits[q] |= mask << r
    if r:
        bits[q + 1] = mask >> (np.uint64(64) - r)


@kernel
def lower(data, start, stop, table, low, word_bits, space_bits):  # type: ignore[no-untyped-def]
    """Stage 1: data[start:stop] in lower case to ``low``, with its bit fields (u64).

    ``low`` has ``capacity`` bytes and the bit fields a 64th of that, and 2. Returns the bytes
    written, how many code points are word characters beyond ASCII, and how many of these belong to
    scripts without spaces; and the bytes they take.
    """
    fields = (stop - start + ((stop - start) >> 1)) // 64 + 2
    word_bits[:fields] = 0
    space_bits[:fields] = 0
    i, o = start, 0
    n_letters = n_unspaced = n_letter_bytes = 0
    while i < stop:
        high, word, space = lower_block(data, i, low, o)
        size = min(64, stop - i)
        if high:
            size = min(size, trailing_zeros(high))
        if size:
            kept = _ALL >> np.uint64(64 - size)
            _append_bits(word_bits, o, word & kept)
            _append_bits(space_bits, o, space & kept)
            i += size
            o += size
        while i < stop and data[i] >= 0x80:
            point, width = _decode(data, i)
            i += width
            entry = table[point]
            written = _encode(np.int64(entry & _POINT), low, o)
            bytes_mask = _ALL >> np.uint64(64 - written)
            if entry & _IS_WORD:
                _append_bits(word_bits, o, bytes_mask)
                n_letters += 1
                n_letter_bytes += written
                n_unspaced += (entry & _IS_UNSPACED) != 0
            elif entry & _IS_SPACE:
                _append_bits(space_bits, o, bytes_mask)
            o += written
    return o, n_letters, n_unspaced, n_letter_bytes


@kernel
def count_words(n, word_bits, n_letters, n_letter_bytes):  # type: ignore[no-untyped-def]
    """Words, and characters in words, of what ``lower`` found."""
    n_words = n_word_bytes = 0
    carry = np.uint64(0)
    for q in range((n >> 6) + 1):
        bits = word_bits[q]
        n_word_bytes += count_ones(bits)
        n_words += count_ones(bits & ~((bits << np.uint64(1)) | carry))
        carry = bits >> np.uint64(63)
    return n_words, n_word_bytes - n_letter_bytes + n_letters


@kernel
def choose(n, word_bits, n_letters, n_unspaced, n_letter_bytes):  # type: ignore[no-untyped-def]
    """WORD or CHAR, from what ``lower`` found: see ``sketch.choose_shingle``."""
    n_words, n_word_chars = count_words(n, word_bits, n_letters, n_letter_bytes)
    unspaced = n_unspaced >= n_word_chars * _UNSPACED_SHARE and n_unspaced > 0
    return CHAR if unspaced or n_word_chars > n_words * _LONG_WORD_CHARS else WORD


@kernel
def words(low, n, word_bits, edges, out):  # type: ignore[no-untyped-def]
    """Stage 2: a hash of each run of word bytes to ``out`` u64; returns how many.

    ``edges`` i64 [capacity] is scratch. A word holds no zero byte, so that filling up its last
    8 bytes with zeros keeps words apart.
    """
    k = 0
    carry = np.uint64(0)
    for q in range((n >> 6) + 1):
        bits = word_bits[q]
        left = bits ^ ((bits << np.uint64(1)) | carry)
        carry = bits >> np.uint64(63)
        base = q << 6
        while left:
            edges[k] = base + trailing_zeros(left)
            k += 1
            left &= left - np.uint64(1)
    n_words = k >> 1
    for w in range(n_words):
        begin, size = edges[2 * w], edges[2 * w + 1] - edges[2 * w]
        first = load_u64(low, begin) & (_ALL >> np.uint64(64 - 8 * min(size, 8)))
        second = np.uint64(0)
        if size > 8:
            second = load_u64(low, begin + 8) & (_ALL >> np.uint64(64 - 8 * min(size - 8, 8)))
        h = first * _FIRST + second * _SECOND
        for at in range(16, size, 8):
            more = load_u64(low, begin + at) & (_ALL >> np.uint64(64 - 8 * min(size - at, 8)))
            h = ((h ^ (h >> np.uint64(32))) + more) * _FIRST
        out[w] = mix64(h)
    return n_words


@kernel
def collapse(low, n, space_bits, out, o):  # type: ignore[no-untyped-def]
    """Stage 2: runs of whitespace as one blank, none at the ends, to ``out`` u8 from ``o`` on.

    Returns where it stops. ``out`` has room for n + PADDING bytes.
    """
    begin = o
    carry = np.uint64(1)  # whitespace at the start is a repetition of nothing
    for q in range((n + 63) >> 6):
        i = q << 6
        size = min(64, n - i)
        space = space_bits[q]
        repeated = space & ((space << np.uint64(1)) | carry)
        carry = space >> np.uint64(63)
        if not repeated:
            blank_block(low, i, space, out, o)
            o += size
        else:
            for k in range(size):
                out[o] = 32 if (space >> np.uint64(k)) & np.uint64(1) else low[i + k]
                o += 1 - np.int64((repeated >> np.uint64(k)) & np.uint64(1))
    if o > begin and out[o - 1] == 32:
        o -= 1
    return o


@kernel
def characters(content, begin, stop, out):  # type: ignore[no-untyped-def]
    """Code points of content[begin:stop], UTF-8, to ``out`` u64; returns how many.

    ``out`` has room for PADDING more.
    """
    i, o = begin, 0
    while i < stop:
        high = not_ascii(content, i)
        size = min(64, stop - i)
        if high:
            size = min(size, trailing_zeros(high))
        widen_block(content, i, out, o)
        i += size
        o += size
        while i < stop and content[i] >= 0x80:
            point, width = _decode(content, i)
            out[o] = point
            o += 1
            i += width
    return o


@kernel
def word_characters(low, n, word_bits, out):  # type: ignore[no-untyped-def]
    """Code points that are word characters to ``out`` u64, in order; returns how many.

    ``out`` has room for PADDING more.
    """
    o = np.int64(0)
    skip = np.int64(0)  # bytes of a code point that began in the field before
    for q in range((n + 63) >> 6):
        bits = (word_bits[q] >> np.uint64(skip)) << np.uint64(skip)
        base = q << 6
        skip = np.int64(0)
        if not not_ascii(low, base):
            while bits:
                first = trailing_zeros(bits)
                rest = ~(bits >> np.uint64(first))
                size = trailing_zeros(rest) if rest else np.int64(64)
                widen_block(low, base + first, out, o)
                o += size
                bits = bits & ~(_ALL >> np.uint64(64 - size) << np.uint64(first))
            continue
        while bits:
            first = trailing_zeros(bits)
            if low[base + first] < 0x80:
                out[o] = low[base + first]
                width = np.int64(1)
            else:
                out[o], width = _decode(low, base + first)
            o += 1
            stop = first + width
            skip = np.int64(max(stop - 64, 0))
            bits = np.uint64(0) if stop >= 64 else bits >> np.uint64(stop) << np.uint64(stop)
    return o


@kernel
def mix_all(values, n):  # type: ignore[no-untyped-def]
    """``mix64`` of values[:n] u64, in place."""
    for k in range(n):
        values[k] = mix64(values[k])


@kernel
def content_hash(content, begin, stop):  # type: ignore[no-untyped-def]
    """63-bit hash of content[begin:stop] u8, for telling contents of one run apart."""
    h = _SEED ^ (np.uint64(stop - begin) * _SECOND)
    for i in range(begin, stop, 8):
        block = load_u64(content, i) & (_ALL >> np.uint64(64 - 8 * min(stop - i, 8)))
        h = (h ^ block) * _FIRST
        h ^= h >> np.uint64(29)
    return mix64(h) & _KEPT
