"""Logs into a run directory of ours: signals per step, one attempt per process life."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from auditor.attempt import open_attempt
from auditor.errors import RunError
from auditor.explain.logs.attempts import Attempted, attempts_of
from auditor.explain.logs.columns import Chosen, Columns, choose
from auditor.explain.logs.log import LogError, NoRecordError, Progress
from auditor.explain.logs.recognise import read_log
from auditor.files import sha256
from auditor.ledger import NULL, Frame, LedgerWriter

_FRAME_STEPS: Final = 65_536
"""Steps in one frame of a ledger."""


@dataclass(frozen=True)
class Imported:
    """What was imported: the attempts, the columns of the log of each, and logs without records."""

    attempts: Sequence[Attempted]
    chosen: Sequence[Chosen]
    empty: Sequence[NoRecordError]


def import_logs(
    paths: Sequence[Path],
    out: Path,
    *,
    columns: Columns | None = None,
    format: str | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Write the run directory ``out`` from logs, which are attempts of one run in this order.

    A folder stands for the event files in it, in the order of their names. Of several logs those
    without a record are passed over. ``out`` appears when it is whole.

    Raises:
        LogError: a log cannot be read, or holds nothing that can be imported.
        RunError: ``out`` is there already, or cannot be written.
    """
    if out.exists():
        raise RunError("is there already", path=out, remedy="Choose a new folder for --out")
    columns = columns or Columns()
    attempts: list[Attempted] = []
    chosen: list[Chosen] = []
    empty: list[NoRecordError] = []
    for path in _files(paths):
        try:
            log = read_log(path, columns, format, progress)
        except NoRecordError as error:
            empty.append(error)
            continue
        own = choose(log, columns)
        found = attempts_of(log, own)
        attempts += found
        chosen += [own] * len(found)
    if not attempts:
        raise empty[0]
    with _appearing(out) as folder:
        for attempted, own in zip(attempts, chosen, strict=True):
            _write(folder, attempted, own)
    return Imported(attempts, chosen, empty)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise LogError("there is no such file", path=path, remedy="Give the path of a log")
            yield path
            continue
        events = sorted(path.glob("*tfevents*"))
        if not events:
            raise LogError(
                "a folder without TensorBoard event files",
                path=path,
                remedy="Give the log file itself",
            )
        yield from events


@contextlib.contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder that is there under its name only once it is whole."""
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        yield partial
        partial.rename(out)
    except OSError as error:
        raise RunError(
            f"cannot be written ({error.strerror or error})",
            path=out,
            remedy="Choose a writable folder",
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(run: Path, attempted: Attempted, chosen: Chosen) -> None:
    attempt = open_attempt(run)
    ledger = LedgerWriter(attempt.ledger("signals"))
    for signal, (steps, values) in attempted.series.items():
        for frame in _frames(signal, steps, values):
            ledger.append(frame)
    ledger.close()
    attempt.note(imported=_origin(attempted, chosen))
    counts = {what.replace(" ", "_"): count for what, count in attempted.skipped.items()}
    attempt.close(complete=True, counts=counts)


def _origin(attempted: Attempted, chosen: Chosen) -> Mapping[str, Any]:
    log = attempted.log
    return {
        "file": str(log.path),
        "sha256": sha256(log.path),
        "format": log.format,
        "columns": dict(chosen.columns),
    }


def _frames(signal: str, steps: np.ndarray, values: np.ndarray) -> Iterator[Frame]:
    """A series as the recorder would have written it."""
    if signal == "probe_loss":
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            yield _sample("probe", signal, step, value)
        return
    # In a frame of scalars nan stands for what was not measured, but for the loss.
    is_plain = np.ones(len(values), np.bool_) if signal == "loss" else ~np.isnan(values)
    plain_steps, plain = steps[is_plain], values[is_plain]
    for i in range(0, len(plain), _FRAME_STEPS):
        part = slice(i, i + _FRAME_STEPS)
        yield Frame("scalars", {}, {"step": plain_steps[part], signal: plain[part]})
    for step in steps[~is_plain].tolist():
        yield _sample("step", signal, step, float("nan"))


def _sample(kind: str, signal: str, step: int, value: float) -> Frame:
    nulls = {name: np.array([NULL], np.int32) for name in ("layer", "head", "n_rows")}
    strings: dict[str, list[str | None]] = {
        "kind": [kind],
        "signal": [signal],
        "site": [""],
        "segment": [None],
        "variant": [None],
    }
    return Frame("signals", {"step": step}, {"value": np.array([value]), **nulls}, strings)
