"""Progress of long commands, on standard error where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from auditor.cli.command import console

_IN_BYTES: Final = ("read", "compare", "write", "verify", "restore")
"""Stages that are told in bytes; of others the numbers have no unit."""


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar per stage, with its rate and the time that is left; None where nobody looks at it."""
    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("{task.description:<8}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, rate="")
            elapsed = bar.tasks[list(tasks).index(stage)].elapsed or 0.0
            rate = _rate(done, total, elapsed, in_bytes=stage in _IN_BYTES)
            bar.update(tasks[stage], completed=done, total=total, rate=rate)

        yield update


def _rate(done: int, total: int, elapsed_s: float, *, in_bytes: bool) -> str:
    """Rate so far, and the time that is left at this rate; nothing before anything is done."""
    if done <= 0 or elapsed_s <= 0:
        return ""
    left = f"{_duration((total - done) * elapsed_s / done)} left" if done < total else ""
    rate = f"{done / elapsed_s / 1e6:,.1f} MB/s" if in_bytes else ""
    return "  ".join(filter(None, (rate, left)))


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
