"""TensorBoard event files: scalars by step, read without TensorBoard.

    record = length u64, crc of the length u32, Event, crc of the Event u32      (little endian)

The checksums are CRC-32C, masked, as TFRecord files have them. An Event is a protocol buffer; of it
the step and the scalars of the summary are read: ``simple_value``, or a tensor of one element.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from auditor.explain.logs.columns import Columns
from auditor.explain.logs.log import Log, Progress
from auditor.measure.compiled import kernel

TORN: Final = "bytes after the last whole record"
NO_SCALAR: Final = "summaries that are no scalars"

_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_LONGEST: Final = 2**40
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TENSOR_TYPES: Final = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8"}
"""TensorFlow's numbers of element types."""
_TENSOR_FIELDS: Final = {5: "<f4", 6: "<f8"}
"""Fields of a tensor that hold its elements, one after another."""


def is_event_file(head: bytes) -> bool:
    """Whether the first bytes of a file are the header of a record."""
    if len(head) < _HEADER.size:
        return False
    length, crc = _HEADER.unpack_from(head)
    # Text read as a length is beyond all files: nothing need be compiled to see that.
    return 0 < length < _LONGEST and masked_crc32c(head[:8]) == crc


def masked_crc32c(data: bytes) -> int:
    """CRC-32C of bytes as TFRecord files write it."""
    crc = int(_crc32c(np.frombuffer(data, np.uint8), _TABLE))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(path: Path, columns: Columns, progress: Progress | None = None) -> Log:
    """Read the scalars of an event file; ``columns`` has no say, a record has its own step."""
    log = Log(path, "tensorboard")
    total, end = path.stat().st_size, 0
    with path.open("rb") as file:
        while header := file.read(_HEADER.size):
            data = _whole(file, header, total - end)
            if data is None:
                break
            end = file.tell()
            if progress is not None and (log.n_records % 4096 == 0 or end == total):
                progress("read", end, total)
            _add(log, data)
    if end < total:
        where = f"byte {end}: the checksum differs, or the record is not whole"
        log.skip(TORN, where, total - end)
    return log


def _whole(file: Any, header: bytes, left: int) -> bytes | None:
    """The Event of a record; None where the record is torn or damaged."""
    if len(header) < _HEADER.size:
        return None
    length, crc = _HEADER.unpack(header)
    if masked_crc32c(header[:8]) != crc or _HEADER.size + length + _CRC.size > left:
        return None
    data: bytes = file.read(length)
    (crc,) = _CRC.unpack(file.read(_CRC.size))
    return data if masked_crc32c(data) == crc else None


def _add(log: Log, event: bytes) -> None:
    step, values = 0, {}
    for number, value in _fields(event):
        if number == 2:
            step = value
        elif number == 5:
            for inner, summary in _fields(value):
                if inner != 1:
                    continue
                tag, scalar = _scalar(summary)
                if scalar is None:
                    log.skip(NO_SCALAR, f"step {step}: {tag[:50]!r}")
                else:
                    values[tag] = scalar
    if values:
        log.add(step, values)


def _scalar(summary: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, value in _fields(summary):
        if number == 1:
            tag = value.decode("utf-8", "replace")
        elif number == 2:
            (scalar,) = struct.unpack("<f", value)
        elif number == 8:
            scalar = _tensor(value)
    return tag, scalar


def _tensor(data: bytes) -> float | None:
    """A tensor's element where it has exactly one."""
    kind, elements = 0, np.zeros(0)
    for number, value in _fields(data):
        if number == 1:
            kind = value
        elif number == 4 and kind in _TENSOR_TYPES:
            width = np.dtype(_TENSOR_TYPES[kind]).itemsize
            elements = np.frombuffer(value[: len(value) // width * width], _TENSOR_TYPES[kind])
        elif number in _TENSOR_FIELDS:
            elements = np.frombuffer(value, _TENSOR_FIELDS[number])
    return float(elements[0]) if elements.size == 1 else None


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int of a varint, else the bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value: Any
        if wire == _VARINT:
            value, at = _varint(data, at)
        elif wire == _BYTES:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        elif wire in (_FIXED64, _FIXED32):
            width = 8 if wire == _FIXED64 else 4
            value, at = data[at : at + width], at + width
        else:  # groups, which no Event has
            return
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            break
    return value, at


def _table() -> np.ndarray:
    """CRC-32C of each byte (reflected polynomial 0x82F63B78)."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table.astype(np.uint32)


_TABLE: Final = _table()


@kernel
def _crc32c(data: np.ndarray, table: np.ndarray) -> np.uint32:
    crc = np.uint32(0xFFFFFFFF)
    for byte in data:
        crc = table[(crc ^ np.uint32(byte)) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return crc ^ np.uint32(0xFFFFFFFF)
