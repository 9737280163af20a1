"""What a caller gave, made what it has to be, or refused: ``ValueError`` with what was given."""

from __future__ import annotations

import json
import operator
import reprlib
from collections.abc import Iterable
from os import PathLike, fspath
from pathlib import Path
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
    """A skip list: ordinals of batches, from 0, and ids of samples; or the file that holds it."""
    if values is None:
        return frozenset()
    if isinstance(values, str | PathLike):
        values = _read_skip_list(fspath(values))
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


def _read_skip_list(path: str) -> Any:
    """What is listed in a file that ``auditor propose --skip-list`` wrote, or in any JSON list."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"{_SKIP}, or the path of a file with it, got {path!r} ({reason})"
        ) from None
    except ValueError as error:
        raise ValueError(f"skip: {path} is not JSON: {error}") from None
    listed = document.get("batches") if isinstance(document, dict) else document
    if not isinstance(listed, list):
        raise ValueError(f"skip: {path} holds neither a list nor an object with a list of batches")
    return listed


_SKIP = "skip must be a list of ordinals of batches, from 0, and of ids of samples, as text"


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
