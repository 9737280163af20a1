"""Stages that count how often they were begun, for workers of Ray to import."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from auditor.errors import ShardError


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to do, and a file that says how often it was begun."""

    path: Path
    number: int = 0


def tasks(folder: Path, n: int) -> list[Task]:
    return [Task(path=folder / f"{number}", number=number) for number in range(n)]


def begun(task: Task) -> int:
    """Times that a task was begun, this one included."""
    with task.path.open("a") as file:
        file.write(".")
    return task.path.stat().st_size


def square(task: Task) -> int:
    begun(task)
    return task.number**2


def die_once(task: Task) -> int:
    if begun(task) == 1 and task.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return task.number


def always_die(task: Task) -> None:
    begun(task)
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(task: Task) -> None:
    begun(task)
    raise ShardError("is torn", path=task.path, row=task.number, remedy="Mend it")


def refuse_or_sleep(task: Task) -> None:
    begun(task)
    if task.number == 0:
        raise ShardError("is torn", path=task.path)
    time.sleep(600)
