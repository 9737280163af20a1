"""One row of a shard, and which of its fields mean what."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from auditor.errors import ShardError
from auditor.schema import ID_COLUMNS, TEXT_COLUMNS, TOKEN_COLUMNS


class Row(NamedTuple):
    """A row as far as cleaning needs it.

    ``content`` is a text, or token ids i64 [n_tokens], or None where the row has none; ``readable``
    is False for a row that could not be parsed and was let through on request.
    """

    content: str | NDArray[np.int64] | None
    sample_id: str | None
    source: str | None
    readable: bool = True


UNREADABLE = Row(None, None, None, readable=False)


def choose_content(columns: Collection[str], wanted: str | None, path: Path) -> str:
    """The column that holds the content; raises ``ShardError`` naming the columns there are."""
    if wanted is not None:
        if wanted in columns or wanted.split(".")[0] in columns:
            return wanted
        raise ShardError(
            f"no column {wanted!r}; columns found: {_listed(columns)}",
            path=path,
            remedy="Name one of them with --content",
        )
    for name in (*TEXT_COLUMNS, *TOKEN_COLUMNS):
        if name in columns:
            return name
    raise ShardError(
        f"no column named {', '.join((*TEXT_COLUMNS, *TOKEN_COLUMNS))}; "
        f"columns found: {_listed(columns)}",
        path=path,
        remedy="Name the column that holds the content with --content",
    )


def content_of(value: Any) -> str | NDArray[np.int64] | None:
    """A cell as content: text, token ids where it is a list of integers, else None."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        try:
            return np.array(value, np.int64)
        except OverflowError:
            return None
    return None


def without_padding(
    content: str | NDArray[np.int64] | None, mask: Any
) -> str | NDArray[np.int64] | None:
    """Token ids under the ones of an attention mask of their length; padding is no content.

    Without such a mask (none there, of another length, not of 0 and 1) all ids are content: padding
    is then not told from tokens, and much of it makes a row one that repeats itself.
    """
    if not isinstance(content, np.ndarray) or not isinstance(mask, list):
        return content
    if len(mask) != len(content) or not all(one in (0, 1) for one in mask):
        return content
    return content[np.asarray(mask, np.bool_)]


def identity_of(fields: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Sample id and source that a row carries itself, None where it carries none."""
    sample_id = next(
        (
            _printable(str(fields[name]))
            for name in ID_COLUMNS
            if isinstance(fields.get(name), str | int | float)
        ),
        None,
    )
    source = fields.get("source")
    if not isinstance(source, str):
        meta = fields.get("meta")
        source = meta.get("source") if isinstance(meta, dict) else None
    return sample_id, _printable(source) if isinstance(source, str) else None


def _printable(name: str) -> str:
    # JSON may hold lone surrogates, which no UTF-8 file can.
    return name.encode("utf-8", "backslashreplace").decode()


def _listed(columns: Collection[str]) -> str:
    names = [repr(name) for name in columns]
    shown = ", ".join(names[:20])
    return (shown + (", ..." if len(names) > 20 else "")) or "none"
