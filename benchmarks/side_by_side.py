"""Many calls in processes side by side, with a bar: what benchmarks that train need."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """So many at a time, of one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield pool


def train(record: Callable[..., Any], calls: Sequence[Sequence[Any]], jobs: int) -> None:
    """Call ``record`` with each of the arguments; the bar is on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress, processes(jobs) as pool:
        bar = progress.add_task("trainings", total=len(calls))
        futures = [pool.submit(record, *arguments) for arguments in calls]
        for future in as_completed(futures):
            future.result()
            progress.advance(bar)
