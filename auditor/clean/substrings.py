"""Spans of a corpus's rows that occur, word for word, earlier in it: found on disk, cut on request.

What an element, a window and a first occurrence are is said in ``auditor.measure.substrings``. The
shards are read twice: for their elements, and for where the spans are in the texts. Between, in a
folder that is removed at the end:

    elements        u64, 8 bytes per element of the corpus
    seeds-*         16 bytes per record, of which there is one for about ``n_elements / 4`` elements
    windows-*       24 bytes per run of duplicate windows that share a seed

Seeds are spread over files by their value, so that all windows that may be equal meet in one file,
and runs of duplicates by their position. One file at a time is in memory.

Memory, in bytes: 16 per row; 40 per element of a batch (``_BATCH_ELEMENTS``, or the largest row),
40 per character of the largest text; of the largest seeds file (all records / ``n_partitions``, or
all of the most frequent seed) 60 per record and up to 100 per distinct window of its repeated
seeds; of the largest windows file 72 per run; 250 per span found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor.clean.row import Cuts, Reading, Row
from auditor.clean.shards import Shard
from auditor.errors import ShardError
from auditor.measure.substrings import (
    FirstOccurrences,
    cover,
    elements_text,
    elements_tokens,
    located_text,
    repeated,
    seeds,
    windows_of,
)

N_ELEMENTS: Final = 50
"""Elements from which on a span counts: that of Lee et al. 2021, who counted tokens."""

_BATCH_ELEMENTS: Final = 1 << 21
_BATCH_ROWS: Final = 1 << 16
_CHUNK_WINDOWS: Final = 1 << 21

Content = str | NDArray[np.int64] | None
Progress = Callable[[str, int, int], None]

_SCHEMA: Final = {
    "shard": pl.String,
    "row": pl.Int64,
    "begin": pl.Int64,
    "end": pl.Int64,
    "begin_element": pl.Int64,
    "n_elements": pl.Int64,
    "row_elements": pl.Int64,
    "keeper_shard": pl.String,
    "keeper_row": pl.Int64,
    "keeper_begin": pl.Int64,
}


def substring_duplicates(
    shards: Sequence[Shard | KeptRows],
    *,
    n_elements: int = N_ELEMENTS,
    work: Path,
    reading: Reading | None = None,
    n_partitions: int = 64,
    progress: Progress | None = None,
) -> pl.DataFrame:
    """Spans of at least ``n_elements`` elements that occur earlier in the shards, in input order.

    Args:
        work: folder for temporary files; it is made where it does not exist.
        reading: how rows are read, by default as ``Reading()`` says. A row that is passed over has
            no elements; ``Shard.rows`` names it in its findings.
        n_partitions: files that seeds and windows are spread over; the result does not depend on
            it.

    Returns a row for each span: ``shard``, ``row``; ``begin`` and ``end`` in characters of the text
    as it is, or in tokens; ``begin_element``, ``n_elements``; ``row_elements``, elements of the
    whole row; ``keeper_shard``, ``keeper_row``, ``keeper_begin``, where the first occurrence
    begins. Spans of a row are in order and may overlap by less than a window. A first occurrence
    may be covered by spans itself: every element of it is then found still earlier.

    Raises:
        ShardError: a shard cannot be read, or is another one when it is read again.
        ValueError: ``n_elements`` or ``n_partitions`` is out of range.
    """
    if not 1 <= n_partitions <= 4096:
        raise ValueError(f"n_partitions must be within 1..4096, got {n_partitions!r}")
    reading = reading or Reading()
    tell = progress or (lambda *_: None)
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="substrings-", dir=work) as name:
        folder = Path(name)
        records = _Partitions(folder, "seeds", n_partitions, 2)
        corpus = _collect(shards, n_elements, reading, folder, records, tell)
        windows = _Partitions(folder, "windows", n_partitions, 3)
        _find(corpus, n_elements, records, windows, tell)
        spans = _spans(corpus, n_elements, windows)
        return _located(shards, corpus, spans, reading, folder, tell)


def cuts_of(spans: pl.DataFrame) -> dict[str, Cuts]:
    """By shard and row, the spans of :func:`substring_duplicates` as they are cut out."""
    cuts: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for shard, row, begin, end in spans.select("shard", "row", "begin", "end").iter_rows():
        cuts.setdefault(shard, {}).setdefault(row, []).append((begin, end))
    return dict(cuts)


def rows_with_spans(spans: pl.DataFrame, *, min_left: int = 0) -> pl.DataFrame:
    """What cutting would do to each row that has spans, in input order.

    Returns ``shard``, ``row``, ``row_elements``, ``n_cut`` (elements that spans cover), ``share``
    (of the row's elements, 0..1), ``n_left``, and ``short``: fewer than ``min_left`` are left.
    """
    end = pl.col("begin_element") + pl.col("n_elements")
    # In a row spans begin and end in order: what the one before covers counts once.
    before = end.shift(1).over("shard", "row").fill_null(0)
    new = end - pl.max_horizontal("begin_element", before)
    return (
        spans.with_columns(new.alias("n_cut"))
        .group_by("shard", "row", maintain_order=True)
        .agg(pl.col("row_elements").first(), pl.col("n_cut").sum())
        .with_columns(
            (pl.col("n_cut") / pl.col("row_elements")).alias("share"),
            (pl.col("row_elements") - pl.col("n_cut")).alias("n_left"),
        )
        .with_columns((pl.col("n_left") < min_left).alias("short"))
    )


@dataclass(frozen=True)
class KeptRows:
    """A shard of which only some rows (bool [n_rows]) count: the others have no content."""

    shard: Shard
    keep: NDArray[np.bool_]

    @property
    def name(self) -> str:
        return self.shard.name

    @property
    def path(self) -> Path | str:
        return self.shard.path

    @contextmanager
    def local(self, scratch: Path) -> Iterator[KeptRows]:
        with self.shard.local(scratch) as shard:
            yield replace(self, shard=shard)

    def rows(self, reading: Reading) -> Iterator[Row]:
        for row, is_kept in zip_longest(self.shard.rows(reading), self.keep):
            if row is None or is_kept is None:
                raise ShardError(
                    "has another number of rows than when it was read first",
                    path=self.path,
                    remedy="Let nothing write the shards, and start again",
                )
            yield row if is_kept else row._replace(content=None)


@dataclass(frozen=True)
class _Corpus:
    """Elements of all rows on disk; **N** rows."""

    elements: Path
    starts: NDArray[np.int64]  # [N + 1] first element of each row
    shard_starts: NDArray[np.int64]  # [n_shards + 1] first row of each shard

    def values(self) -> NDArray[np.uint64]:
        if self.starts[-1] == 0:
            return np.empty(0, np.uint64)
        return np.memmap(self.elements, np.uint64, "r").view(np.ndarray)


class _Partitions:
    """Records of integers, i64 [n, width], spread over files."""

    def __init__(self, folder: Path, name: str, n: int, width: int) -> None:
        self._paths = [folder / f"{name}-{i}" for i in range(n)]
        self._width = width

    def __len__(self) -> int:
        return len(self._paths)

    def add(self, records: NDArray[np.int64], partition: NDArray[np.int64]) -> None:
        """Append each record to the file of its partition, in order."""
        order = np.argsort(partition, kind="stable")
        bounds = np.searchsorted(partition[order], np.arange(len(self) + 1))
        ordered = records[order]
        for path, begin, end in zip(self._paths, bounds[:-1], bounds[1:], strict=True):
            if end > begin:
                with path.open("ab") as file:
                    file.write(ordered[begin:end].tobytes())

    def take(self, i: int) -> NDArray[np.int64]:
        """The records of a partition as they were added; its file is removed."""
        path = self._paths[i]
        if not path.exists():
            return np.empty((0, self._width), np.int64)
        records = np.fromfile(path, np.int64).reshape(-1, self._width)
        path.unlink()
        return records


def _collect(
    shards: Sequence[Shard | KeptRows],
    n_elements: int,
    reading: Reading,
    folder: Path,
    records: _Partitions,
    tell: Progress,
) -> _Corpus:
    """Write the elements of every row, and the seeds of its windows."""
    path = folder / "elements"
    n_rows: list[int] = []
    lengths = [np.zeros(1, np.int64)]
    total = 0

    def rows() -> Iterator[NDArray[np.uint64]]:
        for i, shard in enumerate(shards):
            tell("read", i, len(shards))
            n_rows.append(0)
            for content in _contents(shard, reading, folder):
                n_rows[-1] += 1
                yield _elements(content)
        tell("read", len(shards), len(shards))

    with path.open("wb") as file:
        for batch in _batches(rows()):
            values = np.concatenate(batch)
            lengths.append(np.fromiter(map(len, batch), np.int64, len(batch)))
            file.write(values.tobytes())
            found = seeds(values, np.append(0, np.cumsum(lengths[-1])), n_elements, total)
            # A seed is a minimum of hashes: its lower bits are still evenly spread.
            records.add(found, found[:, 0] % len(records))
            total += len(values)
    return _Corpus(path, np.cumsum(np.concatenate(lengths)), np.cumsum([0, *n_rows]))


def _batches(rows: Iterator[NDArray[np.uint64]]) -> Iterator[list[NDArray[np.uint64]]]:
    batch: list[NDArray[np.uint64]] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row)
        if size >= _BATCH_ELEMENTS or len(batch) == _BATCH_ROWS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _contents(shard: Shard | KeptRows, reading: Reading, folder: Path) -> Iterator[Content]:
    with shard.local(folder) as local:
        for row in local.rows(reading):
            yield row.content


def _elements(content: Content) -> NDArray[np.uint64]:
    if content is None:
        return np.empty(0, np.uint64)
    return elements_text(content) if isinstance(content, str) else elements_tokens(content)


def _find(
    corpus: _Corpus, n_elements: int, records: _Partitions, windows: _Partitions, tell: Progress
) -> None:
    """Write the runs of duplicate windows, spread by position."""
    values = corpus.values()
    total = int(corpus.starts[-1])
    for i in range(len(records)):
        tell("compare", i, len(records))
        found = records.take(i)
        found = found[repeated(found, n_elements)]
        first = FirstOccurrences(values, n_elements)
        chunk = np.cumsum(windows_of(found)) // _CHUNK_WINDOWS
        for part in np.split(found, np.flatnonzero(np.diff(chunk)) + 1):
            runs = first.duplicates(part)
            windows.add(runs, runs[:, 0] * len(windows) // max(total, 1))
    tell("compare", len(records), len(records))


def _spans(corpus: _Corpus, n_elements: int, windows: _Partitions) -> NDArray[np.int64]:
    """Position, first occurrence and elements of every span, i64 [n_spans, 3]."""
    values = corpus.values()
    parts = [np.empty((0, 3), np.int64)]
    covered = 0
    for i in range(len(windows)):
        runs = windows.take(i)
        runs = runs[np.argsort(runs[:, 0])]
        spans, covered = cover(values, corpus.starts, runs, n_elements, covered)
        parts.append(spans)
    return np.concatenate(parts)


def _located(
    shards: Sequence[Shard | KeptRows],
    corpus: _Corpus,
    spans: NDArray[np.int64],
    reading: Reading,
    folder: Path,
    tell: Progress,
) -> pl.DataFrame:
    """Read the rows concerned again, and say where in their content the spans are."""
    starts, values = corpus.starts, corpus.values()
    first, length = spans[:, 1], spans[:, 2]
    # Three elements of each span are wanted: its first, its last, and the first of its source.
    wanted = np.concatenate([spans[:, 0], spans[:, 0] + length - 1, first])
    rows = np.searchsorted(starts, wanted, side="right") - 1
    elements = wanted - starts[rows]
    begins, ends = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
    order = np.argsort(rows, kind="stable")
    concerned, at = np.unique(rows[order], return_index=True)
    bounds = np.append(at, len(rows))
    for i, shard in enumerate(shards):
        tell("locate", i, len(shards))
        low, high = np.searchsorted(concerned, corpus.shard_starts[i : i + 2])
        if low == high:
            continue
        next_row = low
        for n, content in enumerate(_contents(shard, reading, folder), corpus.shard_starts[i]):
            if n != concerned[next_row]:
                continue
            read, row_begins, row_ends = _borders(content)
            if not np.array_equal(read, values[starts[n] : starts[n + 1]]):
                raise _changed(shard, n - corpus.shard_starts[i])
            here = order[bounds[next_row] : bounds[next_row + 1]]
            begins[here], ends[here] = row_begins[elements[here]], row_ends[elements[here]]
            next_row += 1
            if next_row == high:
                break
        if next_row < high:
            raise _changed(shard, concerned[next_row] - corpus.shard_starts[i])
    tell("locate", len(shards), len(shards))
    names = pl.Series([shard.name for shard in shards], dtype=pl.String)
    own, _, source = np.split(rows, 3)
    shard_of = np.searchsorted(corpus.shard_starts, own, side="right") - 1
    keeper_shard = np.searchsorted(corpus.shard_starts, source, side="right") - 1
    n = len(spans)
    columns: dict[str, Any] = {
        "shard": names.gather(shard_of),
        "row": own - corpus.shard_starts[shard_of],
        "begin": begins[:n],
        "end": ends[n : 2 * n],
        "begin_element": elements[:n],
        "n_elements": length,
        "row_elements": starts[own + 1] - starts[own],
        "keeper_shard": names.gather(keeper_shard),
        "keeper_row": source - corpus.shard_starts[keeper_shard],
        "keeper_begin": begins[2 * n :],
    }
    return pl.DataFrame(columns, schema=_SCHEMA)


def _borders(
    content: Content,
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """Elements, and where each begins and ends."""
    if isinstance(content, str):
        return located_text(content)
    elements = _elements(content)
    places = np.arange(len(elements))
    return elements, places, places + 1


def _changed(shard: Shard | KeptRows, row: int) -> ShardError:
    return ShardError(
        "is another one than when it was read first",
        path=shard.path,
        row=int(row),
        remedy="Let nothing write the shards, and start again",
    )
