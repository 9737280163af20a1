"""What was read from one log: numbers by the name they have there, in the order of the file."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from auditor.errors import AuditorError

Progress = Callable[[str, int, int], None]
"""Called with the stage, what is done of it and the whole, both in bytes."""

_LAST_STEP: Final = 2**62
_REPORT_EVERY: Final = 4096
"""Lines or records between two reports of progress."""


class LogError(AuditorError):
    """A training log cannot be read, or holds nothing that can be imported."""


class NoRecordError(LogError):
    """A log holds no record: beside others it can be passed over."""


@dataclass
class Skipped:
    """How often something in a log could not be used, and where it was met first."""

    count: int
    first: str


@dataclass
class Log:
    """Records of one log; made by the readers, through :meth:`add` and :meth:`skip`.

    ``skipped`` is by what the things are, in words: "lines that are no records".
    """

    path: Path
    format: str
    skipped: dict[str, Skipped] = field(default_factory=dict)
    _steps: array[int] = field(default_factory=lambda: array("q"))
    _series: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """The next record of the log: its step, and numbers by name."""
        record = len(self._steps)
        self._steps.append(step)
        for name, value in values.items():
            if name not in self._series:
                self._series[name] = array("q"), array("d")
            records, numbers = self._series[name]
            records.append(record)
            numbers.append(value)

    def skip(self, what: str, where: str, count: int = 1) -> None:
        """Count something that is not used; ``where`` is kept of the first."""
        self.skipped.setdefault(what, Skipped(0, where)).count += count

    @property
    def n_records(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> dict[str, int]:
        """Names in order of appearance, with how many numbers each has."""
        return {name: len(numbers) for name, (_, numbers) in self._series.items()}

    def series(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Records i64 [N], their steps i64 [N] and the numbers f64 [N] that have the name."""
        records, numbers = self._series[name]
        order = np.array(records, np.int64)
        return order, np.array(self._steps, np.int64)[order], np.array(numbers, np.float64)


def as_number(value: Any) -> float | None:
    """A number, or text that is one (``nan`` and ``inf`` are); None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and "_" in value:  # which Python takes for a separator
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def as_step(value: Any) -> int | None:
    """A step: a whole number from 0; None for everything else."""
    number = as_number(value)
    if number is None or not math.isfinite(number) or not 0 <= number < _LAST_STEP:
        return None
    if number != int(number):
        return None
    return value if isinstance(value, int) else int(number)


def lines_of(path: Path, progress: Progress | None) -> Iterator[tuple[int, str]]:
    """Lines with their number from 1. What a progress bar wrote over itself is several lines of
    one number; bytes that are no UTF-8 are replaced."""
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            done += len(raw)
            if progress is not None and (number % _REPORT_EVERY == 0 or done == total):
                progress("read", done, total)
            encoding = "utf-8-sig" if number == 1 else "utf-8"
            for line in raw.decode(encoding, "replace").rstrip("\r\n").split("\r"):
                yield number, line


def excerpt(text: str) -> str:
    """The beginning of a line, to be quoted."""
    text = text.strip()
    return repr(text if len(text) <= 50 else text[:49] + "…")
