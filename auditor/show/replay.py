"""The order of a run's exposures as JSON lines or Parquet, for a training that replays it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import polars as pl
import zstandard

from auditor.explain.exposures import Replay
from auditor.files import atomic

SUFFIXES: Final = (".jsonl", ".jsonl.zst", ".parquet")

_ROWS_AT_ONCE: Final = 65_536


def json_lines(rows: pl.DataFrame) -> Iterator[bytes]:
    """The rows as JSON, one line each, many lines at a time."""
    for part in rows.iter_slices(_ROWS_AT_ONCE):
        yield part.write_ndjson().encode()


def write_order(rows: pl.DataFrame, path: Path) -> None:
    """Write the rows whole, in the format that the suffix names.

    Raises:
        ValueError: the suffix is none of ``SUFFIXES``.
    """
    check_suffix(path)
    with atomic(path) as file:
        if path.name.endswith(".parquet"):
            rows.write_parquet(file)
        elif path.name.endswith(".zst"):
            compressor = zstandard.ZstdCompressor(write_checksum=True)
            with compressor.stream_writer(file, closefd=False) as stream:
                for lines in json_lines(rows):
                    stream.write(lines)
        else:
            for lines in json_lines(rows):
                file.write(lines)


def check_suffix(path: Path) -> None:
    """Raises ``ValueError`` where the format to write is not known."""
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"--out must end in {', '.join(SUFFIXES)}, got {path.name!r}")


def told(replay: Replay) -> str:
    """What the order holds, in a line."""
    rows = replay.rows
    n_batches = rows.select(pl.struct("rank", "attempt", "batch").n_unique()).item()
    steps = rows["step"].drop_nulls()
    of = f"steps {steps[0]} to {steps[-1]}" if len(steps) else "no steps"
    ranks = ", ".join(map(str, rows["rank"].unique().sort()))
    return f"{len(rows)} exposures, {n_batches} batches, {of}, rank {ranks}"


def doubts(replay: Replay, gaps: list[str]) -> Iterator[str]:
    """What keeps the order from being all that was consumed, in sentences."""
    if replay.n_missing:
        yield f"The order is not whole: batches missing from the record: {replay.n_missing}."
    if replay.left_out:
        counts = ", ".join(f"{n} {state}" for state, n in replay.left_out.items())
        yield f"Left out: {counts}. Take them in with --include."
    if replay.rows["index"].null_count():
        yield (
            "Where index is null, samples were told by hash: find them by sample_id, or by shard "
            "and row."
        )
    for gap in gaps:
        yield f"Gap in the record: {gap}"
