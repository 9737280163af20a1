"""torchdata's StatefulDataLoader: its state is the bare loader's, what it resumes is recorded."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchdata", reason="torchdata is not installed: pip install torchdata")

import torch
from sources import (
    assert_equal,
    assert_nothing_changes,
    assert_recorded_as_received,
    new_optimizer,
    numbers,
    random_state,
    recorded,
    run_pipeline,
    seed,
    take_step,
)
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful import Stateful

from auditor import AuditedSampler, Run
from auditor.record.tagging import _IndexedDataset

N = 60
T = 8


def sample(number: int) -> dict[str, Any]:
    tokens = torch.arange(1000 + number, 1000 + number + T)
    tokens[0] = number
    return {"input_ids": tokens, "id": f"doc-{number}", "source": "ab"[number % 2]}


def identity(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(f"doc-{i}", "ab"[i % 2], None, None, T) for i in numbers(batch["input_ids"])]


class Map(Dataset):
    """Counts what it was asked for, and keeps the count in its state."""

    def __init__(self) -> None:
        self.n_read = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.n_read += 1
        return sample(index)

    def state_dict(self) -> dict[str, Any]:
        return {"n_read": self.n_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_read = state["n_read"]


class Plain(Dataset):
    """Without a state of its own."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(index)


class Stream(IterableDataset):
    """Divides itself among the workers, and goes on from its state."""

    def __init__(self) -> None:
        self.n_yielded = 0
        self.resumed = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        mine = range(start, N, step)
        self.n_yielded, self.resumed = self.resumed, 0
        for number in mine[self.n_yielded :]:
            self.n_yielded += 1
            yield sample(number)

    def state_dict(self) -> dict[str, Any]:
        return {"n_yielded": self.resumed or self.n_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumed = state["n_yielded"]


SOURCES: dict[str, Callable[..., Any]] = {
    "in order": lambda **options: StatefulDataLoader(Plain(), batch_size=4, **options),
    "shuffled": lambda **options: StatefulDataLoader(
        Map(),
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(11),
        **options,
    ),
    "stream": lambda **options: StatefulDataLoader(Stream(), batch_size=4, **options),
}
WORKERS: dict[str, dict[str, Any]] = {
    "0 workers": {"num_workers": 0},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
    "2 workers, snapshots apart": {"num_workers": 2, "snapshot_every_n_steps": 3},
}

every_source = pytest.mark.parametrize("name", SOURCES)


@every_source
@pytest.mark.parametrize("workers", ["0 workers", "2 workers", "2 persistent workers"])
def test_batches_length_and_random_state_stay_the_same(
    name: str, workers: str, tmp_path: Path
) -> None:
    assert_nothing_changes(lambda: SOURCES[name](**WORKERS[workers]), tmp_path / "run")


@every_source
@pytest.mark.parametrize("workers", ["0 workers", "2 workers"])
def test_epochs_are_recorded_as_received(name: str, workers: str, tmp_path: Path) -> None:
    loader = SOURCES[name](**WORKERS[workers])
    assert_recorded_as_received(loader, tmp_path / "run", identity, epochs=2)


class Resumed:
    """Training that stops after some batches and goes on in a new process, from the state alone."""

    def __init__(self, make: Callable[[], Any], run: Path | None) -> None:
        self.make, self.run = make, run
        self.batches: list[Any] = []
        self.states: list[Any] = []
        self.states_after_loading: list[Any] = []
        self.random_states: list[Any] = []
        self.log: list[tuple[Any, ...]] = []

    def attempt(self, n_batches: int | None, *, ask_after_loading: bool) -> None:
        seed(len(self.states))
        optimizer = new_optimizer()
        loader = self.make()
        if self.run is not None:
            loader = AuditedSampler(loader, run=self.run, optimizer=optimizer)
        if self.states:
            loader.load_state_dict(self.states[-1])
            if ask_after_loading:
                self.states_after_loading.append(loader.state_dict())
        iterator = iter(loader)
        for batch in itertools.islice(iterator, n_batches):
            take_step(optimizer)
            step = len(self.batches)
            self.log += [(step, place, *one) for place, one in enumerate(identity(batch))]
            self.batches.append(batch)
        self.states.append(loader.state_dict())
        self.random_states.append(random_state())
        if self.run is not None:
            loader.close()


def resumed(
    make: Callable[[], Any], run: Path | None, *, ask_after_loading: bool = True
) -> Resumed:
    """Four attempts, of 3, 4 and 2 batches and of the rest of the epoch."""
    training = Resumed(make, run)
    for n_batches in (3, 4, 2, None):
        training.attempt(n_batches, ask_after_loading=ask_after_loading)
    return training


@pytest.mark.parametrize(
    ("workers", "ask_after_loading"),
    [
        ("0 workers", True),
        ("0 workers", False),
        ("2 workers", True),
        ("2 persistent workers", False),
        ("2 workers, snapshots apart", True),
    ],
)
@every_source
def test_three_resumes_make_one_epoch_and_go_as_those_of_the_bare_loader(
    name: str, workers: str, ask_after_loading: bool, tmp_path: Path
) -> None:
    """Every sample once: a state that is lost on the second resume repeats or misses some.

    torchdata #1437: a state asked for right after it was loaded is as the bare loader has it.
    """

    def make() -> Any:
        return SOURCES[name](**WORKERS[workers])

    bare = resumed(make, None, ask_after_loading=ask_after_loading)
    audited = resumed(make, tmp_path / "run", ask_after_loading=ask_after_loading)
    assert_equal(audited.batches, bare.batches)
    assert_equal(audited.states, bare.states)
    assert_equal(audited.states_after_loading, bare.states_after_loading)
    assert_equal(audited.random_states, bare.random_states)
    assert recorded(tmp_path / "run") == audited.log
    table = Run.open(tmp_path / "run").scan("exposures").collect()
    assert table["attempt"].unique().sort().to_list() == [0, 1, 2, 3]
    assert sorted(table["sample_id"]) == sorted(f"doc-{i}" for i in range(N))


@every_source
@pytest.mark.parametrize("workers", ["0 workers", "2 workers", "2 persistent workers"])
def test_state_is_the_bare_loaders_after_every_batch(
    name: str, workers: str, tmp_path: Path
) -> None:
    def states(audited: bool) -> list[Any]:
        seed()
        loader = SOURCES[name](**WORKERS[workers])
        if audited:
            loader = AuditedSampler(loader, run=tmp_path / "run")
        found = [loader.state_dict()]
        for _ in range(2):
            found += [loader.state_dict() for _ in loader]
            found.append(loader.state_dict())
        if audited:
            loader.close()
        return found

    assert_equal(states(audited=True), states(audited=False))


def test_batches_fetched_ahead_are_neither_recorded_nor_in_the_state(tmp_path: Path) -> None:
    loader = StatefulDataLoader(Plain(), batch_size=4, num_workers=2, prefetch_factor=4)
    optimizer = new_optimizer()
    audited = AuditedSampler(loader, run=tmp_path / "run", optimizer=optimizer)
    for _ in itertools.islice(audited, 3):
        take_step(optimizer)
    state = audited.state_dict()
    audited.close()
    assert [row[2] for row in recorded(tmp_path / "run")] == [f"doc-{i}" for i in range(12)]
    again = StatefulDataLoader(Plain(), batch_size=4, num_workers=2)
    again.load_state_dict(state)
    assert numbers(next(iter(again))["input_ids"]) == [12, 13, 14, 15]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("asked", [False, True])
def test_a_loader_that_was_resumed_before_it_is_audited_keeps_its_place(
    asked: bool, workers: int, tmp_path: Path
) -> None:
    def make() -> StatefulDataLoader:
        return StatefulDataLoader(Stream(), batch_size=4, num_workers=workers)

    first = make()
    iterator = iter(first)
    taken = [numbers(next(iterator)["input_ids"]) for _ in range(3)]
    loader = make()
    loader.load_state_dict(first.state_dict())
    if asked:
        loader.state_dict()  # which starts an iterator, ahead of the loop
    audited = AuditedSampler(loader, run=tmp_path / "run")
    taken += [numbers(batch["input_ids"]) for batch in audited]
    audited.close()
    assert sorted(itertools.chain(*taken)) == list(range(N))
    assert Run.open(tmp_path / "run").scan("exposures").collect().height == N - 12


def test_a_run_closed_before_the_state_is_loaded_goes_on_as_a_new_attempt(tmp_path: Path) -> None:
    audited = AuditedSampler(SOURCES["stream"](**WORKERS["2 persistent workers"]),
                             run=tmp_path / "run")  # fmt: skip
    list(itertools.islice(audited, 3))
    state = audited.state_dict()
    audited.close()
    audited.load_state_dict(state)
    audited.state_dict()
    rest = [one for batch in audited for one in numbers(batch["input_ids"])]
    audited.close()
    table = Run.open(tmp_path / "run").scan("exposures", view="all").collect()
    assert table.filter(attempt=1)["sample_id"].to_list() == [f"doc-{i}" for i in rest]
    assert len(rest) == N - 12


def test_a_dataset_with_a_state_has_it_without_being_asked_by_name() -> None:
    """Protocols look attributes up statically from Python 3.12 on."""
    for dataset, has_state in ((Map(), True), (Plain(), False)):
        wrapped = _IndexedDataset(dataset, batched=True)
        assert isinstance(wrapped, Stateful) == has_state
        found = inspect.getattr_static(wrapped, "load_state_dict", None)
        assert (found is not None) == has_state


def test_example_runs_and_its_resumed_half_follows_the_first(tmp_path: Path) -> None:
    run = run_pipeline("stateful_dataloader.py", tmp_path, "--workers", "2")
    trained = run.scan("exposures").collect()
    assert trained["attempt"].unique().sort().to_list() == [0, 1]
    assert trained["key"].n_unique() == trained.height
