"""What a caller gave, made what it has to be, or refused: ``ValueError`` with what was given."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable
from os import PathLike
from typing import Any


def check_path(name: str, value: Any) -> None:
    if not isinstance(value, str | PathLike):
        raise ValueError(f"{name} must be a path, got {reprlib.repr(value)}")


def natural(name: str, value: Any) -> int:
    """An integer from 0, of whatever integer type."""
    number = _integer(value)
    if number is None or number < 0:
        raise ValueError(f"{name} must be an integer from 0, got {reprlib.repr(value)}")
    return number


def names(name: str, values: Any) -> tuple[str, ...]:
    """Names in order; one name by itself would be taken for the list of its letters."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of names, got {reprlib.repr(values)}")
    listed = tuple(values)
    if not all(isinstance(one, str) for one in listed):
        raise ValueError(f"{name} must be a list of names, got {reprlib.repr(values)}")
    return listed


def skipped(values: Any) -> frozenset[int | str]:
    """A skip list: ordinals of batches, from 0, and ids of samples."""
    if values is None:
        return frozenset()
    listed = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(listed, str) or not isinstance(listed, Iterable):
        raise ValueError(f"{_SKIP}, got {reprlib.repr(values)}")
    found: set[int | str] = set()
    for one in listed:
        number = _integer(one)
        if not isinstance(one, str) and (number is None or number < 0):
            raise ValueError(f"{_SKIP}, got {reprlib.repr(one)} in it")
        found.add(one if number is None else number)
    return frozenset(found)


_SKIP = "skip must be a list of ordinals of batches, from 0, and of ids of samples, as text"


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
