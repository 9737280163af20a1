"""What was consumed in a window, on a terminal, row by row, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import polars as pl
from rich.console import Console
from rich.text import Text

from auditor import schema
from auditor.explain.exposures import Seen
from auditor.show import wording
from auditor.show.printing import heading, line, new_table
from auditor.show.report import strict
from auditor.show.text import clean, encodable, sentence

ROWS: Final = 1000
"""Rows printed unless told otherwise."""

ROW_COLUMNS: Final = (
    "step", "rank", "attempt", "batch", "position", "part", "state", "source", "sample_id",
    "shard", "row", "n_tokens", "duplication", "dup_of", "dup_run", "repetition", "loss",
)  # fmt: skip

_PREVIEW_CHARS: Final = 120
_NUMBERS: Final = 8
_NAME_CHARS: Final = 40
_ROW_NAME_CHARS: Final = 400
_LABEL_CHARS: Final = 14


def print_seen(console: Console, seen: Seen) -> None:
    """Print the window: what it holds, its sources, what was repeated, what is missing."""
    _header(console, seen)
    if seen.sources.is_empty():
        console.print()
        line(console, "", "None of it was trained, so there is nothing to sum up.", label_chars=0)
    else:
        console.print()
        _sources(console, seen)
        _lists(console, seen)
    heading(console, "Gaps in the record")
    for gap in seen.gaps:
        line(console, "  -", sentence(gap, 400), label_chars=4)
    if not seen.gaps:
        line(console, "", "none known", label_chars=2)


def rows_as_text(seen: Seen, limit: int) -> Iterator[str]:
    """The rows, tab-separated under a line of names; what is null is a dash."""
    yield "\t".join(ROW_COLUMNS)
    for row in seen.rows.head(limit).iter_rows(named=True):
        yield "\t".join(_cell(row[name]) for name in ROW_COLUMNS)


def seen_as_json(seen: Seen, limit: int) -> dict[str, Any]:
    """All of it as strict JSON: what is no finite number is null; names are as the data has them.

    ``rows`` holds the first ``limit`` of ``n_rows``.
    """
    document = {
        "schema_version": schema.EXPOSURES_VERSION,
        "run_id": seen.run_id,
        "view": seen.view,
        "unit": seen.unit,
        "first": seen.first,
        "last": seen.last,
        "recorded_first": seen.recorded[0],
        "recorded_last": seen.recorded[1],
        "ranks": _distinct(seen, "rank"),
        "attempts": _distinct(seen, "attempt"),
        "n_batches": seen.n_batches,
        "n_missing_batches": seen.n_missing,
        "states": seen.states,
        "counted": seen.counted or "all",
        "n_counted": seen.n_counted,
        "total": _objects(seen.total)[0] if len(seen.total) else None,
        "sources": _objects(seen.sources),
        "contents": _objects(seen.contents),
        "samples": _objects(seen.samples),
        "duplicates": _objects(seen.duplicates),
        "repetitive": _objects(seen.repetitive),
        "gaps": seen.gaps,
        "n_rows": len(seen.rows),
        "n_rows_shown": min(limit, len(seen.rows)),
        "rows": _objects(seen.rows.head(limit)),
    }
    plain = strict(document)
    assert isinstance(plain, dict)
    return plain


def cut_short(seen: Seen, limit: int) -> str | None:
    """What to say when not all rows are shown, None when they are."""
    n = len(seen.rows)
    if n <= limit:
        return None
    return f"{limit:,} of {n:,} rows shown; --limit {n} shows all"


def _header(console: Console, seen: Seen) -> None:
    low, high = seen.recorded
    places = f"{_span(seen.unit, seen.first, seen.last)} ({low:,} to {high:,} are recorded)"
    line(console, "Run", f"{clean(seen.run_id)}: {places}", style="bold")
    where = ", ".join(_listed(what, _distinct(seen, what)) for what in ("rank", "attempt"))
    rows, batches = (
        wording.counted(len(seen.rows), "exposure"),
        f"{seen.n_batches:,} {'batch' if seen.n_batches == 1 else 'batches'}",
    )
    line(console, "Consumed", f"{rows} in {batches}; {where}")
    line(console, "State", ", ".join(f"{n:,} {state}" for state, n in seen.states.items()))
    if seen.counted is None:
        drawn = " What was drawn may not have arrived." if "drawn" in seen.states else ""
        line(
            console,
            "No steps",
            "No step was closed over these batches (no GradeMonitor, no optimizer= of "
            "AuditedSampler), so none is known to be trained: batches of each rank are counted "
            f"instead.{drawn}",
        )
    if seen.n_missing:
        line(console, "Missing", f"batches of this window not in the record: {seen.n_missing:,}")


def _sources(console: Console, seen: Seen) -> None:
    table = new_table(console)
    table.add_column("source", overflow="fold")
    for name in ("samples", "share", "tokens", "near-dups", "repetition", "unscored"):
        table.add_column(name, justify="right")
    rows = list(seen.sources.iter_rows(named=True))
    for row in rows:
        name = encodable(clean(row["source"], _NAME_CHARS), console.encoding)
        table.add_row(Text(name), *_cells(row))
    if len(rows) > 1:
        table.add_section()
        table.add_row(Text("together"), *_cells(seen.total.row(0, named=True)))
    console.print(table)


def _cells(row: Mapping[str, Any]) -> list[str]:
    tokens = wording.NOT_AVAILABLE if row["n_tokens"] is None else f"{row['n_tokens']:,}"
    return [
        f"{row['n_samples']:,}",
        wording.percent(row["share"]),
        tokens,
        wording.percent(row["duplicate_share"]),
        wording.percent(row["repetition"]),
        f"{row['n_unscored']:,}",
    ]


def _lists(console: Console, seen: Seen) -> None:
    scored = bool(seen.total["n_scored"][0])
    unit = seen.unit
    shown: set[str] = set()
    _list(
        console,
        shown,
        "Contents shown most often (near-duplicates count as one)",
        (
            (
                f"{row['times']:,} times",
                f"{_name(row)}: {wording.counted(row['n_samples'], 'sample')}, "
                f"{_span(unit, row['first'], row['last'])}{_so_far(row['dup_run'])}",
                row["preview"],
            )
            for row in seen.contents.iter_rows(named=True)
        ),
        "none more than once" if scored else "not known: nothing was scored; by id see below",
    )
    _list(
        console,
        shown,
        "Samples shown most often",
        (
            (
                f"{row['times']:,} times",
                f"{_name(row)}: {_span(unit, row['first'], row['last'])}",
                row["preview"],
            )
            for row in seen.samples.iter_rows(named=True)
        ),
        "none more than once",
    )
    _list(
        console,
        shown,
        "Closest near-duplicates (estimated Jaccard)",
        (
            (
                f"{row['duplication']:.2f}",
                f"{_name(row)}: {_like(row)}, {_span(unit, row['first'], row['last'])}",
                row["preview"],
            )
            for row in seen.duplicates.iter_rows(named=True)
        ),
        "none" if scored else "not scored",
    )
    _list(
        console,
        shown,
        "Most repetitive inside",
        (
            (
                wording.percent(row["repetition"]),
                f"{_name(row)}: {_span(unit, row['first'], row['last'])}",
                row["preview"],
            )
            for row in seen.repetitive.iter_rows(named=True)
        ),
        "none" if scored else "not scored",
    )


def _list(
    console: Console,
    shown: set[str],
    title: str,
    rows: Iterator[tuple[str, str, str | None]],
    nothing: str,
) -> None:
    """Rows of label, body and preview; ``shown`` are the previews that were printed before."""
    heading(console, title)
    empty = True
    for label, body, preview in rows:
        empty = False
        line(console, f"  {label}", body, label_chars=_LABEL_CHARS)
        # Copies have one text: once is enough.
        if preview and preview not in shown:
            shown.add(preview)
            text = f'text: "{clean(preview, _PREVIEW_CHARS)}"'
            line(console, "", text, label_chars=_LABEL_CHARS)
    if empty:
        line(console, "", nothing, label_chars=2)


def _name(row: Mapping[str, Any]) -> str:
    name = f"{clean(row['sample_id'], _NAME_CHARS)} ({clean(row['source'], _NAME_CHARS)})"
    if row["shard"] is None:
        return name
    at = "" if row["row"] is None else f" row {row['row']:,}"
    return (
        f"{name}, {clean(row['shard'].replace(chr(92), '/').rpartition('/')[2], _NAME_CHARS)}{at}"
    )


def _so_far(dup_run: int | None) -> str:
    """How often a content had been shown when it was shown last."""
    return "" if dup_run is None else f"; {wording.counted(dup_run + 1, 'time')} in the run"


def _like(row: Mapping[str, Any]) -> str:
    if row["duplicate_of"] == row["sample_id"]:
        return "like itself, shown before"
    return f"like {clean(row['duplicate_of'], _NAME_CHARS) or 'another'}"


def _span(unit: str, first: int, last: int) -> str:
    if first == last:
        return f"{unit} {first:,}"
    return f"{unit}{'es' if unit == 'batch' else 's'} {first:,} to {last:,}"


def _distinct(seen: Seen, column: str) -> list[int]:
    return [int(one) for one in seen.rows[column].unique().sort()]


def _listed(what: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    few = ", ".join(map(str, numbers[:_NUMBERS])) + ", ..." * (len(numbers) > _NUMBERS)
    return f"{len(numbers):,} {what}s ({few})"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return clean(value, _ROW_NAME_CHARS) if isinstance(value, str) else str(value)


def _objects(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Rows as objects; of float32 the digits that it holds."""
    short = [
        pl.col(name).cast(pl.Float64).round_sig_figs(7)
        for name, kind in frame.schema.items()
        if kind == pl.Float32
    ]
    return frame.with_columns(short).to_dicts()
