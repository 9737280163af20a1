"""Logs as CSV: Lightning's ``metrics.csv``, exports of W&B, trackio and TensorBoard, and others.

A cell that is empty was not measured: train and validation metrics may stand in different rows.
``nan`` and ``inf`` were measured.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from auditor.explain.logs.columns import Columns
from auditor.explain.logs.log import Log, LogError, Progress, as_number, as_step, lines_of

DELIMITERS: Final = ",;\t"

NO_STEP: Final = "rows without a step"
OTHER_CELLS: Final = "rows with more or fewer cells than the header"
NO_NUMBER: Final = "cells that are no numbers"

csv.field_size_limit(2**27)


def delimiter_of(header: str) -> str | None:
    """The delimiter of a header line; None where it is no header of a table."""
    best = max(DELIMITERS, key=header.count)
    if not header.count(best):
        return None
    cells = next(csv.reader([header], delimiter=best))
    return best if all(as_number(cell) is None for cell in cells) else None


def read_csv(path: Path, columns: Columns, progress: Progress | None = None) -> Log:
    """Read a table with a header and a column of steps.

    Raises:
        LogError: it has no header, no column of steps, or a cell that cannot be parsed.
    """
    log = Log(path, "csv")
    lines = (line + "\n" for _, line in lines_of(path, progress))
    first = next(lines, "")
    delimiter = delimiter_of(first)
    if delimiter is None:
        raise LogError(
            "line 1 is no header of a CSV table",
            path=path,
            remedy="Add one that names the columns, as in step,loss",
        )
    rows = csv.reader(_chained(first, lines), delimiter=delimiter)
    try:
        header = [name.strip() for name in next(rows)]
        at = _step_index(path, header, columns)
        for row in rows:
            if any(row):
                _add(log, header, at, row, rows.line_num)
    except csv.Error as error:
        raise LogError(
            f"line {rows.line_num}: {error}", path=path, remedy="Write it as CSV again"
        ) from None
    return log


def _chained(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def _step_index(path: Path, header: list[str], columns: Columns) -> int:
    step = columns.step_among(header)
    if step is None:
        wanted = columns.step or "step"
        raise LogError(
            f"line 1: no column {wanted!r}; there are {', '.join(map(repr, header[:20]))}",
            path=path,
            remedy="Say which column holds the step, as in --column step=NAME",
        )
    return header.index(step)


def _add(log: Log, header: list[str], at: int, row: list[str], line: int) -> None:
    if len(row) != len(header):
        log.skip(OTHER_CELLS, f"line {line}: {len(row)} cells, the header has {len(header)}")
        return
    step = as_step(row[at])
    if step is None:
        log.skip(NO_STEP, f"line {line}: {row[at]!r}")
        return
    values = {}
    for i, (name, cell) in enumerate(zip(header, row, strict=True)):
        if i == at or not cell.strip():
            continue
        value = as_number(cell)
        if value is None:
            log.skip(NO_NUMBER, f"line {line}: {cell[:50]!r} in {name!r}")
        else:
            values[name] = value
    log.add(step, values)
