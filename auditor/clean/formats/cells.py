"""Columns of Arrow record batches as rows: what Parquet, Arrow files and ``datasets`` share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from auditor.clean.row import (
    Findings,
    Reading,
    Row,
    choose_content,
    identity_of,
    no_content,
    without_padding,
)
from auditor.errors import ShardError
from auditor.schema import ID_COLUMNS, MASK_COLUMN

BATCH_ROWS: Final = 1024


class Columns:
    """Which columns of a schema are read, and how batches of them become rows.

    Raises ``ShardError`` for repeated column names, and a content column that is missing or holds
    neither text nor lists of integers.
    """

    def __init__(self, schema: Any, reading: Reading, path: Path) -> None:
        names = schema.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ShardError(
                f"has more than one column named {', '.join(map(repr, twice))}",
                path=path,
                remedy="Rename or remove the repeated columns",
            )
        self.content = choose_content(names, reading.content, path)
        kind = _type_at(schema, self.content)
        if kind is None:
            raise ShardError(
                f"no column {self.content!r}",
                path=path,
                remedy="Name a column, or a dotted path, that there is with --content",
            )
        _check_type(kind, self.content, path)
        own = (*ID_COLUMNS, "source", "meta", MASK_COLUMN)
        self._own = [name for name in own if name in names]
        self._further = reading.columns
        there = [name for name in reading.columns if _type_at(schema, name) is not None]
        self.wanted: list[str] = list(dict.fromkeys((self.content, *self._own, *there)))
        self._there = set(there)

    def rows(self, batch: Any, first: int, findings: Findings) -> Iterator[Row]:
        """Rows of a record batch that holds ``wanted``; ``first`` is the number of its first."""
        cells = {name: column_at(batch, name).to_pylist() for name in self._own}
        further = [
            column_at(batch, name).to_pylist() if name in self._there else [None] * len(batch)
            for name in self._further
        ]
        column = column_at(batch, self.content)
        for i, value in enumerate(contents(column)):
            if value is None:
                findings.notice(first + i, _reason(self.content, column[i]))
            elif findings.wanted and isinstance(value, str) and "\0" in value:
                findings.notice(first + i, "holds NUL characters, as UTF-16 read as UTF-8 does")
            own = {name: values[i] for name, values in cells.items()}
            sample_id, source = identity_of(own)
            yield Row(
                without_padding(value, own.get(MASK_COLUMN)),
                sample_id,
                source,
                columns=tuple([values[i] for values in further]),
            )


def column_at(batch: Any, name: str) -> Any:
    """A column of a record batch, or the field of a struct at a dotted path."""
    if name in batch.schema.names:
        return batch.column(name)
    top, *path = name.split(".")
    return pc.struct_field(batch.column(top), path)


def contents(column: Any) -> Iterator[str | NDArray[np.int64] | None]:
    """The cells of an Arrow array as contents; None for nulls and bytes that are not UTF-8."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_list(column.type):
        lengths = pc.list_value_length(column)
        values = pc.list_flatten(column)
        whole = values.null_count == 0
        ids = values.to_numpy(zero_copy_only=False) if whole else None
        start = 0
        for length in lengths.to_pylist():
            if length is None:
                yield None
                continue
            stop = start + length
            if ids is not None:
                yield ids[start:stop].astype(np.int64)
            else:
                part = values.slice(start, length)
                numbers = None if part.null_count else part.to_numpy(zero_copy_only=False)
                yield None if numbers is None else numbers.astype(np.int64)
            start = stop
        return
    for value in column.to_pylist():
        if isinstance(value, bytes):
            try:
                yield value.decode("utf-8")
            except UnicodeDecodeError:
                yield None
        else:
            yield value


def kept(batch: Any, keep: Sequence[bool] | NDArray[np.bool_]) -> Any:
    """The kept rows (bool [n_rows]) of a record batch or table."""
    return batch.filter(pa.array(np.asarray(keep, np.bool_)))


def _reason(name: str, cell: Any) -> str:
    value = cell.as_py()
    return f"{name!r} is not UTF-8" if isinstance(value, bytes) else no_content(name, value)


def _type_at(schema: Any, name: str) -> Any:
    """The Arrow type of a column or of a field at a dotted path, None where there is none."""
    if name in schema.names:
        return schema.field(name).type
    kind = schema
    for part in name.split("."):
        if kind is not schema and not pa.types.is_struct(kind):
            return None
        index = kind.get_all_field_indices(part)
        if len(index) != 1:
            return None
        kind = kind.field(index[0]).type
    return kind


def _value_type(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _check_type(kind: Any, column: str, path: Path) -> None:
    value = _value_type(kind)
    text = (
        pa.types.is_string(value)
        or pa.types.is_large_string(value)
        or pa.types.is_string_view(value)
        or pa.types.is_binary(value)
        or pa.types.is_large_binary(value)
        or pa.types.is_binary_view(value)
        or pa.types.is_null(value)
    )
    tokens = _is_list(value) and pa.types.is_integer(value.value_type)
    if not text and not tokens:
        raise ShardError(
            f"column {column!r} holds {kind}, neither text nor lists of integers",
            path=path,
            remedy="Name the column that holds the content with --content",
        )
