"""Arrow IPC shards (.arrow, Feather V2): files and streams, read a record batch at a time."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from auditor.clean.formats.cells import BATCH_ROWS, Columns, kept
from auditor.clean.row import Findings, Reading, Row, changed
from auditor.errors import ShardError
from auditor.files import atomic

_FILE_MAGIC: Final = b"ARROW1"
_STREAM_END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def files(path: Path) -> tuple[Path, ...]:
    return (path,)


def rows(path: Path, reading: Reading, findings: Findings, first: int = 0) -> Iterator[Row]:
    """Rows in file order, numbered from ``first``; raises ``ShardError`` where it is damaged."""
    start = first
    columns: Columns | None = None
    for batch in batches(path, findings, first):
        if columns is None and len(batch):
            columns = Columns(batch.schema, reading, path)
        for offset in range(0, len(batch), BATCH_ROWS):
            part = batch.slice(offset, BATCH_ROWS)
            assert columns is not None
            yield from columns.rows(part, start, findings)
            start += len(part)


def copy(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading) -> None:
    """Write the kept rows as the input is: file or stream, schema, metadata, compression."""
    skip = reading.on_error == "skip"
    with atomic(out) as sink:
        try:
            schema, is_stream = _schema(path)
        except ShardError:
            if len(keep) or not skip:
                raise
            schema, is_stream = pa.schema([]), False
        new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
        options = pa.ipc.IpcWriteOptions(compression=_compression(path), unify_dictionaries=True)
        if is_stream:
            options.unify_dictionaries = False
        with new(sink, schema, options=options) as writer:
            if skip and not len(keep):
                return
            n_rows = 0
            try:
                for batch in batches(path, Findings(None)):
                    part = keep[n_rows : n_rows + len(batch)]
                    n_rows += len(batch)
                    if part.any() and len(part) == len(batch):
                        writer.write_batch(kept(batch, part))
            except ShardError:
                if not skip:
                    raise
            if n_rows != len(keep):
                raise changed(path, len(keep), n_rows)


def count(path: Path, reading: Reading) -> int:
    """Rows of a shard."""
    return sum(len(batch) for batch in batches(path, Findings(None)))


def batches(path: Path, findings: Findings, first: int = 0) -> Iterator[Any]:
    """Record batches in order; raises ``ShardError`` for what cannot be read."""
    n_rows = first
    with _opened(path, lambda: n_rows) as (reader, is_stream):
        for batch in reader if is_stream else map(reader.get_batch, _indices(reader)):
            yield batch
            n_rows += len(batch)
    if is_stream and not _ends(path):
        findings.notice(None, "has no mark of its end: it may be cut off")


@contextmanager
def _opened(path: Path, row: Any) -> Iterator[tuple[Any, bool]]:
    try:
        with pa.memory_map(str(path)) as source:
            magic = source.read(8)
            if magic[:4] == b"FEA1":
                raise ShardError(
                    "is of the first version of Feather",
                    path=path,
                    remedy="Write it again with pyarrow.feather.write_feather",
                )
            source.seek(0)
            is_stream = magic[:6] != _FILE_MAGIC
            yield (pa.ipc.open_stream if is_stream else pa.ipc.open_file)(source), is_stream
    except (pa.ArrowException, OSError) as error:
        raise ShardError(
            f"cannot be read as Arrow: {str(error).splitlines()[0].rstrip('.')}",
            path=path,
            row=row() or None,
            remedy="Fetch or write the file again",
        ) from error


def _schema(path: Path) -> tuple[Any, bool]:
    with _opened(path, lambda: 0) as (reader, is_stream):
        return reader.schema, is_stream


def _indices(reader: Any) -> range:
    return range(reader.num_record_batches)


def _ends(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-min(8, path.stat().st_size), 2)
        return file.read() == _STREAM_END


def _compression(path: Path) -> str | None:
    """The codec of the first record batch, which pyarrow does not tell."""
    try:
        with path.open("rb") as file:
            file.seek(8 if file.read(6) == _FILE_MAGIC else 0)
            while True:
                (size,) = struct.unpack("<i", file.read(4))
                if size == -1:
                    (size,) = struct.unpack("<i", file.read(4))
                if size <= 0:
                    return None
                message = _Table(file.read(size))
                if message.integer(1, "<B") == _RECORD_BATCH:
                    body = message.table(2).table(3)
                    return ("lz4", "zstd")[body.integer(0, "<b")] if body.there else None
                file.seek(message.integer(3, "<q"), 1)
    except (struct.error, IndexError, OSError):
        return None


_RECORD_BATCH: Final = 3


class _Table:
    """A table of a flatbuffer: fields by number, as the schema of Arrow's messages counts them."""

    def __init__(self, data: bytes, at: int | None = None) -> None:
        self._data = data
        self._at = struct.unpack_from("<I", data)[0] if at is None else at
        self.there = self._at >= 0

    def integer(self, field: int, kind: str) -> int:
        at = self._field(field)
        return 0 if at is None else int(struct.unpack_from(kind, self._data, at)[0])

    def table(self, field: int) -> _Table:
        at = self._field(field)
        if at is None:
            return _Table(self._data, -1)
        return _Table(self._data, at + struct.unpack_from("<I", self._data, at)[0])

    def _field(self, field: int) -> int | None:
        vtable = self._at - struct.unpack_from("<i", self._data, self._at)[0]
        (size,) = struct.unpack_from("<H", self._data, vtable)
        at = 4 + 2 * field
        offset = struct.unpack_from("<H", self._data, vtable + at)[0] if at < size else 0
        return self._at + offset if offset else None
