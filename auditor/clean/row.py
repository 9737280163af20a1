"""One row of a shard, and which of its fields mean what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from auditor.errors import ShardError
from auditor.measure.substrings import cut
from auditor.schema import ID_COLUMNS, MASK_COLUMN, TEXT_COLUMNS, TOKEN_COLUMNS


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows are read."""

    content: str | None = None
    """Column of the content, a dotted path where it is nested; None: text, input_ids or tokens."""
    on_error: Literal["raise", "skip"] = "raise"
    """What cannot be read ends the reading, or is passed over and found in the findings."""
    columns: tuple[str, ...] = ()
    """Further columns, or dotted paths, whose values the rows carry."""
    wanted: NDArray[np.bool_] | None = None
    """Rows, by number, whose content is asked for: a reader may pass over the others, and give rows
    without content for them. None: all."""
    dtype: str | None = None
    """Of raw token files alone: the type of an id, such as uint16."""
    eot: int | None = None
    """Of raw token files alone: the id that ends a document."""


DEFAULTS: Final = Reading()
"""How rows are read unless told otherwise."""


class Row(NamedTuple):
    """A row as far as cleaning needs it.

    ``content`` is a text, or token ids i64 [n_tokens], or None where the row has none; ``readable``
    is False for a row that could not be parsed and was let through on request. ``columns`` are the
    values of ``Reading.columns``, None where the row has no such column.
    """

    content: str | NDArray[np.int64] | None
    sample_id: str | None
    source: str | None
    readable: bool = True
    columns: tuple[Any, ...] = ()


UNREADABLE = Row(None, None, None, readable=False)

PASSED_OVER: Final = Row(None, None, None)
"""A row that was not asked for."""


Cuts = Mapping[int, Sequence[tuple[int, int]]]
"""Of some rows, by number, the spans (begin, end) to cut out: characters of a text, or tokens."""


class Finding(NamedTuple):
    """What a careful reader is told about a shard.

    ``lost``: a row, or a part, was not read. ``ends``: nor was anything behind it, and how many
    rows that is nobody knows.
    """

    row: int | None
    what: str
    lost: bool
    ends: bool = False


MAX_FINDINGS: Final = 1000
"""Findings kept of one shard; the others are counted."""


class Findings:
    """Collects the findings of one shard into a list, up to ``MAX_FINDINGS``."""

    def __init__(self, into: list[Finding] | None) -> None:
        self.wanted = into is not None
        self._into = into
        self._n = 0
        self._n_lost = 0

    def notice(self, row: int | None, what: str) -> None:
        self._add(Finding(row, what, lost=False))

    def lost(self, row: int | None, what: str) -> None:
        self._add(Finding(row, what, lost=True))

    def ends(self, row: int | None, what: str) -> None:
        """The shard was not read to its end: this is kept however many findings there are."""
        if self._into is not None:
            self._into.append(Finding(row, f"not read to its end: {what}", lost=True, ends=True))

    def close(self) -> None:
        """Say how many there were beyond those kept."""
        if self._into is not None and self._n > MAX_FINDINGS:
            what = f"{self._n - MAX_FINDINGS} further findings, {self._n_lost} of lost rows"
            self._into.append(Finding(None, what, lost=self._n_lost > 0))

    def _add(self, finding: Finding) -> None:
        self._n += 1
        if self._n > MAX_FINDINGS:
            self._n_lost += finding.lost
        elif self._into is not None:
            self._into.append(finding)


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


def row_of(
    fields: Mapping[str, Any], column: str, further: tuple[str, ...], row: int, findings: Findings
) -> Row:
    """A row from its fields by name; a cell that is no content is a finding."""
    value = at(fields, column)
    content = content_of(value)
    if content is None:
        findings.notice(row, no_content(column, value))
    elif findings.wanted and isinstance(content, str) and "\0" in content:
        findings.notice(row, "holds NUL characters")
    sample_id, source = identity_of(fields)
    return Row(
        without_padding(content, fields.get(MASK_COLUMN)),
        sample_id,
        source,
        columns=tuple([at(fields, name) for name in further]) if further else (),
    )


def at(fields: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or at a dotted path; None where there is none."""
    value: Any = fields.get(column)
    if value is None and "." in column:
        value = fields
        for part in column.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    return value


def no_content(column: str, value: Any) -> str:
    """Why a cell is no content."""
    if value is None:
        return f"{column!r} is null or missing"
    if isinstance(value, list):
        return f"{column!r} is a list of other than 64-bit integers"
    return f"{column!r} is {kind_of(value)}, not text"


def kind_of(value: Any) -> str:
    """What a value of JSON is called."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    names |= {dict: "an object", list: "a list", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


def cut_cell(value: Any, mask: Any, spans: Sequence[tuple[int, int]], path: Path, row: int) -> Any:
    """A cell of content without the spans; raises ``ShardError`` for ids under a mask."""
    if mask is not None and not isinstance(value, str):
        raise ShardError(
            f"ids beside a column {MASK_COLUMN!r} cannot be cut",
            path=path,
            row=row,
            remedy="Report the substrings instead, or remove the mask",
        )
    return cut(value, spans) if isinstance(value, str) else cut(np.asarray(value), spans).tolist()


def changed(path: Path, n_then: int, n_now: int) -> ShardError:
    """The refusal of a shard whose number of rows is not what it was."""
    return ShardError(
        f"had {n_then} rows when it was read and has {n_now} now",
        path=path,
        remedy="Start again when nothing writes to the inputs",
    )


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
