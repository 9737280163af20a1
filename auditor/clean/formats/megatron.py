"""Megatron indexed datasets: a ``.bin`` of token ids and an ``.idx`` that says where they lie.

A row is a document: the sequences between two entries of the index's document indices. That is
Megatron's unit of data (a document's sequences are its sentences, or the document as a whole); its
training samples are cut across documents later on.

The index, little-endian: ``MMIDIDX\\0\\0``, version u64 = 1, type code u8, n_sequences u64,
n_document_indices u64, lengths i32 [n_sequences], byte offsets i64 [n_sequences], document indices
i64 [n_document_indices], from 0 to n_sequences. Multimodal ones go on with a mode per sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from auditor.clean.formats.compression import MAX_BYTES
from auditor.clean.row import UNREADABLE, Findings, Reading, Row, changed, choose_content
from auditor.errors import ShardError
from auditor.files import atomic

_MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")
_DTYPES: Final = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}


class _Index(NamedTuple):
    code: int
    dtype: Any
    lengths: NDArray[np.int32]  # [n_sequences], ids
    offsets: NDArray[np.int64]  # [n_sequences], bytes
    documents: NDArray[np.int64]  # [n_rows + 1], into the sequences


def files(path: Path) -> tuple[Path, ...]:
    """``path`` is the index; the file of ids goes first, so that a set with an index is whole."""
    return (path.with_suffix(".bin"), path)


def rows(path: Path, reading: Reading, findings: Findings) -> Iterator[Row]:
    """Documents in order; one that reaches beyond the end of the ids is unreadable."""
    choose_content(("tokens",), reading.content, path)
    index = _read_index(path)
    ids = _read_ids(path, index)
    size = index.dtype().itemsize
    ends = index.offsets + index.lengths.astype(np.int64) * size
    used = int(ends.max(initial=0))
    if used < ids.nbytes:
        findings.notice(None, f"{ids.nbytes - used} bytes of ids belong to no document")
    beyond = _is_beyond(index, ids)
    for row in range(len(index.documents) - 1):
        sequences = slice(index.documents[row], index.documents[row + 1])
        what = None
        if beyond[row]:
            what = _reaches_beyond(path)
        elif int(index.lengths[sequences].sum(dtype=np.int64)) * 8 > MAX_BYTES:
            what = f"is longer than {MAX_BYTES // 8} ids"
        if what is not None:
            if reading.on_error == "raise":
                raise ShardError(what, path=path, row=row, remedy="Fetch or write the files again")
            findings.lost(row, what)
            yield UNREADABLE
            continue
        parts = [
            ids[offset:end]
            for offset, end in zip(index.offsets[sequences], ends[sequences], strict=True)
        ]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else ids[:0]
        yield Row(
            joined.view(index.dtype).astype(np.int64),
            None,
            None,
            columns=(None,) * len(reading.columns),
        )


def copy(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading) -> None:
    """Write the kept documents; the files are ``out`` and the ``.bin`` beside it."""
    index = _read_index(path)
    ids = _read_ids(path, index)
    if len(index.documents) - 1 != len(keep):
        raise changed(path, len(keep), len(index.documents) - 1)
    if len(beyond := np.flatnonzero(keep & _is_beyond(index, ids))):
        remedy = "Fetch or write the files again"
        raise ShardError(_reaches_beyond(path), path=path, row=int(beyond[0]), remedy=remedy)
    n_sequences = np.diff(index.documents)
    chosen = np.flatnonzero(np.repeat(keep, n_sequences))
    lengths = index.lengths[chosen]
    sizes = lengths.astype(np.int64) * index.dtype().itemsize
    offsets = np.cumsum(sizes) - sizes
    documents = np.concatenate([[0], np.cumsum(n_sequences[keep])]).astype(np.int64)
    with atomic(out.with_suffix(".bin")) as sink:
        for sequence, n_bytes in zip(chosen, sizes, strict=True):
            start = index.offsets[sequence]
            sink.write(ids[start : start + n_bytes].data)
    with atomic(out) as sink:
        sink.write(_HEADER.pack(_MAGIC, 1, index.code, len(lengths), len(documents)))
        for array in (lengths, offsets, documents):
            sink.write(array.tobytes())


def count(path: Path, reading: Reading) -> int:
    """Number of documents."""
    return len(_read_index(path).documents) - 1


def lost(path: Path, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Kept documents that cannot be copied, bool [n_rows]: those whose ids are not all there."""
    index = _read_index(path)
    return keep & _is_beyond(index, _read_ids(path, index))


def _is_beyond(index: _Index, ids: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Documents with a sequence that is not, or not all, in the file of ids, bool [n_rows]."""
    ends = index.offsets + index.lengths.astype(np.int64) * index.dtype().itemsize
    before = np.cumsum([0, *((ends > ids.nbytes) | (index.offsets < 0))])[index.documents]
    return np.diff(before) > 0


def _reaches_beyond(path: Path) -> str:
    return f"reaches beyond the end of {path.with_suffix('.bin').name}"


def _read_index(path: Path) -> _Index:
    data = path.read_bytes()
    if len(data) < _HEADER.size or data[:9] != _MAGIC:
        raise _refused(path, "is not an index of Megatron", "Fetch or write the files again")
    _, version, code, n_sequences, n_documents = _HEADER.unpack_from(data)
    if version != 1:
        raise _refused(path, f"is of version {version}", "Version 1 is read")
    dtype = _DTYPES.get(code)
    if dtype is None or np.issubdtype(dtype, np.floating):
        raise _refused(path, f"type code {code} is none of integer ids", "Check the files")
    expected = _HEADER.size + 12 * n_sequences + 8 * n_documents
    if len(data) == expected + n_sequences and n_sequences:
        raise _refused(path, "has modes: it is multimodal", "Clean the texts before they are mixed")
    if len(data) != expected:
        raise _refused(
            path, f"has {len(data)} bytes, {expected} are due", "Fetch or write the files again"
        )
    at = _HEADER.size
    lengths = np.frombuffer(data, "<i4", n_sequences, at)
    offsets = np.frombuffer(data, "<i8", n_sequences, at + 4 * n_sequences)
    documents = np.frombuffer(data, "<i8", n_documents, at + 12 * n_sequences)
    steps = np.diff(documents)
    if (
        not n_documents
        or documents[0] != 0
        or documents[-1] != n_sequences
        or (steps < 0).any()
        or (lengths < 0).any()
    ):
        raise _refused(
            path, "has document indices that do not cover its sequences", "Write the files again"
        )
    return _Index(code, dtype, lengths, offsets, documents)


def _read_ids(path: Path, index: _Index) -> NDArray[np.uint8]:
    """The bytes of the ids, u8 [n_bytes]."""
    binary = path.with_suffix(".bin")
    try:
        if not binary.stat().st_size:
            return np.empty(0, np.uint8)
        return np.memmap(binary, np.uint8, "r").view(np.ndarray)
    except OSError as error:
        raise _refused(
            binary, f"cannot be read: {error.strerror}", "Put it beside its .idx"
        ) from error


def _refused(path: Path, what: str, remedy: str) -> ShardError:
    return ShardError(what, path=path, remedy=remedy)
