"""Loaders whose class iterates in a way of its own: it sees its batches, and never our tags."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import Documents, exposures, received
from sources import (
    assert_equal,
    assert_nothing_changes,
    new_optimizer,
    random_state,
    seed,
    take_step,
)
from torch.utils.data import DataLoader

from auditor import AuditedSampler, Run


class Moving(DataLoader):
    """Puts every batch somewhere else, and counts what it yields."""

    n_yielded = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.n_yielded += len(batch["id"])
            yield {name: one.clone() if hasattr(one, "clone") else one[:] for name, one in
                   batch.items()}  # fmt: skip


class Ahead(DataLoader):
    """Fetches a batch before it yields the one before it."""

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        following = next(batches, None)
        while following is not None:
            batch, following = following, next(batches, None)
            yield batch


class AheadAndMoving(Ahead):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield dict(batch)


class Dropping(DataLoader):
    """Leaves every third batch out."""

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if number % 3 != 1:
                yield batch


class Merging(DataLoader):
    """Makes one batch of two."""

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        for one, other in zip(batches, batches, strict=False):
            yield {"input_ids": torch.cat([one["input_ids"], other["input_ids"]]),
                   "id": one["id"] + other["id"]}  # fmt: skip


zero_and_two = pytest.mark.parametrize("workers", [0, 2])


@zero_and_two
@pytest.mark.parametrize("kind", [Moving, Ahead, AheadAndMoving, Dropping])
def test_batches_are_recorded_as_they_come_out(
    kind: type[DataLoader], workers: int, tmp_path: Path
) -> None:
    loader = kind(Documents(), batch_size=8, shuffle=True, num_workers=workers)
    audited = AuditedSampler(loader, run=tmp_path / "run")
    log = [name for _ in range(2) for batch in audited for name in received(batch)]
    log += [name for batch in itertools.islice(audited, 3) for name in received(batch)]
    audited.close()
    assert Run.open(tmp_path / "run").gaps() == []
    table = exposures(tmp_path / "run")
    assert table["sample_id"].to_list() == log
    assert table["key"].to_list() == [int(name[4:]) for name in log]


@zero_and_two
@pytest.mark.parametrize("kind", [Moving, Ahead, AheadAndMoving, Dropping])
def test_batches_length_and_random_state_stay_the_same(
    kind: type[DataLoader], workers: int, tmp_path: Path
) -> None:
    assert_nothing_changes(
        lambda: kind(Documents(), batch_size=8, shuffle=True, num_workers=workers),
        tmp_path / "run",
    )


@zero_and_two
def test_batches_made_of_several_reach_the_loop_and_are_counted_as_untold(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(audited: bool) -> tuple[Any, ...]:
        seed()
        loader: Any = Merging(Documents(), batch_size=8, shuffle=True, num_workers=workers)
        if audited:
            loader = AuditedSampler(loader, run=tmp_path / "run")
        batches = list(loader)
        if audited:
            loader.close()
        return batches, *random_state()

    bare, audited = loop(audited=False), loop(audited=True)
    assert_equal(list(audited), list(bare))
    run = Run.open(tmp_path / "run")
    assert run.gaps() == [f"attempt 0, rank 0: write_batch failed {len(bare[0])} times"]
    assert "AuditedSampler.record" in caplog.text
    assert exposures(tmp_path / "run").height == 0


@zero_and_two
def test_what_the_loader_counts_is_reached_through_the_wrapper(
    workers: int, tmp_path: Path
) -> None:
    loader = Moving(Documents(), batch_size=8, num_workers=workers, persistent_workers=workers > 0)
    audited = AuditedSampler(loader, run=tmp_path / "run")
    for _ in range(2):
        list(itertools.islice(audited, 2))
    assert audited.n_yielded == 32
    audited.close()
    assert exposures(tmp_path / "run").height == 32


class Prefetcher:
    """A prefetcher: takes a batch before the last one is trained."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        ahead = next(batches, None)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            yield batch


@pytest.mark.parametrize("way", ["prefetcher wrapped", "record called"])
def test_batches_of_a_prefetcher_are_recorded_where_they_are_trained(
    way: str, tmp_path: Path
) -> None:
    """Wrapped inside of it, the loader's batches would count one step early."""
    optimizer = new_optimizer()
    prefetcher = Prefetcher(DataLoader(Documents(), batch_size=10))
    wraps = way == "prefetcher wrapped"
    audited = AuditedSampler(
        prefetcher if wraps else None, run=tmp_path / "run", optimizer=optimizer
    )
    log = []
    for step, batch in enumerate(audited if wraps else prefetcher):
        if not wraps:
            audited.record(batch["id"], batch)
        take_step(optimizer)
        log += [(step, name) for name in batch["id"]]
    audited.close()
    table = Run.open(tmp_path / "run").scan("exposures").collect()
    assert list(table.select("step", "sample_id").iter_rows()) == log
