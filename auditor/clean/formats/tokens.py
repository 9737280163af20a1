"""Raw token ids: a ``.bin`` of one stream (nanoGPT), or a ``.npy`` of one or two dimensions.

In a stream the rows are documents, each ended by the id ``Reading.eot``, which is no part of the
content; what follows the last such id is a document as well. In two dimensions the rows are rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from auditor.clean.formats.compression import MAX_BYTES
from auditor.clean.row import Findings, Reading, Row, changed, choose_content
from auditor.errors import ShardError
from auditor.files import atomic

_CHUNK: Final = 1 << 22
"""Ids looked through at a time."""

_MAX_IDS: Final = MAX_BYTES // 8

_HEADED: Final = 20240520
"""First i32 of the shards of llm.c and its descendants, which have a header of 1,024 bytes."""


def files(path: Path) -> tuple[Path, ...]:
    return (path,)


def check(path: Path, reading: Reading) -> None:
    """Raise ``ShardError`` where the options lack what the file does not say itself."""
    missing = []
    if path.suffix.lower() != ".npy" and reading.dtype is None:
        missing.append("--dtype (uint16, int32, ...)")
    if reading.eot is None and not _is_table(path):
        missing.append("--eot (the id that ends a document)")
    if missing:
        raise ShardError(
            "holds token ids and nothing else",
            path=path,
            remedy=f"Say what they are with {' and '.join(missing)}",
        )


def rows(path: Path, reading: Reading, findings: Findings) -> Iterator[Row]:
    """Documents, or rows of a table, in order."""
    choose_content(("tokens",), reading.content, path)
    check(path, reading)
    further = (None,) * len(reading.columns)
    ids = _read(path, reading, findings)
    if ids.ndim == 2:
        for each in ids:
            yield Row(each.astype(np.int64), None, None, columns=further)
        return
    for row, (start, stop) in enumerate(_documents(ids, reading)):
        if stop - start > _MAX_IDS:
            raise ShardError(
                f"has a document longer than {_MAX_IDS} ids",
                path=path,
                row=row,
                remedy=f"Check --eot: {reading.eot} does not occur there",
            )
        document = ids[start:stop]
        if len(document) and document[-1] == reading.eot:
            document = document[:-1]
        elif not row:
            findings.notice(None, f"the id {reading.eot} ends no document: the file is one")
        yield Row(document.astype(np.int64), None, None, columns=further)


def copy(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading) -> None:
    """Write the kept documents with their ends, of the same type and in the same order."""
    check(path, reading)
    ids = _read(path, reading, Findings(None))
    spans = [(i, i + 1) for i in range(len(ids))] if ids.ndim == 2 else [*_documents(ids, reading)]
    if len(spans) != len(keep):
        raise changed(path, len(keep), len(spans))
    chosen = [span for span, is_kept in zip(spans, keep, strict=True) if is_kept]
    with atomic(out) as sink:
        if path.suffix.lower() == ".npy":
            n = sum(stop - start for start, stop in chosen)
            header = {
                "descr": npy.dtype_to_descr(ids.dtype),
                "fortran_order": False,
                "shape": (n, *ids.shape[1:]),
            }
            npy.write_array_header_1_0(sink, header)
        for start, stop in chosen:
            sink.write(np.ascontiguousarray(ids[start:stop]).data)


def count(path: Path, reading: Reading) -> int:
    """Number of documents or rows."""
    check(path, reading)
    ids = _read(path, reading, Findings(None))
    return len(ids) if ids.ndim == 2 else sum(1 for _ in _documents(ids, reading))


def _documents(ids: NDArray[Any], reading: Reading) -> Iterator[tuple[int, int]]:
    """Where documents start and stop, their ends included."""
    start = 0
    for first in range(0, len(ids), _CHUNK):
        for end in np.flatnonzero(ids[first : first + _CHUNK] == reading.eot).tolist():
            yield start, first + end + 1
            start = first + end + 1
    if start < len(ids):
        yield start, len(ids)


def _is_table(path: Path) -> bool:
    return path.suffix.lower() == ".npy" and _load(path).ndim == 2


def _read(path: Path, reading: Reading, findings: Findings) -> NDArray[Any]:
    """The ids as a memory map, [n_ids] or [n_rows, n_ids]."""
    if path.suffix.lower() == ".npy":
        ids = _load(path)
        if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
            raise ShardError(
                f"holds {ids.dtype} of {ids.ndim} dimensions, not token ids",
                path=path,
                remedy="Token ids are integers of one or two dimensions",
            )
        return ids
    try:
        dtype = np.dtype(reading.dtype)
    except TypeError as error:
        raise ShardError(
            f"no such type: {reading.dtype!r}", path=path, remedy="Correct --dtype"
        ) from error
    if not np.issubdtype(dtype, np.integer):
        raise ShardError(f"{dtype} is no type of ids", path=path, remedy="Correct --dtype")
    n_bytes = path.stat().st_size
    with path.open("rb") as file:
        if n_bytes >= 1024 and int.from_bytes(file.read(4), "little") == _HEADED:
            raise ShardError(
                "begins with the header of llm.c, which is not read",
                path=path,
                remedy="Cut off its first 1,024 bytes",
            )
    rest = n_bytes % dtype.itemsize
    if rest:
        what = f"{rest} bytes at the end are no whole id of {dtype}"
        if reading.on_error == "raise":
            raise ShardError(what, path=path, remedy="Check --dtype, or fetch the file again")
        findings.lost(None, what)
    n_ids = n_bytes // dtype.itemsize
    return np.memmap(path, dtype, "r", shape=(n_ids,)) if n_ids else np.empty(0, dtype)


def _load(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ShardError(
            f"cannot be read as an array of NumPy: {error}",
            path=path,
            remedy="Fetch or write the file again",
        ) from error
    return array
