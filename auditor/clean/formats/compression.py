"""Compressed files: told from their first bytes, read as streams, never past a fault in silence."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import zstandard

from auditor.errors import ShardError

Compression = Literal["gzip", "zstd", "none"]

MAX_BYTES: Final = 256 << 20
"""Bytes of one line, or of one member of an archive, from which it is refused: a row is held in
memory, and a few compressed kilobytes can stand for gigabytes."""

FAULTS: Final = (EOFError, OSError, zlib.error, zstandard.ZstdError)
"""What reading a damaged compressed file raises."""

_ZSTD_INPUT_BYTES: Final = 1024
"""Compressed bytes taken at a time. What they expand to is held in memory, for a moment twice:
64 MB at most, as a block of 4 bytes can stand for 128 KB. Larger pieces save a fifth of the time.
"""


class _GzipMembers(io.RawIOBase):
    """Decompressed bytes of all members of a gzip file; ``trailing`` once other bytes follow."""

    trailing = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = gzip.GzipFile(fileobj=file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read1(len(buffer))
        except gzip.BadGzipFile as error:
            # A wrong check sum is a BadGzipFile too.
            if not str(error).startswith("Not a gzipped file"):
                raise
            self.trailing = True
            return 0
        buffer[: len(data)] = data
        return len(data)


class _ZstdFrames(io.RawIOBase):
    """Decompressed bytes of all frames of a zstd file; ``trailing`` once other bytes follow.

    The library's own stream reader ends quietly where a frame is cut off; this one raises
    ``EOFError``, as gzip does.
    """

    trailing = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if self._frame is None and len(self._input) < 4:
                self._input += self._file.read(_ZSTD_INPUT_BYTES)
                if not self._input:
                    return 0
            elif not self._input:
                self._input = self._file.read(_ZSTD_INPUT_BYTES)
                if not self._input:
                    raise EOFError("the last zstd frame is cut off")
            if self._frame is None:
                if not _is_zstd(self._input[:4]):
                    self.trailing = True
                    return 0
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
    return "zstd" if _is_zstd(magic) else "none"


@contextmanager
def decompressed(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], bool]]]:
    """A file's content as a stream, and whether it ended at bytes that are no part of it.

    Reading raises one of ``FAULTS`` where the file is damaged.
    """
    with ExitStack() as stack:
        file: Any = stack.enter_context(path.open("rb"))
        compression = compression_of(path)
        if compression == "none":
            yield file, lambda: False
            return
        raw = _GzipMembers(file) if compression == "gzip" else _ZstdFrames(file)
        yield stack.enter_context(io.BufferedReader(raw, 1 << 18)), lambda: raw.trailing


@contextmanager
def compressed(file: BinaryIO, compression: Compression) -> Iterator[Any]:
    """A stream into ``file``; equal content makes equal bytes."""
    if compression == "gzip":
        # No time stamp and no name.
        with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as sink:
            yield sink
    elif compression == "zstd":
        compressor = zstandard.ZstdCompressor(level=9, write_checksum=True)
        with compressor.stream_writer(file, closefd=False) as stream:
            yield stream
    else:
        yield file


def damaged(path: Path, row: int | None, error: Exception) -> ShardError:
    """The refusal of a file that cannot be read beyond ``row`` rows."""
    before = f"; the {row} rows before this one can be read with --on-error skip" if row else ""
    return ShardError(
        f"cannot be read to its end: {error}",
        path=path,
        row=row or None,
        remedy=f"Fetch or write the file again{before}",
    )


def _is_zstd(magic: bytes) -> bool:
    skippable = len(magic) == 4 and magic[1:] == b"\x2a\x4d\x18" and 0x50 <= magic[0] <= 0x5F
    return magic == b"\x28\xb5\x2f\xfd" or skippable
