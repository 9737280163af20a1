"""JSON Lines, plain, gzip or zstd: streamed, and copied line by line without touching a byte.

Compression is told from the first bytes, not the name. Lines end at ``\\n`` alone (U+2028 and the
like are content). Blank lines are not rows: rows are numbered as ``datasets`` numbers them.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from auditor.clean.row import (
    UNREADABLE,
    Findings,
    Reading,
    Row,
    choose_content,
    content_of,
    identity_of,
    without_padding,
)
from auditor.errors import ShardError
from auditor.files import atomic
from auditor.schema import MASK_COLUMN, TEXT_COLUMNS

Compression = Literal["gzip", "zstd", "none"]

_N_ROWS_TO_CHOOSE = 64
"""Rows looked at before the content column is settled."""

_ZSTD_INPUT_BYTES = 8192
"""Compressed bytes taken at a time: what they expand to is held in memory."""


class _ZstdFrames(io.RawIOBase):
    """Decompressed bytes of all frames of a zstd file.

    The library's own stream reader ends quietly where a frame is cut off; this one raises
    ``EOFError``, as gzip does.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._file.read(_ZSTD_INPUT_BYTES)
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("the last zstd frame is cut off")
                    return 0
            if self._frame is None:
                decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
                self._frame = decompressor.decompressobj()
            self._output = memoryview(self._frame.decompress(self._input))
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
            else:
                self._input = b""
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size


def compression_of(path: Path) -> Compression:
    """What the file's first bytes say it is compressed with."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"\x1f\x8b":
        return "gzip"
    skippable = len(magic) == 4 and magic[1:] == b"\x2a\x4d\x18" and 0x50 <= magic[0] <= 0x5F
    return "zstd" if magic == b"\x28\xb5\x2f\xfd" or skippable else "none"


def read_lines(path: Path) -> Iterator[bytes]:
    """Raw lines that are not blank, line ends included."""
    row = 0
    try:
        with ExitStack() as stack:
            file: Any = stack.enter_context(path.open("rb"))
            compression = compression_of(path)
            if compression == "gzip":
                file = stack.enter_context(gzip.GzipFile(fileobj=file))
            elif compression == "zstd":
                file = stack.enter_context(io.BufferedReader(_ZstdFrames(file), 1 << 20))
            for line in file:
                if line.strip():
                    yield line
                    row += 1
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        raise ShardError(
            f"cannot be read to its end: {error}",
            path=path,
            row=row,
            remedy="Fetch or write the file again; the rows before this one can be read",
        ) from error


def rows(path: Path, reading: Reading, findings: Findings) -> Iterator[Row]:
    """Rows in file order. Raises ``ShardError`` for a line that is not JSON unless skipping."""
    column: str | None = None
    held: list[Any] = []  # rows read before the content column is settled
    columns: dict[str, None] = {}
    for row, line in enumerate(read_lines(path)):
        try:
            fields = _parse(line, first=row == 0)
        except (ValueError, RecursionError) as error:
            refusal = _unreadable(path, row, line, error)
            if reading.on_error == "raise":
                raise refusal from error
            findings.lost(row, refusal.message)
            fields = UNREADABLE
        if column is not None:
            yield _row(fields, column, reading.columns)
            continue
        held.append(fields)
        if isinstance(fields, dict):
            columns.update(dict.fromkeys(fields))
        if len(held) == _N_ROWS_TO_CHOOSE:
            column = choose_content(columns, reading.content, path)
            yield from (_row(earlier, column, reading.columns) for earlier in held)
            held.clear()
    if held:
        if not columns and all(fields is UNREADABLE for fields in held):
            column = reading.content or TEXT_COLUMNS[0]
        else:
            column = choose_content(columns, reading.content, path)
        yield from (_row(earlier, column, reading.columns) for earlier in held)


def copy(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading) -> None:
    """Write the kept rows' lines, byte for byte, compressed as the input is."""
    with atomic(out) as file, _compressed(file, compression_of(path)) as sink:
        n_rows = 0
        try:
            for line in read_lines(path):
                if n_rows < len(keep) and keep[n_rows]:
                    sink.write(line)
                n_rows += 1
        except ShardError:
            # Of a file that is cut off, what could be read is copied.
            if reading.on_error == "raise":
                raise
        if n_rows != len(keep):
            raise ShardError(
                f"had {len(keep)} rows when it was read and has {n_rows} now",
                path=path,
                remedy="Start again when nothing writes to the inputs",
            )


def count(path: Path, reading: Reading) -> int:
    """Rows of a shard, without parsing them."""
    return sum(1 for _ in read_lines(path))


@contextmanager
def _compressed(file: BinaryIO, compression: Compression) -> Iterator[Any]:
    if compression == "gzip":
        # No time stamp and no name: equal rows make equal files.
        with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as sink:
            yield sink
    elif compression == "zstd":
        compressor = zstandard.ZstdCompressor(level=9, write_checksum=True)
        with compressor.stream_writer(file, closefd=False) as stream:
            yield stream
    else:
        yield file


def _parse(line: bytes, *, first: bool) -> Any:
    # json.loads on bytes would guess UTF-16 and UTF-32; a shard is UTF-8, with or without a mark.
    return json.loads(line.decode("utf-8-sig" if first else "utf-8"))


def _row(fields: Any, column: str, further: tuple[str, ...]) -> Row:
    if fields is UNREADABLE:
        return UNREADABLE
    if not isinstance(fields, dict):
        return Row(None, None, None, columns=(None,) * len(further))
    value = _at(fields, column)
    return Row(
        without_padding(content_of(value), fields.get(MASK_COLUMN)),
        *identity_of(fields),
        columns=tuple([_at(fields, name) for name in further]),
    )


def _at(fields: dict[str, Any], column: str) -> Any:
    """The value of a column, or at a dotted path."""
    value: Any = fields.get(column)
    if value is None and "." in column:
        value = fields
        for part in column.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    return value


def _unreadable(path: Path, row: int, line: bytes, error: Exception) -> ShardError:
    start = line.lstrip()[:2]
    if row == 0 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
        what, remedy = "is UTF-16, not UTF-8", "Convert it to UTF-8"
    elif row == 0 and start[:1] == b"[":
        what = "is not JSON Lines but looks like one JSON array"
        remedy = "Convert it to one object per line, for example with jq -c '.[]'"
    else:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        what = f"not a line of JSON in UTF-8: {reason}"
        remedy = "Repair the line, or drop such rows with --on-error skip"
    return ShardError(what, path=path, row=row, remedy=remedy)
