"""Spans of a corpus that occur, word for word, earlier in it.

Content is a row of *elements*: of a text its words, in lower case and without punctuation; in
scripts written without spaces every character is one; of token ids the ids. A *window* is a run of
``n_elements`` elements inside one row. A window is a duplicate if an equal one begins earlier in
the corpus (in an earlier row, or in the same row and before it without overlap), and its **first
occurrence** is the earliest of these. What is covered by duplicate windows is duplicate.

Windows are found by their minimum (minimisers: Roberts et al. 2004; winnowing: Schleimer et al.
2003). Each window is given the least hash of the shorter runs in it, its *seed*. Equal windows have
equal seeds, so a window whose seed occurs nowhere else has no duplicate, and only the others are
compared at all. Neighbouring windows mostly share a seed and are one record together: a record for
some 13 elements at 50, and none is missed.

The kernels release the GIL, are compiled on first use and cached on disk. Positions are counted
over all rows of the corpus, one after another.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, Final, overload

import numpy as np
from numba import njit
from numpy.typing import NDArray

from auditor.measure.sketch import mix64

MAX_ELEMENTS: Final = 10_000
"""Longest window."""

MAX_POSITION: Final = 1 << 47
"""Elements of the largest corpus: a record holds a position and a count in 63 bits."""

SEPARATOR, WORD_PART, ALONE = 0, 1, 2

# Scripts written without spaces, as ``sketch.choose_shingle`` knows them.
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

_COUNT_BITS = 16
_MOST_WINDOWS = (1 << _COUNT_BITS) - 1
_BASE = np.uint64(0x9E3779B97F4A7C15)  # of the rolling polynomial; odd
_SEED = np.uint64(0xCBF29CE484222325)  # of a word
_MULTIPLIER = np.uint64(0x9FB21C651E98DF25)


@functools.cache
def parts_table() -> NDArray[np.uint8]:
    """What every code point is to a text, u8 [0x110000].

    ``SEPARATOR``; ``WORD_PART``, which makes one element with its neighbours; or ``ALONE``, an
    element by itself.
    """
    table = np.full(0x110000, SEPARATOR, np.uint8)
    for match in re.finditer(r"\w+", "".join(map(chr, range(0x110000)))):
        table[match.start() : match.end()] = WORD_PART
    for low, high in _UNSPACED_RANGES:
        scripts = table[low : high + 1]
        scripts[scripts == WORD_PART] = ALONE
    return table


def _lowered(text: str) -> NDArray[np.uint32]:
    # "surrogatepass": JSON may hold lone surrogates, and hashing must not fail on them.
    return np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), "<u4")


def elements_text(text: str) -> NDArray[np.uint64]:
    """64-bit hashes of a text's elements in order, u64 [n_elements]."""
    points = _lowered(text)
    out = np.empty(len(points), np.uint64)
    none = np.empty(0, np.int64)
    return out[: _elements(points, parts_table(), out, none, none)].copy()


def elements_tokens(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """The same of 1-D integer token ids: a hash for each that no other id has."""
    flat = np.ascontiguousarray(ids, np.int64)
    if flat.ndim != 1:
        raise ValueError(f"token ids of one sample must be 1-D, got shape {flat.shape}")
    return np.asarray(_mixed(flat.view(np.uint64)))


def located_text(text: str) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """``elements_text``, and where each element begins and ends in the text as it is.

    u64, i64 and i64 [n_elements], the places in characters.
    """
    points = _lowered(text)
    out = np.empty(len(points), np.uint64)
    begins, ends = np.empty(len(points), np.int64), np.empty(len(points), np.int64)
    n = _elements(points, parts_table(), out, begins, ends)
    begins, ends = begins[:n], ends[:n]
    if len(text.lower()) != len(text):
        # A letter may become two in lower case; positions are those in the text as it is.
        origin = np.repeat(np.arange(len(text)), [len(letter.lower()) for letter in text])
        begins, ends = origin[begins], origin[ends - 1] + 1
    return out[:n], begins, ends


def seeds(
    values: NDArray[np.uint64], offsets: NDArray[np.int64], n_elements: int, position: int
) -> NDArray[np.int64]:
    """Records of the windows of packed rows, i64 [n_records, 2].

    Args:
        values: elements of the rows, u64 [total]; row i is ``offsets[i]`` to ``offsets[i + 1]``.
        n_elements: elements of a window.
        position: of the first element in the corpus.

    Returns a record for each run of neighbouring windows that share a seed: the seed, and where the
    run begins together with how many windows it has. ``duplicate_windows`` reads them.
    """
    if not 1 <= n_elements <= MAX_ELEMENTS:
        raise ValueError(f"n_elements must be within 1..{MAX_ELEMENTS}, got {n_elements!r}")
    if position + len(values) > MAX_POSITION:
        raise ValueError(f"a corpus may have {MAX_POSITION} elements, got more")
    n_windows = int(np.maximum(np.diff(offsets) - n_elements + 1, 0).sum())
    out = np.empty((n_windows, 2), np.int64)
    return out[: _seeds(values, offsets, n_elements, _seed_length(n_elements), position, out)]


def windows_of(records: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many windows each record has, i64 [n_records]."""
    return records[:, 1] & _MOST_WINDOWS


class FirstOccurrences:
    """The first occurrence of every window whose seed occurs more than once.

    Give it the records of a set of seeds, all records of each seed, by position. Holds 32 to 64
    bytes for each distinct window that it saw, and half as much again while it grows.
    """

    def __init__(self, values: NDArray[np.uint64], n_elements: int) -> None:
        self._values = values
        self._n_elements = n_elements
        self._keys = np.zeros(1 << 10, np.uint64)
        self._firsts = np.full(1 << 10, -1, np.int64)
        self._used = 0

    def duplicates(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """Runs of duplicate windows, i64 [n_runs, 3]: position, first occurrence, windows.

        Equality is that of 64-bit hashes; ``cover`` compares the elements.
        """
        n_windows = int(windows_of(records).sum())
        out = np.empty((n_windows, 3), np.int64)
        self._keys, self._firsts, self._used, n = _duplicates(
            self._values, records[:, 1].copy(), self._n_elements, self._keys, self._firsts,
            self._used, out,
        )  # fmt: skip
        return out[:n].copy()


def repeated(records: NDArray[np.int64], n_elements: int) -> NDArray[np.bool_]:
    """Which records may hold duplicates, bool [n_records]; all records of their seeds are given."""
    ordered = np.sort(records[:, 0])
    several = ordered[1:][ordered[1:] == ordered[:-1]]
    # A row that goes on repeating itself has one seed over many windows.
    found = windows_of(records) > n_elements
    if len(several):
        places = np.minimum(np.searchsorted(several, records[:, 0]), len(several) - 1)
        found |= several[places] == records[:, 0]
    return np.asarray(found)


def cover(
    values: NDArray[np.uint64],
    starts: NDArray[np.int64],
    runs: NDArray[np.int64],
    n_elements: int,
    covered: int,
) -> tuple[NDArray[np.int64], int]:
    """Spans that cover the duplicate windows, each equal to what it copies, element by element.

    Args:
        values: elements of the corpus, u64 [total].
        starts: i64 [n_rows + 1], where rows start in ``values``.
        runs: runs of duplicate windows by position, none left out between the first and the last.
        n_elements: elements of a window.
        covered: what the call before returned, 0 at first.

    Returns i64 [n_spans, 3] position, first occurrence and elements of each span, by position, and
    where the last of them ends. A span begins with the first duplicate window that is not covered
    yet, at that window's first occurrence, and goes on as long as the two are equal and do not
    overlap. So spans may overlap by less than a window, where the text changes from what was copied
    from one place to what was copied from another.
    """
    out, n, covered = _cover(values, starts, runs, n_elements, covered)
    return out[:n].copy(), int(covered)


@overload
def cut(content: str, spans: Iterable[tuple[int, int]]) -> str: ...
@overload
def cut(content: NDArray[Any], spans: Iterable[tuple[int, int]]) -> NDArray[Any]: ...
def cut(content: str | NDArray[Any], spans: Iterable[tuple[int, int]]) -> str | NDArray[Any]:
    """What is left of a text, or of 1-D token ids, without the spans (begin, end).

    Spans come in any order and may overlap. What is left is as it was, character by character, but
    for this: where two words would become one, because only characters of a script without spaces
    were between them, a space is put. Raises ``ValueError`` for a span outside of the content.
    """
    pieces: list[Any] = []
    at = 0
    for begin, end in sorted(spans):
        if not 0 <= begin <= end <= len(content):
            raise ValueError(f"span {(begin, end)} is not within content of length {len(content)}")
        if begin > at:
            pieces.append(content[at:begin])
        at = max(at, end)
    pieces.append(content[at:])
    if not isinstance(content, str):
        return np.concatenate(pieces)
    parts = parts_table()
    left: list[str] = []
    for piece in filter(None, pieces):
        if left and parts[ord(left[-1][-1])] == parts[ord(piece[0])] == WORD_PART:
            left.append(" ")
        left.append(piece)
    return "".join(left)


def _seed_length(n_elements: int) -> int:
    # Longer seeds are rarer outside of duplicates, shorter ones make fewer records.
    return (n_elements + 1) // 2


# Kernels. Every constant in unsigned arithmetic is typed: numba makes uint64 + int64 a float.


@njit(nogil=True, cache=True)
def _mixed(values):  # type: ignore[no-untyped-def]
    out = np.empty_like(values)
    for i in range(len(values)):
        out[i] = mix64(values[i])
    return out


@njit(nogil=True, cache=True)
def _elements(points, parts, out, begins, ends):  # type: ignore[no-untyped-def]
    """Hashes of the elements, and their borders where there is room for them."""
    located = len(begins) > 0
    n = 0
    h = _SEED
    begin = 0
    inside = False
    for i in range(len(points) + 1):
        part = parts[points[i]] if i < len(points) else SEPARATOR
        if inside and part != WORD_PART:
            out[n] = mix64(h)
            if located:
                begins[n] = begin
                ends[n] = i
            n += 1
            inside = False
        if part == WORD_PART:
            if not inside:
                begin = i
                h = _SEED
            h = (h ^ np.uint64(points[i])) * _MULTIPLIER
            inside = True
        elif part == ALONE:
            out[n] = mix64((_SEED ^ np.uint64(points[i])) * _MULTIPLIER)
            if located:
                begins[n] = i
                ends[n] = i + 1
            n += 1
    return n


@njit(nogil=True, cache=True)
def _power(n):  # type: ignore[no-untyped-def]
    power = np.uint64(1)
    for _ in range(n):
        power *= _BASE
    return power


@njit(nogil=True, cache=True)
def _seeds(values, offsets, n_elements, length, position, out):  # type: ignore[no-untyped-def]
    n = 0
    power = _power(length)
    room = n_elements - length + 1  # runs of `length` in a window
    # Candidates for the minimum: a queue of ascending hashes in a ring, oldest first.
    hashes = np.empty(room, np.uint64)
    places = np.empty(room, np.int64)
    for row in range(len(offsets) - 1):
        start, stop = offsets[row], offsets[row + 1]
        if stop - start < n_elements:
            continue
        h = np.uint64(0)
        head = size = 0
        count = 0  # windows of the record being made, and its seed and beginning
        seed = np.uint64(0)
        begin = np.int64(0)
        for i in range(start, stop):
            h = h * _BASE + values[i]
            if i - start >= length:
                h -= values[i - length] * power
            if i - start < length - 1:
                continue
            hashed = mix64(h)
            place = i - length + 1
            while size > 0 and hashes[(head + size - 1) % room] >= hashed:
                size -= 1
            if size > 0 and places[head] <= place - room:
                head = (head + 1) % room
                size -= 1
            last = (head + size) % room
            hashes[last] = hashed
            places[last] = place
            size += 1
            window = i - n_elements + 1
            if window < start:
                continue
            if count > 0 and (hashes[head] != seed or count == _MOST_WINDOWS):
                out[n, 0] = np.int64(seed)
                out[n, 1] = ((position + begin) << _COUNT_BITS) | count
                n += 1
                count = 0
            if count == 0:
                seed = hashes[head]
                begin = window
            count += 1
        out[n, 0] = np.int64(seed)
        out[n, 1] = ((position + begin) << _COUNT_BITS) | count
        n += 1
    return n


@njit(nogil=True, cache=True)
def _grown(keys, firsts):  # type: ignore[no-untyped-def]
    wider = np.zeros(2 * len(keys), np.uint64)
    places = np.full(2 * len(keys), -1, np.int64)
    mask = np.uint64(len(wider) - 1)
    for i in range(len(keys)):
        if firsts[i] >= 0:
            slot = keys[i] & mask
            while places[slot] >= 0:
                slot = (slot + np.uint64(1)) & mask
            wider[slot] = keys[i]
            places[slot] = firsts[i]
    return wider, places


@njit(nogil=True, cache=True)
def _duplicates(values, places, n_elements, keys, firsts, used, out):  # type: ignore[no-untyped-def]
    n = 0
    power = _power(n_elements)
    for record in range(len(places)):
        begin = places[record] >> _COUNT_BITS
        count = places[record] & _MOST_WINDOWS
        h = np.uint64(0)
        for i in range(begin, begin + n_elements - 1):
            h = h * _BASE + values[i]
        follows = False  # the window before was a duplicate, and is the end of out[n - 1]
        for at in range(begin, begin + count):
            h = h * _BASE + values[at + n_elements - 1]
            if at > begin:
                h -= values[at - 1] * power
            key = mix64(h)
            if 2 * used >= len(keys):
                keys, firsts = _grown(keys, firsts)
            mask = np.uint64(len(keys) - 1)
            slot = key & mask
            while firsts[slot] >= 0 and keys[slot] != key:
                slot = (slot + np.uint64(1)) & mask
            first = firsts[slot]
            if first < 0:
                keys[slot] = key
                firsts[slot] = at
                used += 1
            # Windows of two rows never overlap, so this is about windows of one row.
            duplicate = first >= 0 and at - first >= n_elements
            if duplicate and follows and out[n - 1, 1] + out[n - 1, 2] == first:
                out[n - 1, 2] += 1
            elif duplicate:
                out[n, 0] = at
                out[n, 1] = first
                out[n, 2] = 1
                n += 1
            follows = duplicate
    return keys, firsts, used, n


@njit(nogil=True, cache=True)
def _cover(values, starts, runs, n_elements, covered):  # type: ignore[no-untyped-def]
    out = np.empty((len(runs) + 1, 3), np.int64)
    n = 0
    for run in range(len(runs)):
        position, first, count = runs[run, 0], runs[run, 1], runs[run, 2]
        stop = starts[np.searchsorted(starts, position, side="right")]
        stop_first = starts[np.searchsorted(starts, first, side="right")]
        apart = position - first
        at = max(position, covered - n_elements + 1)
        while at < position + count:
            source = at - apart
            most = min(stop - at, stop_first - source, apart)
            length = 0
            while length < most and values[at + length] == values[source + length]:
                length += 1
            if length < n_elements:
                at += 1  # two windows of one hash that are not equal
                continue
            if n == len(out):
                wider = np.empty((2 * n, 3), np.int64)
                wider[:n] = out
                out = wider
            out[n, 0] = at
            out[n, 1] = source
            out[n, 2] = length
            n += 1
            covered = at + length
            at = covered - n_elements + 1
    return out, n, covered
