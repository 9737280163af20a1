"""Loops over a data source, with and without auditing, and what they received: the truth."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from auditor import AuditedSampler, Run

Truth = Callable[[Any], Iterable[tuple[Any, ...]]]
"""Of a batch as the loop received it, one tuple per sample: sample_id, source, shard, row,
n_tokens."""

IDENTITY = ("sample_id", "source", "shard", "row", "n_tokens")


def assert_equal(left: Any, right: Any) -> None:
    """Equal bit for bit: types, order of columns, dtypes and values."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for name in left:
            assert_equal(left[name], right[name])
    elif isinstance(left, list | tuple):
        for a, b in itertools.zip_longest(left, right):
            assert_equal(a, b)
    else:
        assert left == right


def random_state() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def seed(value: int = 7) -> None:
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def assert_nothing_changes(
    make: Callable[[], Any], run: Path, *, epochs: int = 2, **options: Any
) -> list[Any]:
    """Batches, their order and number, the length and all random states; returns the batches.

    ``make`` makes the loader anew; ``options`` are of the sampler.
    """

    def loop(audited: bool) -> tuple[Any, ...]:
        seed()
        loader = make()
        if audited:
            loader = AuditedSampler(loader, run=run, **options)
        batches = []
        for epoch in range(epochs):
            if hasattr(getattr(loader, "dataset", None), "set_epoch"):
                loader.dataset.set_epoch(epoch)
            batches.append(list(loader))
        try:
            length = len(loader)
        except TypeError:
            length = None
        if audited:
            loader.close()
        return batches, length, *random_state()

    bare, audited = loop(audited=False), loop(audited=True)
    assert_equal(list(audited), list(bare))
    assert Run.open(run).gaps() == []
    return bare[0]


def train(
    audited: AuditedSampler,
    optimizer: torch.optim.Optimizer,
    truth: Truth,
    *,
    n_batches: int | None = None,
    first_step: int = 0,
) -> list[tuple[Any, ...]]:
    """Train on the batches, a step each; returns what was received: step, position, identity."""
    log = []
    for step, batch in enumerate(itertools.islice(audited, n_batches), first_step):
        take_step(optimizer)
        log += [(step, position, *one) for position, one in enumerate(truth(batch))]
    return log


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """An update that depends on nothing."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def new_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def recorded(run: Path, *further: str) -> list[tuple[Any, ...]]:
    """Every exposure that was trained: step, position, identity; all of them must have been."""
    opened = Run.open(run)
    table = opened.scan("exposures", view="all").collect()
    assert opened.gaps() == []
    assert table["state"].unique().to_list() == ["trained"]
    return list(table.select("step", "position", *IDENTITY, *further).iter_rows())


def assert_recorded_as_received(
    loader: Any, run: Path, truth: Truth, *, epochs: int = 1, **options: Any
) -> pl.DataFrame:
    """Train over the loader, and compare the record with the loop's own log."""
    optimizer = new_optimizer()
    audited = AuditedSampler(loader, run=run, optimizer=optimizer, **options)
    log: list[tuple[Any, ...]] = []
    for epoch in range(epochs):
        if hasattr(getattr(audited, "dataset", None), "set_epoch"):
            audited.dataset.set_epoch(epoch)
        log += train(audited, optimizer, truth, first_step=log[-1][0] + 1 if log else 0)
    audited.close()
    assert log
    assert recorded(run) == log
    return Run.open(run).scan("exposures", view="all").collect()


def numbers(column: Any) -> Sequence[int]:
    """First token of every sample of a column of token ids, which the tests' data number by."""
    return [int(tokens[0]) for tokens in column]


def run_pipeline(name: str, out: Path, *arguments: str, steps: int = 20) -> Run:
    """Run an example as a user would; returns the run that it recorded."""
    script = Path(__file__).parents[2] / "pipelines" / name
    done = subprocess.run(
        [sys.executable, script, "--out", out, "--steps", str(steps), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (out / "run/derived/report.html").is_file(), done.stdout
    run = Run.open(out / "run")
    assert run.gaps() == []
    trained = run.scan("exposures").collect()
    assert trained["state"].unique().to_list() == ["trained"]
    assert trained["step"].unique().sort().to_list() == list(range(steps))
    return run
