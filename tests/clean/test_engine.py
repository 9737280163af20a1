"""Where stages run: workers that die, stages that fail, and memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jsonl_files import write_jsonl

from auditor.clean.dedupe import dedupe
from auditor.clean.engine import Engine, InProcess, Processes
from auditor.errors import ShardError

LOREM = " ".join(f"word{i}" for i in range(60))


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    engine = Processes(2)
    yield engine
    engine.close()


def square(task: int) -> int:
    return task * task


def die() -> None:
    """As if the system had ended the process for its memory: a worker, not the caller."""
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_once(task: tuple[Path, int]) -> int:
    """Kills the worker that tries a task first."""
    folder, number = task
    tried = folder / str(number)
    if not tried.exists():
        tried.touch()
        die()
    return number


def killed_always(task: int) -> int:
    time.sleep(0.05)  # nobody takes all tasks
    die()
    return task


def refused(task: tuple[Path, int]) -> None:
    """Task 0 is refused; a worker with another would write something, later."""
    folder, number = task
    if number == 0:
        raise ShardError("is damaged", path=folder / "0", row=7, remedy="Mend it")
    if multiprocessing.parent_process() is not None:
        time.sleep(20)
        (folder / f"ended-{number}").touch()


def missing(task: Path) -> bytes:
    return task.read_bytes()


def slow_process_id(_: int) -> int:
    time.sleep(0.1)
    return os.getpid()


@pytest.mark.parametrize("engine", [InProcess(), "processes"], ids=["one", "several"])
def test_results_come_in_the_order_of_the_tasks(engine: Any, processes: Processes) -> None:
    engine = processes if engine == "processes" else engine
    done: list[int] = []
    assert engine.map(square, range(20), done.append) == [i * i for i in range(20)]
    assert sorted(done) == [*range(20)]
    assert engine.map(square, [], done.append) == []


def test_tasks_whose_worker_was_killed_are_tried_again(
    processes: Processes, tmp_path: Path
) -> None:
    done: list[int] = []
    assert processes.map(killed_once, [(tmp_path, 0), (tmp_path, 1)], done.append) == [0, 1]
    assert sorted(done) == [0, 1]


def test_a_task_that_always_kills_its_worker_is_given_up(processes: Processes) -> None:
    with pytest.raises(ShardError, match=r"killed again and again.*fewer --workers"):
        processes.map(killed_always, range(20), lambda number: None)
    assert processes.map(square, [3, 4], lambda number: None) == [9, 16]


def test_the_calling_process_works_as_well(processes: Processes) -> None:
    at_work = set(processes.map(slow_process_id, range(20), lambda number: None))
    assert os.getpid() in at_work
    assert len(at_work) == 2


def test_a_script_that_starts_workers_as_it_is_imported_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from math import sqrt\n"
        "from auditor.clean.engine import Processes\n"
        "Processes(2).map(sqrt, [4.0, 9.0], print)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith('under if __name__ == "__main__":')
    assert "no worker process could be started" in done.stderr
    assert done.stderr.count("Traceback") == 1  # the caller's own


def test_what_a_stage_raises_arrives_whole_and_ends_the_other_tasks(
    processes: Processes, tmp_path: Path
) -> None:
    with pytest.raises(ShardError) as caught:
        processes.map(refused, [(tmp_path, i) for i in range(4)], lambda number: None)
    assert str(caught.value) == f"{tmp_path / '0'}, row 7: is damaged. Mend it"
    assert (caught.value.path, caught.value.row) == (tmp_path / "0", 7)
    with pytest.raises(FileNotFoundError) as lost:
        processes.map(missing, [tmp_path / "gone"] * 2, lambda number: None)
    assert lost.value.filename == str(tmp_path / "gone")
    assert not list(tmp_path.glob("ended-*"))
    assert processes.map(square, [3, 4], lambda number: None) == [9, 16]


def test_no_worker_outlives_what_a_stage_raised(processes: Processes, tmp_path: Path) -> None:
    workers = set(processes.map(slow_process_id, range(20), lambda number: None)) - {os.getpid()}
    with pytest.raises(ShardError):
        processes.map(refused, [(tmp_path, 0), (tmp_path, 1)], lambda number: None)
    assert workers
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


class Deadly:
    """Kills the worker of the first task of each stage, once."""

    def __init__(self, inner: Engine, folder: Path) -> None:
        self._inner = inner
        self._folder = folder
        self.killed: list[str] = []

    def map(self, stage: Callable[..., Any], tasks: Sequence[Any], done: Any) -> list[Any]:
        tried = self._folder / stage.__name__
        results = self._inner.map(partial(_deadly, stage, tried), tasks, done)
        self.killed += [stage.__name__] if tried.exists() else []
        return results

    def close(self) -> None:
        self._inner.close()


def _deadly(stage: Callable[[Any], Any], tried: Path, task: Any) -> Any:
    result = stage(task)
    if multiprocessing.parent_process() is not None and not tried.exists():
        tried.touch()
        die()
    time.sleep(0.05)  # the caller does not take all tasks
    return result


def test_a_worker_killed_in_every_stage_changes_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    for name in "abcd":
        rows = [{"text": LOREM}, {"text": name}, {"text": LOREM.replace("word59", name)}]
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", rows)
    alone = dedupe([tmp_path / "in"], tmp_path / "alone")
    (tmp_path / "tried").mkdir()
    deadly = Deadly(processes, tmp_path / "tried")
    told: list[tuple[str, int, int]] = []
    together = dedupe(
        [tmp_path / "in"],
        tmp_path / "out",
        engine=deadly,
        progress=lambda *event: told.append(event),
    )
    assert deadly.killed == ["scan_shard", "hash_rows", "write_shard"]
    assert together.document == alone.document
    for path in (tmp_path / "alone").rglob("*.jsonl"):
        other = tmp_path / "out" / path.relative_to(tmp_path / "alone")
        assert other.read_bytes() == path.read_bytes()
    # What was done twice is told once.
    assert [event for event in told if event[1] == event[2]] == [
        (stage, *(2 * (sum(p.stat().st_size for p in (tmp_path / "in").iterdir()),)))
        for stage in ("read", "compare", "write")
    ]


PEAK = """
import resource, sys
from auditor.clean.dedupe import dedupe
manifest = dedupe([sys.argv[1]], sys.argv[2])
assert manifest.counts["near"] == 100, manifest.counts
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_goes_by_rows_not_by_text(tmp_path: Path) -> None:
    """2,000 rows of 1 kB and of 50 kB, one in twenty of them a near-duplicate."""
    peaks = []
    for n_words in (125, 6250):
        path = tmp_path / f"{n_words}.jsonl"
        with path.open("w") as file:
            for i in range(2000):
                number = i - 1 if i % 20 == 19 else i
                words = [f"{(number * 7919 + k * k * 31) % 9999999:07d}" for k in range(n_words)]
                if number != i:
                    words[-1] = "other"
                file.write(json.dumps({"text": " ".join(words)}) + "\n")
        command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / f"out-{n_words}")]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(ended.stdout) / 1024)
    assert path.stat().st_size > 95e6
    assert peaks[1] - peaks[0] < 80, peaks
