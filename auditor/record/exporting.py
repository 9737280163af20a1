"""Signals of a running training sent to other tools, while it runs.

Each exporter has a thread and a bounded queue of its own: one that is slow or hangs blocks neither
training nor the other exporters. What does not fit on its queue is dropped and counted.
"""

from __future__ import annotations

import importlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

QUEUE_POINTS: Final = 1024
"""Points that may wait for one exporter."""

PER_STEP: Final = frozenset({"auditor/loss", "auditor/grad_norm", "auditor/lr"})
"""Metrics of every step; all others are those of sampled steps."""


PER_HEAD: Final = frozenset({"entropy"})
"""Signals with a row for each head of a block: too many for a chart, and summed up by others."""


class Exporter(Protocol):
    """Sends points somewhere. Any object with these two methods is one.

    Both are called from one thread, which is not the training thread. What they raise is counted,
    ``SystemExit`` and the like as well, and the next point is tried as if nothing had happened.
    """

    def export(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one step; ``values`` is read-only and shared with other exporters.

        A step may come more than once, with other metrics, and steps may come out of order: metrics
        of every step come many steps at a time, after those of a sampled step among them.
        """

    def close(self) -> None:
        """Send what is buffered; called once, after the last point."""


class Exporting:
    """Hands points to exporters, and never waits for them.

    Args:
        exporters: each gets every point.
        failed: told ``"exporter <class>"`` and what the exporter raised; called from its thread.

    ``dropped`` counts the points that an exporter did not get: one per exporter and point. In a
    forked child nothing is sent or closed: the threads are the parent's.
    """

    def __init__(
        self, exporters: Sequence[Exporter], failed: Callable[[str, Exception], None]
    ) -> None:
        self._lanes = [_Lane(exporter, failed) for exporter in exporters]
        self._process = os.getpid()
        self._closed = False

    @property
    def dropped(self) -> int:
        return sum(lane.dropped for lane in self._lanes)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Queue one point for every exporter; does nothing without values, or once closed.

        Called by one thread at a time. The exporters' threads start here, at the first point,
        because loader workers fork before it.
        """
        if not values or self._closed or os.getpid() != self._process:
            return
        point = (step, MappingProxyType(dict(values)))
        for lane in self._lanes:
            lane.send(point)

    def close(self, timeout_s: float) -> None:
        """Send what waits and close the exporters, giving the rest up after ``timeout_s`` seconds.

        An exporter that is not done by then counts as failed, with a ``TimeoutError``.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.join(deadline)


_Point = tuple[int, Mapping[str, float]]


class _Lane:
    """One exporter, its queue and its thread."""

    def __init__(self, exporter: Exporter, failed: Callable[[str, Exception], None]) -> None:
        self._exporter = exporter
        self._place = f"exporter {type(exporter).__name__}"
        self._failed = failed
        self._points: queue.SimpleQueue[_Point | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def send(self, point: _Point) -> None:
        if self._points.qsize() >= QUEUE_POINTS or not self._started():
            self.dropped += 1
        else:
            self._points.put(point)

    def end(self) -> None:
        if self._started():
            self._points.put(None)

    def join(self, deadline: float) -> None:
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            waiting = max(0, self._points.qsize() - 1)
            self.dropped += waiting
            self._failed(self._place, TimeoutError(f"not closed in time, {waiting} points waiting"))

    def _started(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="auditor-exporter", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads, or Python is about to exit
                self._failed(self._place, error)
                return False
            self._thread = thread
        return True

    def _work(self) -> None:
        while (point := self._points.get()) is not None:
            try:
                self._exporter.export(*point)
            except BaseException as error:  # sys.exit() would end this thread, and nothing else
                self._failed(self._place, _as_failure(error))
        try:
            self._exporter.close()
        except BaseException as error:
            self._failed(self._place, _as_failure(error))


def _as_failure(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(f"raised {error!r}")


def metrics_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The signal rows of one sampled step under stable names.

    ``PLACE`` is ``auditor/KIND/SIGNAL``, with ``/VARIANT`` and ``/SEGMENT`` where the row has them.

    - a row of a block: ``PLACE/layer_03``, the number with at least two digits; over the blocks,
      ``PLACE/min``, ``PLACE/mean`` and ``PLACE/max``;
    - a row of the embedding: ``PLACE/embedding``, which is not among those;
    - a row without a layer, and the grade: ``auditor/SIGNAL``.

    Values that are None or NaN are left out; a signal with no other has no names. So are the rows
    of single heads (``PER_HEAD``).
    """
    metrics: dict[str, float] = {}
    blocks: dict[str, list[float]] = {}
    for row in rows:
        value, layer = row["value"], row.get("layer")
        if value is None or math.isnan(value) or row["signal"] in PER_HEAD:
            continue
        if layer is None or row["signal"] == "grade":
            metrics[f"auditor/{row['signal']}"] = float(value)
            continue
        parts = (row["kind"], row["signal"], row.get("variant"), row.get("segment"))
        place = "/".join(["auditor", *(part for part in parts if part)])
        if layer < 0:
            metrics[f"{place}/embedding"] = float(value)
        else:
            metrics[f"{place}/layer_{layer:02d}"] = float(value)
            blocks.setdefault(place, []).append(float(value))
    for place, values in blocks.items():
        metrics[f"{place}/min"] = min(values)
        metrics[f"{place}/mean"] = sum(values) / len(values)
        metrics[f"{place}/max"] = max(values)
    return metrics


def required(module: str, *, extra: str) -> Any:
    """The optional module.

    Exporters import when they are made, not on their thread: a worker forked while another thread
    imports would wait for ever for the lock of that import.

    Raises:
        ImportError: it is not installed; names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}); pip install 'auditor[{extra}]' installs it"
        ) from error
