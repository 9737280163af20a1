"""The live file format: an append-only sequence of frames, readable up to the last whole one.

    file   = magic, frame*
    frame  = length u32, crc32 u32, payload          (little endian; length and crc of the payload)
    payload = zstd(header length u32, header JSON, column bytes)

The header carries ``kind``, scalars, string columns, and name and dtype of each numeric column. The
bytes of a column are laid out by significance, all lowest bytes first, so that the compressor finds
the high bytes of small integers and of similar floats together. A process killed at any byte leaves
a readable prefix: the torn tail is dropped and its size reported. This module imports no polars,
because it runs in the training process.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import zstandard

from auditor.errors import RunError, SchemaVersionError
from auditor.schema import RUN_VERSION

MAGIC = b"AUDLEDG" + bytes([RUN_VERSION])
NULL = -(2**31)
"""Null in an integer column."""

_PREFIX = struct.Struct("<II")
_HEADER_LENGTH = struct.Struct("<I")
_COMPRESSION_LEVEL = 1
_INTEGER_WIDTHS = (np.uint8, np.uint16, np.uint32)


@dataclass(frozen=True)
class Frame:
    """One record: its ``kind``, scalars by name, numeric columns [n] and string columns [n]."""

    kind: str
    scalars: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    strings: Mapping[str, Sequence[str | None]] = field(default_factory=dict)


def narrowed(values: np.ndarray) -> np.ndarray:
    """Integers in the narrowest unsigned width that holds them, others as they are."""
    if values.dtype.kind not in "iu" or values.size == 0 or values.min() < 0:
        return values
    highest = values.max()
    for width in _INTEGER_WIDTHS:
        if highest <= np.iinfo(width).max:
            return values.astype(width)
    return values


_SHORT: Final = 512
"""Bytes of a header up to which it is worth remembering."""


def encode(frame: Frame) -> bytes:
    """The frame as bytes, prefix included."""
    columns = {name: narrowed(np.ascontiguousarray(v)) for name, v in frame.columns.items()}
    header = json.dumps(
        {
            "kind": frame.kind,
            "scalars": frame.scalars,
            "strings": frame.strings,
            "columns": [[name, v.dtype.str, v.size] for name, v in columns.items()],
        },
        separators=(",", ":"),
    ).encode()
    parts = [_HEADER_LENGTH.pack(len(header)), header, *map(_by_significance, columns.values())]
    payload = zstandard.compress(b"".join(parts), _COMPRESSION_LEVEL)
    return _PREFIX.pack(len(payload), zlib.crc32(payload)) + payload


def _by_significance(values: np.ndarray) -> bytes:
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _decode(
    payload: bytes, kinds: Collection[str] | None, wanted: Collection[str] | None
) -> Frame | None:
    """The frame, from its payload in plain, with the columns wanted; None if of another kind."""
    (header_length,) = _HEADER_LENGTH.unpack_from(payload)
    offset = _HEADER_LENGTH.size + header_length
    text = payload[_HEADER_LENGTH.size : offset]
    header = (_short_header if header_length <= _SHORT else json.loads)(text)
    if kinds is not None and header["kind"] not in kinds:
        return None
    columns = {}
    for name, dtype, size in header["columns"]:
        width = np.dtype(dtype).itemsize
        if wanted is None or name in wanted:
            planes = np.frombuffer(payload, np.uint8, size * width, offset).reshape(width, size)
            columns[name] = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
        offset += size * width
    return Frame(header["kind"], dict(header["scalars"]), columns, dict(header["strings"]))


@lru_cache(1024)
def _short_header(text: bytes) -> Any:
    """Most frames of a ledger have the header of some other, where they carry no strings."""
    return json.loads(text)


class LedgerWriter:
    """Appends frames to one file; each is handed to the operating system before ``append`` returns.

    A killed process loses nothing that was appended; a killed machine loses what came after the
    last ``sync``.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if os.fstat(self._file).st_size == 0:
            os.write(self._file, MAGIC)

    def append(self, frame: Frame) -> None:
        """Write one frame, whole or not at all. Raises OSError when the disk refuses it."""
        data = memoryview(encode(frame))
        begin = os.lseek(self._file, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            # Half a frame would hide every frame that follows it.
            os.ftruncate(self._file, begin)
            raise

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)


class LedgerReader:
    """The whole frames of a ledger, in order; ``torn_bytes`` tells what the tail lost.

    Reads a file that is still being written: what is whole now is what there is. While it is read,
    ``end`` is the byte where the last frame given out ends: a reader that starts there goes on.

    Args:
        start: the byte where the first frame begins, as ``end`` or :meth:`starts` told; 0: the
            first frame of the file.
        kinds: of frames that are given out; None: all.
        columns: numeric columns that they carry then; None: all.

    Raises:
        RunError: the file is not a ledger.
        SchemaVersionError: it was written by another version of the format.
    """

    def __init__(
        self,
        path: Path,
        *,
        start: int = 0,
        kinds: Collection[str] | None = None,
        columns: Collection[str] | None = None,
    ) -> None:
        self.path = path
        self._kinds = kinds
        self._columns = columns
        self.torn_bytes = 0
        self.end = max(start, len(MAGIC))

    def __iter__(self) -> Iterator[Frame]:
        decompressor = zstandard.ZstdDecompressor()
        with self.path.open("rb") as file:
            for length, crc in self._prefixes(file):
                payload = file.read(length)
                if len(payload) < length or zlib.crc32(payload) != crc:
                    return
                self._went_past(length)
                plain = decompressor.decompress(payload)
                frame = _decode(plain, self._kinds, self._columns)
                if frame is not None:
                    yield frame

    def at(self, starts: Iterable[int]) -> Iterator[Frame]:
        """The frames that begin at these bytes, as :meth:`starts` or ``end`` told."""
        decompressor = zstandard.ZstdDecompressor()
        with self.path.open("rb") as file:
            for start in starts:
                file.seek(start)
                length, crc = _PREFIX.unpack(file.read(_PREFIX.size))
                payload = file.read(length)
                if zlib.crc32(payload) != crc:
                    raise RunError("a frame changed while it was read", path=self.path)
                frame = _decode(decompressor.decompress(payload), self._kinds, self._columns)
                if frame is not None:
                    yield frame

    def starts(self) -> Iterator[int]:
        """The byte where each frame begins, from their lengths alone: no frame is decoded."""
        with self.path.open("rb") as file:
            for length, _ in self._prefixes(file):
                start = self.end
                file.seek(length, os.SEEK_CUR)
                self._went_past(length)
                yield start

    def _prefixes(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        """Length and checksum of each frame; the file stands at its payload then."""
        size = os.fstat(file.fileno()).st_size
        magic = file.read(len(MAGIC))
        self.torn_bytes = max(0, size - self.end)
        if len(magic) < len(MAGIC):  # killed between creation and the magic
            self.torn_bytes = len(magic)
            return
        if magic[:-1] != MAGIC[:-1]:
            raise RunError(
                "not a ledger file",
                path=self.path,
                remedy="Remove it if it does not belong to this run directory",
            )
        if magic[-1] != RUN_VERSION:
            raise SchemaVersionError(
                "ledger", path=self.path, found=magic[-1], expected=RUN_VERSION
            )
        file.seek(self.end)
        while len(prefix := file.read(_PREFIX.size)) == _PREFIX.size:
            length, crc = _PREFIX.unpack(prefix)
            if self.end + _PREFIX.size + length > size:
                return  # also a length that damage made absurd
            yield length, crc

    def _went_past(self, length: int) -> None:
        whole = _PREFIX.size + length
        self.end += whole
        self.torn_bytes -= whole
