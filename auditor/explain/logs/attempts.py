"""One log as the attempts of a run: a step that goes back is a restart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from auditor.explain.logs.columns import Chosen
from auditor.explain.logs.log import Log, LogError

Series = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Steps [N], in order and each once, and the values [N]."""

REPEATED: Final = "records that repeat an earlier one"
LOGGED_TWICE: Final = "values of a step logged twice, the last is taken"

_MANY: Final = 10
_FEW_RECORDS: Final = 5
"""More restarts than ``_MANY`` with fewer records each than this are no restarts."""


@dataclass(frozen=True)
class Attempted:
    """One process life as a log has it: series by signal, and what was passed over, counted."""

    log: Log
    series: Mapping[str, Series]
    skipped: Mapping[str, int]

    @property
    def first_step(self) -> int:
        return min(int(steps[0]) for steps, _ in self.series.values())

    @property
    def last_step(self) -> int:
        return max(int(steps[-1]) for steps, _ in self.series.values())


@dataclass
class _Part:
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    twice: int = 0

    def goes_back(self, step: int, record: Mapping[str, float]) -> bool:
        return any(step < self.last.get(signal, step) for signal in record)

    def repeats(self, step: int, record: Mapping[str, float]) -> bool:
        """Whether everything in the record was in the part before, to the digit."""
        return all(
            _same(self.values.get(signal, {}).get(step), value) for signal, value in record.items()
        )

    def add(self, step: int, record: Mapping[str, float]) -> None:
        for signal, value in record.items():
            known = self.values.setdefault(signal, {})
            self.twice += step in known
            known[step] = value
            self.last[signal] = step


def attempts_of(log: Log, chosen: Chosen) -> list[Attempted]:
    """The attempts that a log holds, in its order.

    A new one begins where a signal's step is smaller than its last. Records that repeat earlier
    ones to the digit, as a summary at the end does, begin none.

    Raises:
        LogError: the steps are in no order.
    """
    parts = [_Part()]
    for step, record in _records(log, chosen):
        part = parts[-1]
        if part.repeats(step, record):
            part.repeated += 1
            continue
        if part.goes_back(step, record):
            part = _Part()
            parts.append(part)
        part.add(step, record)
    if len(parts) > _MANY and log.n_records < _FEW_RECORDS * len(parts):
        raise LogError(
            f"the step goes back {len(parts) - 1} times in {log.n_records} records: this is not "
            "the order of a training",
            path=log.path,
            remedy="Sort the records by step, and give the records of one rank only",
        )
    of_file = {what: one.count for what, one in log.skipped.items()}
    attempts = []
    for number, part in enumerate(parts):
        own = {REPEATED: part.repeated, LOGGED_TWICE: part.twice}
        counts = {**(of_file if number == 0 else {}), **own}
        attempts.append(
            Attempted(
                log,
                {signal: _series(values) for signal, values in part.values.items()},
                {what: count for what, count in counts.items() if count},
            )
        )
    return attempts


def _records(log: Log, chosen: Chosen) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and values by signal of each record that has any, in the order of the log."""
    columns = [(signal, *log.series(name)) for signal, name in chosen.columns.items()]
    order = np.concatenate([records for _, records, _, _ in columns])
    of_signal = np.concatenate([np.full(len(c[1]), i) for i, c in enumerate(columns)])
    steps = np.concatenate([steps for _, _, steps, _ in columns])
    values = np.concatenate([values for _, _, _, values in columns])
    by_record = np.argsort(order, kind="stable")
    now, step, record = -1, 0, dict[str, float]()
    rows: Any = (of[by_record].tolist() for of in (order, of_signal, steps, values))
    for place, signal, at, value in zip(*rows, strict=True):
        if place != now and record:
            yield step, record
            record = {}
        now, step = place, at
        record[columns[signal][0]] = value
    if record:
        yield step, record


def _series(values: Mapping[int, float]) -> Series:
    steps = np.fromiter(values.keys(), np.int64, len(values))
    numbers = np.fromiter(values.values(), np.float64, len(values))
    order = np.argsort(steps)
    return steps[order], numbers[order]


def _same(known: float | None, value: float) -> bool:
    return known is not None and (known == value or (known != known and value != value))
