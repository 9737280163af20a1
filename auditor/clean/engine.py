"""Where the stages of cleaning run: in this process, or in several on this machine.

A stage is a function of one small task. It leaves what it makes in the work folder, whole or not at
all, and finds it there when it is called again: so a worker that dies costs its task and no more.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Final, Protocol, TypeVar

from auditor.errors import ShardError

Progress = Callable[[str, int, int], None]
"""Called with a stage (read, pair, compare, write), what is done of it and what there is in all:
bytes of the shards, or groups of bands for pair."""

Task = TypeVar("Task")
Result = TypeVar("Result")

_ATTEMPTS: Final = 3
"""Times that a task is tried whose worker died: killed once is bad luck, thrice is its memory."""


_STAGES: Final = ("auditor.clean.scan", "auditor.clean.compare", "auditor.clean.write")


class Engine(Protocol):
    """Runs a stage over many tasks."""

    def map(
        self,
        stage: Callable[[Task], Result],
        tasks: Sequence[Task],
        done: Callable[[int], None],
    ) -> list[Result]:
        """Results in the order of the tasks; ``done`` gets the number of each one that is through.

        Raises what a stage raises, and ``ShardError`` where its worker keeps dying.
        """

    def close(self) -> None:
        """Let the workers go."""


class InProcess:
    """One task after the other."""

    def map(
        self,
        stage: Callable[[Task], Result],
        tasks: Sequence[Task],
        done: Callable[[int], None],
    ) -> list[Result]:
        results = []
        for number, task in enumerate(tasks):
            results.append(stage(task))
            done(number)
        return results

    def close(self) -> None:
        pass


class Processes:
    """Several processes of this machine: this one, and others that start at once.

    This one works as well: what it has loaded is put to use, and the first tasks are under way
    while the others still load. Those are spawned, not forked: a fork of a process that has threads
    can hang. A script that calls this needs ``if __name__ == "__main__":`` around what it does.
    """

    def __init__(self, n_processes: int) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # A worker that runs its caller's unguarded script again: the caller says what is wrong.
            sys.exit(1)
        self._n_workers = max(n_processes - 1, 1)
        self._pool: ProcessPoolExecutor | None = None
        self._loaded: Future[None] | None = None
        self._started()

    def map(
        self,
        stage: Callable[[Task], Result],
        tasks: Sequence[Task],
        done: Callable[[int], None],
    ) -> list[Result]:
        if len(tasks) < 2:
            return InProcess().map(stage, tasks, done)
        results: dict[int, Result] = {}
        for attempt in range(_ATTEMPTS):
            try:
                # What killed a worker may kill this process: it does not touch such tasks.
                self._share(stage, tasks, results, done, here=attempt == 0)
                return [results[number] for number in range(len(tasks))]
            except BrokenProcessPool:
                self._check_started()
                self.close()
        raise ShardError(
            "a worker process was killed again and again, most likely for its memory",
            remedy="Run the same command with fewer --workers: it goes on where it stopped",
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _share(
        self,
        stage: Callable[[Task], Result],
        tasks: Sequence[Task],
        results: dict[int, Result],
        done: Callable[[int], None],
        *,
        here: bool,
    ) -> None:
        """Do the tasks that have no result: each process takes the next one when it is free."""
        pool = self._started()
        left = iter([number for number in range(len(tasks)) if number not in results])
        one_at_a_time = threading.Lock()

        def take(run: Callable[[Task], Result]) -> None:
            try:
                for number in left:
                    result = run(tasks[number])
                    with one_at_a_time:
                        results[number] = result
                        done(number)
            finally:
                for _ in left:  # Where one has failed, nobody begins another.
                    pass

        with ThreadPoolExecutor(self._n_workers) as threads:
            try:
                others = [
                    threads.submit(take, lambda task: pool.submit(stage, task).result())
                    for _ in range(self._n_workers)
                ]
                if here:
                    take(stage)
                for other in as_completed(others):
                    other.result()
            except BrokenProcessPool:
                raise
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> None:
        """End the workers now: nobody may write to an output that others may begin to write."""
        if self._pool is not None:
            for worker in list((self._pool._processes or {}).values()):
                worker.kill()
            self.close()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._n_workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin_worker,
            )
            # All start with the first task.
            self._loaded = self._pool.submit(_load_stages)
        return self._pool

    def _check_started(self) -> None:
        """Tell what cannot start from what dies at work."""
        if self._loaded is not None and isinstance(self._loaded.exception(), BrokenProcessPool):
            raise ShardError(
                "no worker process could be started; what it printed, if any, is above",
                remedy='A script has to do its work under if __name__ == "__main__":',
            ) from None


def _begin_worker() -> None:
    # Ctrl-C reaches the workers as well: they leave without a word, the parent speaks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _load_stages() -> None:
    """Spend the time in which the caller loads its own modules."""
    for name in _STAGES:
        importlib.import_module(name)


def _leave_with_parent() -> None:
    """End this process when its parent has been killed: nobody waits for its work any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def told(stage: str, sizes: Sequence[int], tell: Progress) -> Callable[[int], None]:
    """The ``done`` of a map whose tasks have these sizes, as progress of a stage."""
    total, through = sum(sizes), 0
    tell(stage, 0, total)

    def done(number: int) -> None:
        nonlocal through
        through += sizes[number]
        tell(stage, through, total)

    return done
