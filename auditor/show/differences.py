"""Where two contents begin to differ, in a few dozen words of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

import numpy as np
from numpy.typing import NDArray

from auditor.measure.sketch import choose_shingle
from auditor.show.text import clean

WINDOW: Final = 48
"""Words, characters of scripts without spaces, or token ids that are shown of each content."""

CONTEXT: Final = 10
"""How many of these stand before the first difference."""

_UNIT_CHARS: Final = 40
"""Longest word shown."""

Content = str | NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """A stretch of one content, safe to show; ``differs``: the other one has something else."""

    text: str
    differs: bool


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Excerpts of two contents, which begin at unit ``begin``; ``unit``: word, character or token.

    ``first`` is the unit that differs first, None where both are the same but for whitespace.
    ``joint`` is what stands between pieces.
    """

    unit: str
    joint: str
    begin: int
    first: int | None
    left: tuple[Piece, ...]
    right: tuple[Piece, ...]


def differences(left: Content, right: Content) -> Differences:
    """The neighbourhood of the first difference of two texts, or of two samples of token ids.

    What is compared is as written: case and whitespace between characters count, though cleaning
    does not look at them. Bounded: however long the contents, at most ``WINDOW`` units are matched.
    """
    by_character = _is_by_character(left) and _is_by_character(right)
    a, b = _units(left, by_character), _units(right, by_character)
    first = _first_difference(a, b)
    begin = 0 if first is None else max(0, first - CONTEXT)
    shown = a[begin : begin + WINDOW], b[begin : begin + WINDOW]
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    matcher = SequenceMatcher(None, *shown, autojunk=False)
    joint = "" if by_character else " "
    for kind, i, j, k, m in matcher.get_opcodes():
        for side, (low, high) in enumerate(((i, j), (k, m))):
            if low < high:
                text = joint.join(map(_shown, shown[side][low:high]))
                pieces[side].append(Piece(text, kind != "equal"))
    for side, units in enumerate((a, b)):
        if begin:
            pieces[side].insert(0, Piece("…", False))
        if begin + WINDOW < len(units):
            pieces[side].append(Piece("…", False))
    return Differences(
        unit="token" if not isinstance(left, str) else "character" if by_character else "word",
        joint=joint,
        begin=begin,
        first=first,
        left=tuple(pieces[0]),
        right=tuple(pieces[1]),
    )


def excerpt(content: Content) -> str:
    """The beginning of a content, safe to show."""
    by_character = _is_by_character(content)
    units = _units(content, by_character)
    text = ("" if by_character else " ").join(map(_shown, units[:WINDOW]))
    return text + " …" if len(units) > WINDOW else text


def _is_by_character(content: Content) -> bool:
    return isinstance(content, str) and choose_shingle(content) == "char5"


def _units(content: Content, by_character: bool) -> Sequence[str]:
    if not isinstance(content, str):
        return list(map(str, content.tolist()))
    words = content.split()
    return " ".join(words) if by_character else words


def _first_difference(a: Sequence[str], b: Sequence[str]) -> int | None:
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _shown(unit: str) -> str:
    if unit == " ":
        return " "
    # What cannot be shown is there all the same.
    return clean(unit, _UNIT_CHARS) or "\N{REPLACEMENT CHARACTER}"
