"""JSON Lines, plain, gzip or zstd: streamed, and copied line by line without touching a byte.

Lines end at ``\\n`` alone (U+2028 and the like are content). Blank lines are not rows: rows are
numbered as ``datasets`` numbers them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from auditor.clean.formats.compression import (
    FAULTS,
    MAX_BYTES,
    compressed,
    compression_of,
    damaged,
    decompressed,
)
from auditor.clean.row import (
    PASSED_OVER,
    UNREADABLE,
    Cuts,
    Findings,
    Reading,
    Row,
    at,
    changed,
    choose_content,
    cut_cell,
    kind_of,
    row_of,
)
from auditor.errors import ShardError
from auditor.files import atomic
from auditor.schema import ID_COLUMNS, MASK_COLUMN, TEXT_COLUMNS

try:
    # 2 to 3 times as fast as json, and used where it is installed.
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

_N_ROWS_TO_CHOOSE = 64
"""Rows looked at before the content column is settled."""

_TOO_LONG = b""
"""Stands for a line of more than ``MAX_BYTES``."""


def files(path: Path) -> tuple[Path, ...]:
    return (path,)


def rows(path: Path, reading: Reading, findings: Findings) -> Iterator[Row]:
    """Rows in file order. Raises ``ShardError`` for a line that is not JSON unless skipping."""
    column: str | None = None
    held: list[Any] = []  # rows read before the content column is settled
    cut: ShardError | None = None
    lines = _lines(path, findings)
    row = 0
    while cut is None:
        try:
            line = next(lines, None)
        except ShardError as error:
            # Rows before a cut are read all the same.
            line, cut = None, error
        if line is not None and column is not None and not _is_wanted(row, reading):
            yield PASSED_OVER
            row += 1
            continue
        if line is not None:
            fields = _fields(path, row, line, column, reading, findings)
            if column is not None:
                yield _row(fields, column, reading, row, findings)
            else:
                held.append(fields)
            row += 1
        if held and (line is None or len(held) == _N_ROWS_TO_CHOOSE):
            column = _choose(held, reading, path)
            for earlier, fields in enumerate(held):
                yield _row(fields, column, reading, earlier, findings)
            held.clear()
        if line is None:
            break
    if cut is not None:
        raise cut


def copy(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading) -> None:
    """Write the kept rows' lines, byte for byte, compressed as the input is."""
    copy_cut(path, out, keep, reading, {})


def copy_cut(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading, cuts: Cuts) -> None:
    """``copy`` with spans cut out of some rows: their lines are written anew, the others as is."""
    column = _content_column(path, reading) if cuts else ""
    with atomic(out) as file, compressed(file, compression_of(path)) as sink:
        if reading.on_error == "skip" and not len(keep):
            return
        n_rows = 0
        try:
            for line in _lines(path, Findings(None)):
                if n_rows < len(keep) and keep[n_rows]:
                    if line is _TOO_LONG:
                        raise ShardError("too long to be copied", path=path, row=n_rows)
                    spans = cuts.get(n_rows)
                    sink.write(_without(line, spans, column, path, n_rows) if spans else line)
                n_rows += 1
        except ShardError:
            # Of a file that is cut off, what could be read is copied.
            if reading.on_error == "raise":
                raise
        if n_rows != len(keep):
            raise changed(path, len(keep), n_rows)


def count(path: Path, reading: Reading) -> int:
    """Rows of a shard, without parsing them."""
    return sum(1 for _ in _lines(path, Findings(None)))


def lost(path: Path, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Kept rows that cannot be copied, bool [n_rows]: lines that are too long."""
    cannot = np.zeros(len(keep), np.bool_)
    for row, line in enumerate(islice(_lines(path, Findings(None)), len(keep))):
        cannot[row] = keep[row] and line is _TOO_LONG
    return cannot


def _content_column(path: Path, reading: Reading) -> str:
    """The column that ``rows`` takes the content from."""
    lines = enumerate(islice(_lines(path, Findings(None)), _N_ROWS_TO_CHOOSE))
    skipping = replace(reading, on_error="skip")
    held = [_fields(path, row, line, None, skipping, Findings(None)) for row, line in lines]
    return _choose(held, reading, path)


def _without(
    line: bytes, spans: Sequence[tuple[int, int]], column: str, path: Path, row: int
) -> bytes:
    """A line without some spans of its content."""
    # Not by orjson: every number is to be written as it was read.
    fields = json.loads(line.decode("utf-8-sig"))
    name, within = column, fields
    if column not in fields:
        *parents, name = column.split(".")
        for parent in parents:
            within = within[parent]
    within[name] = cut_cell(within[name], fields.get(MASK_COLUMN), spans, path, row)
    text = json.dumps(fields, ensure_ascii=line.isascii())
    return text.encode("utf-8", "surrogatepass") + line[len(line.rstrip(b"\r\n")) :]


def _lines(path: Path, findings: Findings) -> Iterator[bytes]:
    """Raw lines that are not blank, line ends included, or ``_TOO_LONG``."""
    row = n_blank = 0
    try:
        with decompressed(path) as (file, trailing):
            for line in iter(partial(file.readline, MAX_BYTES), b""):
                if len(line) == MAX_BYTES and not line.endswith(b"\n"):
                    while (rest := file.readline(MAX_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    yield _TOO_LONG
                elif line.isspace():
                    n_blank += 1
                    continue
                else:
                    yield line
                row += 1
            if trailing():
                findings.notice(None, "bytes that are no part of it follow the compressed data")
    except FAULTS as error:
        raise damaged(path, row, error) from error
    if n_blank:
        findings.notice(None, f"{n_blank} blank lines, which are no rows")


def _fields(
    path: Path, row: int, line: bytes, column: str | None, reading: Reading, findings: Findings
) -> Any:
    """What a line holds, or ``UNREADABLE`` when skipping."""
    fields = _parse_fast(line, reading)
    is_plain = fields is not _NOT_PLAIN
    if not is_plain:
        try:
            fields = _parse(line, first=row == 0)
        except (ValueError, RecursionError) as error:
            refusal = _unreadable(path, row, line, error)
            if reading.on_error == "raise" or refusal.row is None:
                raise refusal from error
            findings.lost(row, refusal.message)
            return UNREADABLE
    if findings.wanted:
        _notice(row, line, fields, column, is_plain, findings)
    return fields


def _is_wanted(row: int, reading: Reading) -> bool:
    wanted = reading.wanted
    return wanted is None or (row < len(wanted) and bool(wanted[row]))


def _choose(held: list[Any], reading: Reading, path: Path) -> str:
    """The content column, by the first rows."""
    columns: dict[str, None] = {}
    for fields in held:
        if isinstance(fields, dict):
            columns.update(dict.fromkeys(fields))
    if not columns and all(fields is UNREADABLE for fields in held):
        return reading.content or TEXT_COLUMNS[0]
    return choose_content(columns, reading.content, path)


def _parse(line: bytes, *, first: bool) -> Any:
    if line is _TOO_LONG:
        raise ValueError(f"longer than {MAX_BYTES >> 20} MB")
    # json.loads on bytes would guess UTF-16 and UTF-32; a shard is UTF-8, with or without a mark.
    return json.loads(line.decode("utf-8-sig" if first else "utf-8"))


_NOT_PLAIN: Final = object()


def _parse_fast(line: bytes, reading: Reading) -> Any:
    """What ``_parse`` gives, or ``_NOT_PLAIN`` where orjson refuses the line or might differ."""
    if orjson is None:
        return _NOT_PLAIN
    try:
        fields = orjson.loads(line)
    except ValueError:
        return _NOT_PLAIN
    return _NOT_PLAIN if isinstance(fields, dict) and _has_huge(fields, reading) else fields


def _has_huge(fields: dict[str, Any], reading: Reading) -> bool:
    """Whether a value that is told on may be an integer that orjson made a float of."""
    values = [fields.get(name) for name in ID_COLUMNS]
    values += [at(fields, name) for name in reading.columns]
    return any(map(_is_huge, values))


def _is_huge(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_is_huge, value.values() if isinstance(value, dict) else value))
    return type(value) is float and abs(value) >= 2**63


def _row(fields: Any, column: str, reading: Reading, row: int, findings: Findings) -> Row:
    if fields is UNREADABLE:
        return UNREADABLE
    if not isinstance(fields, dict):
        findings.notice(row, f"is {kind_of(fields)}, not an object")
        return Row(None, None, None, columns=(None,) * len(reading.columns))
    return row_of(fields, column, reading.columns, row, findings)


def _notice(
    row: int, line: bytes, fields: Any, column: str | None, is_plain: bool, findings: Findings
) -> None:
    """What is odd about a line that could be parsed, as far as its bytes tell cheaply."""
    if row == 0 and line.startswith(b"\xef\xbb\xbf"):
        findings.notice(row, "begins with a byte order mark, which is no part of the row")
    if not is_plain and b"\\u" in line and _has_lone_surrogate(fields):
        findings.notice(row, "holds lone surrogates, which no UTF-8 text can")
    # Other keys than that of the content are not looked at.
    key = (column or TEXT_COLUMNS[0]).encode()
    if line.count(b'"%b"' % key) > 1 and (twice := _repeated_keys(line)):
        findings.notice(row, f"has {', '.join(twice)} more than once; the last counts")


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_lone_surrogate, [*value, *value.values()]))
    if isinstance(value, list):
        return any(map(_has_lone_surrogate, value))
    return isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value)


def _repeated_keys(line: bytes) -> list[str]:
    found: dict[str, None] = {}

    def hook(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            found.update((repr(name), None) for name in names if names.count(name) > 1)

    json.loads(line.decode("utf-8-sig"), object_pairs_hook=hook)
    return list(found)


def _unreadable(path: Path, row: int, line: bytes, error: Exception) -> ShardError:
    """The refusal of a line, or of the whole file (without a row) where it is no JSON Lines."""
    if row == 0 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return ShardError("is UTF-16, not UTF-8", path=path, remedy="Convert it to UTF-8")
    # What begins a list of objects, over one line or many.
    if row == 0 and line.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[" and not line.rstrip()[1:]:
        return _array(path)
    if row == 0 and line.lstrip()[:2] == b"[{":
        return _array(path)
    if isinstance(error, RecursionError):
        reason = "too deeply nested"
    elif str(error).startswith("Extra data"):
        reason = "more than one value"
    elif isinstance(error, json.JSONDecodeError):
        # Its line number is that within the value, which is always 1.
        reason = f"{error.msg} at character {error.pos + 1}"
    else:
        reason = str(error)
    return ShardError(
        f"not a line of JSON in UTF-8: {reason}",
        path=path,
        row=row,
        remedy="Repair the line, or drop such rows with --on-error skip",
    )


def _array(path: Path) -> ShardError:
    return ShardError(
        "is not JSON Lines but looks like one JSON array",
        path=path,
        remedy="Convert it to one object per line, for example with jq -c '.[]'",
    )
