"""Which format a log has, told from its content."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from auditor.explain.logs.columns import Columns, role_of
from auditor.explain.logs.log import Log, LogError, NoRecordError, Progress, as_number
from auditor.explain.logs.objects import read_json, read_jsonl
from auditor.explain.logs.tables import delimiter_of, read_csv
from auditor.explain.logs.tensorboard import is_event_file, read_events
from auditor.explain.logs.text import are_two_columns, read_text, read_two_columns

READERS: Final[Mapping[str, Callable[[Path, Columns, Progress | None], Log]]] = {
    "text": read_text,
    "two-columns": read_two_columns,
    "csv": read_csv,
    "json": read_json,
    "jsonl": read_jsonl,
    "tensorboard": read_events,
}
"""By the names of ``--format``."""

_HEAD_BYTES: Final = 65_536
_BEGINS_JSON: Final = re.compile(r"[{\[]\s*|[{\[]\s*[\"{\[].*")
_POINTER: Final = b"version https://git-lfs.github.com/spec/"
_COMPRESSED: Final = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}


def read_log(
    path: Path, columns: Columns, format: str | None = None, progress: Progress | None = None
) -> Log:
    """Read a log in the format that is given, or the one its content shows.

    Raises:
        LogError: it holds no record, or cannot be one of the formats.
    """
    name = format_of(path, columns) if format is None else format
    log = READERS[name](path, columns, progress)
    if not log.n_records:
        raise NoRecordError(_without_records(log), path=path, remedy=_remedy(log))
    return log


def format_of(path: Path, columns: Columns) -> str:
    """The format of a log, a key of ``READERS``; a table may have its columns named by the user.

    Raises:
        LogError: the file is empty, compressed, a placeholder or binary.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.strip():
        raise NoRecordError("is empty", path=path, remedy="Give the log itself")
    if is_event_file(head):
        return "tensorboard"
    if head.startswith(_POINTER):
        raise LogError(
            "is a Git LFS pointer, not the file it stands for",
            path=path,
            remedy="Fetch the file with git lfs pull",
        )
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise LogError(f"is compressed with {name}", path=path, remedy="Decompress it first")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise LogError("is UTF-16", path=path, remedy="Save it as UTF-8")
    if b"\0" in head:
        raise LogError(
            "is binary, and no TensorBoard event file",
            path=path,
            remedy="Give a log as text, CSV, JSON or TensorBoard events",
        )
    lines = [line for line in head.decode("utf-8-sig", "replace").splitlines() if line.strip()]
    return _format_of_lines(lines, columns)


def _format_of_lines(lines: list[str], columns: Columns) -> str:
    first, second = lines[0].strip(), lines[1].strip() if len(lines) > 1 else ""
    if first.startswith(("{", "[")):
        is_document = _is_json(first)
        if is_document and second.startswith("{"):
            return "jsonl"
        if is_document or _BEGINS_JSON.fullmatch(first):
            return "json"
    if _is_header(first, second, columns):
        return "csv"
    if all(map(are_two_columns, lines[:3])):
        return "two-columns"
    return "text"


def _is_header(first: str, second: str, columns: Columns) -> bool:
    """Whether the first line names columns that are known, and the second has numbers in them."""
    delimiter = delimiter_of(first)
    if delimiter is None:
        return False
    names, *rows = csv.reader([first, second], delimiter=delimiter)
    has_step = columns.step_among(names) is not None
    if not second:
        return has_step
    cells = rows[0] if rows else []
    if len(cells) != len(names) or not any(as_number(cell) is not None for cell in cells):
        return False
    # A line of a text log also has a delimiter and speaks of a loss.
    return has_step or (any(map(role_of, names)) and not re.search("[:=]", first))


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _without_records(log: Log) -> str:
    if log.format == "tensorboard":
        return "an event file without scalars: the run wrote nothing but the header, or only others"
    skipped = "; ".join(
        f"{one.count} {what}, the first {one.first}" for what, one in log.skipped.items()
    )
    return f"no record was found{f': {skipped}' if skipped else ''}"


def _remedy(log: Log) -> str:
    if log.format == "tensorboard":
        return "Give the event files of a run that logged scalars"
    if log.format == "text":
        return (
            "A record is a line with a step and numbers, as in step:3/100 loss:2.1; of a text "
            "that tells of a run nothing can be imported: give the log it tells of"
        )
    return "Give --format if it was taken for what it is not, or --column step=NAME"
