"""One background thread: what the training thread leaves to it, in order, within bounds.

The training thread appends to a queue; it neither waits nor wakes anybody. The background thread
looks for tasks now and then, but often: samples that wait are objects which the garbage collector
has to visit. Between groups it sleeps for a moment, so that a training thread waiting for the
interpreter lock gets it there and not after CPython's switch interval of 5 ms. Short tasks are run
a group at a time.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Final

QUEUE_TASKS: Final = 1024
"""Tasks that may wait for the background thread."""

BUSY_POLL_S: Final = 0.02
IDLE_POLL_S: Final = 0.05
IDLE_AFTER_S: Final = 1.0
"""How often the thread looks for tasks: while they come, and when none has come for a while. To be
woken for each would cost the training thread more than the rest of the record."""

GROUP_TASKS: Final = 8
YIELD_S: Final = 50e-6
"""So many tasks are run between two sleeps: each time the interpreter lock changes hands costs the
training thread as much as a short task does."""

Task = Callable[[], None]


class Background:
    """Runs tasks in order, and ``idle`` between them and when there are none.

    Args:
        idle: called after each group of tasks and when the queue is empty, with whether it is;
            returns True while it has more to do, which it is then called for again.
        failed: told the task and the exception of a task, or of ``idle``.
    """

    def __init__(
        self, idle: Callable[[bool], bool], failed: Callable[[Task, Exception], None]
    ) -> None:
        self._idle = idle
        self._failed = failed
        self._tasks: collections.deque[Task] = collections.deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def n_waiting(self) -> int:
        return len(self._tasks)

    def submit(self, task: Task) -> bool:
        """Queue a task; False when the queue is full."""
        if self._thread is None:
            # Started here, at the first record, because loader workers fork before it.
            self._thread = threading.Thread(target=self._work, name="auditor-recorder", daemon=True)
            self._thread.start()
        n_waiting = len(self._tasks)
        if n_waiting >= QUEUE_TASKS:
            return False
        self._tasks.append(task)
        if n_waiting >= QUEUE_TASKS // 4 and not self._wake.is_set():
            self._wake.set()
        return True

    def hurry(self) -> None:
        """Let the thread look for tasks at once."""
        self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """Run what waits and end the thread; False when it took too long."""
        self._stopping = True
        self._wake.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        busy = time.monotonic()
        while True:
            if self._tasks:
                busy = time.monotonic()
                for _ in range(min(len(self._tasks), GROUP_TASKS)):
                    self._run(self._tasks.popleft())
                self._run_idle(empty=False)
                time.sleep(YIELD_S)
                continue
            if self._run_idle(empty=True):
                time.sleep(YIELD_S)
            elif self._stopping and not self._tasks:
                return
            else:
                idle = time.monotonic() - busy > IDLE_AFTER_S
                self._wake.wait(IDLE_POLL_S if idle else BUSY_POLL_S)
                self._wake.clear()

    def _run(self, task: Task) -> None:
        try:
            task()
        except Exception as error:
            self._failed(task, error)

    def _run_idle(self, *, empty: bool) -> bool:
        try:
            return self._idle(empty)
        except Exception as error:
            self._failed(_idling, error)
            return False


def _idling() -> None:
    """The task that ``idle`` is reported as."""
