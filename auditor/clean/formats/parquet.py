"""Parquet shards: read a batch of rows at a time, copied one row group at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from auditor.clean.row import Findings, Reading, Row, choose_content, identity_of, without_padding
from auditor.errors import ShardError
from auditor.files import atomic
from auditor.schema import ID_COLUMNS, MASK_COLUMN

_BATCH_ROWS = 1024


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ShardError(
            f"cannot be read as Parquet: {str(error).splitlines()[0].rstrip('.')}",
            path=path,
            remedy="Fetch or write the file again",
        ) from error


def rows(path: Path, reading: Reading, findings: Findings) -> Iterator[Row]:
    """Rows in file order; cells that hold no content (null, undecodable) give ``content=None``."""
    with _opened(path) as file:
        names = file.schema_arrow.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ShardError(
                f"has more than one column named {', '.join(map(repr, twice))}",
                path=path,
                remedy="Rename or remove the repeated columns",
            )
        column = choose_content(names, reading.content, path)
        if column not in names:
            raise ShardError(
                f"no column {column!r}; nested columns are read from JSON Lines only",
                path=path,
                remedy="Name a column at the top level with --content",
            )
        _check_type(file.schema_arrow.field(column).type, column, path)
        wanted = dict.fromkeys((*ID_COLUMNS, "source", "meta", MASK_COLUMN, *reading.columns))
        others = [name for name in wanted if name in names and name != column]
        for batch in file.iter_batches(_BATCH_ROWS, columns=[column, *others]):
            fields = [batch.column(name).to_pylist() for name in others]
            for i, value in enumerate(_contents(batch.column(column))):
                own = {n: c[i] for n, c in zip(others, fields, strict=True)}
                yield Row(
                    without_padding(value, own.get(MASK_COLUMN)),
                    *identity_of(own),
                    columns=tuple([own.get(name) for name in reading.columns]),
                )


def copy(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading) -> None:
    """Write the kept rows with the input's schema, metadata, row groups and compression.

    Holds one row group in memory. Raises ``ShardError`` if the number of rows has changed.
    """
    with _opened(path) as file:
        if file.metadata.num_rows != len(keep):
            raise ShardError(
                f"had {len(keep)} rows when it was read and has {file.metadata.num_rows} now",
                path=path,
                remedy="Start again when nothing writes to the inputs",
            )
        with (
            atomic(out) as sink,
            pq.ParquetWriter(sink, file.schema_arrow, compression=_compression(file)) as writer,
        ):
            start = 0
            for group in range(file.metadata.num_row_groups):
                table = file.read_row_group(group)
                mask = keep[start : start + table.num_rows]
                start += table.num_rows
                if mask.any():
                    kept = table.filter(pa.array(mask))
                    writer.write_table(kept, row_group_size=max(kept.num_rows, 1))


def count(path: Path, reading: Reading) -> int:
    """Rows of a shard, from its footer."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


def _compression(file: Any) -> str | dict[str, str]:
    if file.metadata.num_row_groups == 0:
        return "snappy"
    group = file.metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    # The footer says UNCOMPRESSED where the writer wants NONE.
    return {
        c.path_in_schema: "NONE" if c.compression == "UNCOMPRESSED" else c.compression
        for c in columns
    }


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
        or pa.types.is_null(value)
    )
    tokens = _is_list(value) and pa.types.is_integer(value.value_type)
    if not text and not tokens:
        raise ShardError(
            f"column {column!r} holds {kind}, neither text nor lists of integers",
            path=path,
            remedy="Name the column that holds the content with --content",
        )


def _contents(column: Any) -> Iterator[str | NDArray[np.int64] | None]:
    if _is_list(column.type):
        for cell in column:
            values = cell.values
            whole = values is not None and values.null_count == 0
            yield values.to_numpy(zero_copy_only=False).astype(np.int64) if whole else None
        return
    for value in column.to_pylist():
        if isinstance(value, bytes):
            try:
                yield value.decode("utf-8")
            except UnicodeDecodeError:
                yield None
        else:
            yield value
