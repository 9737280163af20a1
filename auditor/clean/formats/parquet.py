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

from auditor.clean.formats.cells import BATCH_ROWS, Columns, kept
from auditor.clean.row import UNREADABLE, Cuts, Findings, Reading, Row, changed, cut_cell
from auditor.errors import ShardError
from auditor.files import atomic
from auditor.schema import MASK_COLUMN

_FAULTS = (pa.ArrowException, OSError)


def files(path: Path) -> tuple[Path, ...]:
    return (path,)


def rows(path: Path, reading: Reading, findings: Findings) -> Iterator[Row]:
    """Rows in file order; cells that hold no content (null, undecodable) give ``content=None``.

    A row group that cannot be read is, when skipping, as many unreadable rows as its footer says:
    in any of its columns, for all are copied.
    """
    with _opened(path) as file:
        if not file.metadata.num_rows:
            return
        columns = Columns(file.schema_arrow, reading, path)
        wanted = None if reading.on_error == "skip" else columns.wanted
        start = 0
        for group in range(file.metadata.num_row_groups):
            n_rows = file.metadata.row_group(group).num_rows
            n_read = 0
            try:
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=wanted):
                    yield from columns.rows(batch, start + n_read, findings)
                    n_read += len(batch)
            except _FAULTS as error:
                if reading.on_error == "raise":
                    raise _unreadable(path, error) from error
                what = f"rows to {start + n_rows - 1} cannot be read: {_first_line(error)}"
                findings.lost(start + n_read, what)
                yield from [UNREADABLE] * (n_rows - n_read)
            start += n_rows


def copy(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading) -> None:
    """Write the kept rows with the input's schema, metadata, row groups and compression.

    Holds one row group in memory. Raises ``ShardError`` if the number of rows has changed.
    """
    copy_cut(path, out, keep, reading, {})


def copy_cut(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading, cuts: Cuts) -> None:
    """``copy`` with spans cut out of some rows."""
    skip = reading.on_error == "skip"
    try:
        with _opened(path) as file:
            n_rows = file.metadata.num_rows
            if n_rows != len(keep) and (len(keep) or not skip):
                raise changed(path, len(keep), n_rows)
            with (
                atomic(out) as sink,
                pq.ParquetWriter(sink, file.schema_arrow, compression=_compression(file)) as writer,
            ):
                start = 0
                for group in range(file.metadata.num_row_groups) if len(keep) else ():
                    stop = start + file.metadata.row_group(group).num_rows
                    if keep[start:stop].any():
                        read = _row_group(file, group, keep[start:stop], path)
                        read = _cut(read, reading, cuts, start, path)
                        table = kept(read, keep[start : start + read.num_rows])
                        writer.write_table(table, row_group_size=max(table.num_rows, 1))
                    start = stop
    except ShardError:
        if len(keep) or not skip:
            raise
        # Not readable at all: there is no schema to keep either.
        with atomic(out) as sink:
            pq.write_table(pa.table({}), sink)


def count(path: Path, reading: Reading) -> int:
    """Rows of a shard, from its footer."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


def lost(path: Path, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Kept rows that cannot be copied, bool [n_rows]: from a fault on to the end of a row group."""
    cannot = np.zeros(len(keep), np.bool_)
    with _opened(path) as file:
        start = 0
        for group in range(file.metadata.num_row_groups):
            stop = start + file.metadata.row_group(group).num_rows
            if keep[start:stop].any():
                n_read = 0
                try:
                    for batch in file.iter_batches(BATCH_ROWS, row_groups=[group]):
                        n_read += len(batch)
                except _FAULTS:
                    cannot[start + n_read : stop] = keep[start + n_read : stop]
            start = stop
    return cannot


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        # Check sums of pages are checked where there are some.
        opened = pq.ParquetFile(path, page_checksum_verification=True)
    except _FAULTS as error:
        raise _unreadable(path, error) from error
    # What fails while it is open may be the disk that is written to.
    with opened as file:
        yield file


def _unreadable(path: Path, error: Exception) -> ShardError:
    return ShardError(
        f"cannot be read as Parquet: {_first_line(error)}",
        path=path,
        remedy="Fetch or write the file again",
    )


def _row_group(file: Any, group: int, keep: NDArray[np.bool_], path: Path) -> Any:
    """A row group as a table; of one that is damaged, the rows to the last that is kept."""
    try:
        return file.read_row_group(group)
    except _FAULTS:
        pass
    last = int(np.flatnonzero(keep)[-1])
    batches: list[Any] = []
    n_rows = 0
    try:
        for batch in file.iter_batches(BATCH_ROWS, row_groups=[group]):
            batches.append(batch)
            n_rows += len(batch)
            if n_rows > last:
                break
    except _FAULTS as error:
        raise _unreadable(path, error) from error
    return pa.Table.from_batches(batches)


def _cut(table: Any, reading: Reading, cuts: Cuts, start: int, path: Path) -> Any:
    """A row group, whose first row is ``start``, without some spans of its content."""
    here = [row for row in cuts if start <= row < start + table.num_rows]
    if not here:
        return table
    name = Columns(table.schema, reading, path).content
    if name not in table.schema.names:
        raise ShardError(
            f"the nested column {name!r} is not changed",
            path=path,
            remedy="Report substrings instead of cutting them",
        )
    place = table.schema.get_field_index(name)
    column = table.column(place)
    cells = column.to_pylist()
    mask = table.column(MASK_COLUMN) if MASK_COLUMN in table.schema.names else None
    for row in here:
        value = cells[row - start]
        value = value.decode() if isinstance(value, bytes) else value
        cells[row - start] = cut_cell(value, mask, cuts[row], path, row)
    kind = column.type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    fresh = pa.array(cells, plain)
    if plain != kind:
        fresh = fresh.dictionary_encode().cast(kind)
    return table.set_column(place, table.schema.field(place), fresh)


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


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
