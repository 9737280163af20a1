"""Logs as JSON: HF Trainer's ``trainer_state.json``, Megatron's golden values, W&B's summary, a
list of records, and JSON Lines.

Objects in a record are flattened: ``{"train": {"loss": 1}}`` is ``train/loss``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from auditor.explain.logs.columns import Columns
from auditor.explain.logs.log import Log, LogError, Progress, as_number, as_step, excerpt, lines_of

NO_OBJECT: Final = "lines that are no JSON objects"
NO_STEP: Final = "records without a step"
NOT_MEASURED: Final = "steps at which every metric is nan: taken as not measured"


def read_json(path: Path, columns: Columns, progress: Progress | None = None) -> Log:
    """Read a JSON document, whichever of the known kinds it is.

    Raises:
        LogError: it is no JSON, or none of the kinds.
    """
    size = path.stat().st_size
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise LogError(
            f"byte {error.start} is no UTF-8", path=path, remedy="Save it as UTF-8"
        ) from None
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"line {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        what = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise LogError(
            f"{where}no JSON ({what})",
            path=path,
            remedy="Copy it again, or give --format if it is something else",
        ) from None
    log = _of_document(path, document, columns)
    if progress is not None:
        progress("read", size, size)
    return log


def _of_document(path: Path, document: Any, columns: Columns) -> Log:
    if isinstance(document, dict) and isinstance(document.get("log_history"), list):
        return _of_records(Log(path, "trainer-state"), document["log_history"], columns)
    if isinstance(document, list):
        return _of_records(Log(path, "json"), document, columns)
    if isinstance(document, dict) and _are_golden_values(document):
        return _of_golden_values(Log(path, "golden-values"), document)
    if isinstance(document, dict) and columns.step_among(_flat(document)) is not None:
        return _of_records(Log(path, "summary"), [document], columns)
    raise LogError(
        "is JSON, but no log: neither log_history, nor values by step, nor records with a step",
        path=path,
        remedy="Write it as JSON Lines, one object with a step per line; a step of another name "
        "is given as --column step=NAME",
    )


def read_jsonl(path: Path, columns: Columns, progress: Progress | None = None) -> Log:
    """Read JSON Lines: one object per line, with a step in each."""
    log = Log(path, "jsonl")
    for number, line in lines_of(path, progress):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            _add(log, record, columns, f"line {number}: {excerpt(line)}")
        else:
            log.skip(NO_OBJECT, f"line {number}: {excerpt(line)}")
    return log


def _of_records(log: Log, records: list[Any], columns: Columns) -> Log:
    for number, record in enumerate(records):
        if isinstance(record, dict):
            _add(log, record, columns, f"record {number}: {excerpt(json.dumps(record))}")
        else:
            log.skip("entries that are no objects", f"record {number}: {excerpt(repr(record))}")
    return log


def _add(log: Log, record: Mapping[str, Any], columns: Columns, where: str) -> None:
    flat = _flat(record)
    name = columns.step_among(flat)
    step = None if name is None else as_step(flat[name])
    if step is None:
        log.skip(NO_STEP, where)
        return
    numbers = ((key, as_number(value)) for key, value in flat.items() if key != name)
    log.add(step, {key: value for key, value in numbers if value is not None})


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are no objects, by their path."""
    flat: dict[str, Any] = {}
    waiting: list[tuple[str, Mapping[str, Any]]] = [("", record)]
    while waiting:
        prefix, one = waiting.pop(0)
        for key, value in one.items():
            if isinstance(value, dict):
                waiting.append((f"{prefix}{key}/", value))
            else:
                flat.setdefault(f"{prefix}{key}", value)
    return flat


def _are_golden_values(document: Mapping[str, Any]) -> bool:
    return bool(document) and all(
        isinstance(metric, dict) and isinstance(metric.get("values"), dict | list)
        for metric in document.values()
    )


def _of_golden_values(log: Log, document: Mapping[str, Any]) -> Log:
    """Megatron's golden values: metric -> values by step, or a list with start and interval."""
    by_step: dict[int, dict[str, float]] = {}
    for name, metric in document.items():
        for step, value in _steps_of(metric):
            place, number = as_step(step), as_number(value)
            if place is None or number is None:
                log.skip("values without a step or number", f"{name}: {step!r}: {value!r}")
            else:
                by_step.setdefault(place, {})[name] = number
    for step in sorted(by_step):
        values = by_step[step]
        # The writer fills in nan where a run logged nothing, for bytes of memory as well.
        if len(document) > 1 and all(map(math.isnan, values.values())):
            log.skip(NOT_MEASURED, f"step {step}")
        else:
            log.add(step, values)
    return log


def _steps_of(metric: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    values = metric["values"]
    if isinstance(values, dict):
        yield from values.items()
        return
    start, interval = metric.get("start_step", 0), metric.get("step_interval", 1)
    for i, value in enumerate(values):
        yield start + i * interval, value
