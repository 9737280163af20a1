"""MosaicML Streaming: samples carry no ids; the index that each was read by travels with it."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "streaming", reason="MosaicML Streaming is not installed: pip install mosaicml-streaming"
)

import numpy as np
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
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader

from auditor import AuditedSampler, Run
from auditor.record.datasets import Numbered, NumberedStream

N = 60
T = 12


def tokens_of(number: int) -> np.ndarray:
    """Begin with the sample's number, which is its index in the dataset."""
    tokens = np.random.default_rng(number).integers(0, 50_000, T)
    tokens[0] = number
    return tokens


def write(folder: Path, first: int, n: int) -> str:
    """Shards of some samples: tokens, and nothing that names them."""
    with MDSWriter(out=str(folder), columns={"input_ids": "ndarray:int64"}, size_limit=1990) as out:
        for number in range(first, first + n):
            out.write({"input_ids": tokens_of(number)})
    return str(folder)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write(tmp_path_factory.mktemp("mds") / "shards", 0, N)
    assert len(list(Path(folder).glob("*.mds"))) > 2
    return folder


@pytest.fixture(autouse=True)
def forget_datasets() -> Iterator[None]:
    """One dataset at a time may read a folder: those of other tests are gone."""
    yield
    gc.collect()
    clean_stale_shared_memory()


def place_of(number: int, local: str) -> tuple[Any, ...]:
    """Where the index of the shards says that the sample lies."""
    row = number
    for shard in json.loads(Path(local, "index.json").read_text())["shards"]:
        if row < shard["samples"]:
            break
        row -= shard["samples"]
    return (str(number), None, str(Path(local, shard["raw_data"]["basename"])), row, T)


@pytest.fixture
def truth(local: str) -> Callable[[Any], list[tuple[Any, ...]]]:
    return lambda batch: [place_of(number, local) for number in numbers(batch["input_ids"])]


class Halved(StreamingDataset):
    """Reads samples its own way, as datasets that tokenise do."""

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        return {"input_ids": sample["input_ids"].copy(), "half": len(sample["input_ids"]) // 2}


def dataset(local: str, kind: type = StreamingDataset, **options: Any) -> Any:
    options = {"shuffle": True, "batch_size": 4, "shuffle_seed": 3, **options}
    return kind(local=local, **options)


LOADERS: dict[str, Callable[..., Any]] = {
    "StreamingDataLoader": lambda local, **options: StreamingDataLoader(
        dataset(local), batch_size=4, **options
    ),
    "DataLoader": lambda local, **options: DataLoader(dataset(local), batch_size=4, **options),
    "in order": lambda local, **options: StreamingDataLoader(
        dataset(local, shuffle=False), batch_size=4, **options
    ),
    "a dataset of one's own": lambda local, **options: StreamingDataLoader(
        dataset(local, Halved), batch_size=4, **options
    ),
}
every_loader = pytest.mark.parametrize("name", LOADERS)
zero_and_two = pytest.mark.parametrize("workers", [0, 2])


@zero_and_two
@every_loader
def test_samples_are_recorded_by_index_shard_and_row_over_epochs(
    name: str, workers: int, local: str, truth: Any, tmp_path: Path
) -> None:
    loader = LOADERS[name](local, num_workers=workers)
    table = assert_recorded_as_received(loader, tmp_path / "run", truth, epochs=2)
    assert table.height == 2 * N
    assert table["key"].to_list() == [int(name) for name in table["sample_id"]]


@zero_and_two
@every_loader
def test_batches_length_and_random_state_stay_the_same(
    name: str, workers: int, local: str, tmp_path: Path
) -> None:
    def make() -> Any:
        gc.collect()
        return LOADERS[name](local, num_workers=workers)

    epochs = assert_nothing_changes(make, tmp_path / "run")
    first, second = ([numbers(b["input_ids"]) for b in epoch] for epoch in epochs)
    assert (first == second) == (name == "in order")


def test_samples_reach_the_collate_function_as_the_dataset_made_them(
    local: str, tmp_path: Path
) -> None:
    kinds = []

    def collate(samples: list[Any]) -> dict[str, Any]:
        kinds.append({type(sample) for sample in samples})
        return {"input_ids": torch.stack([torch.from_numpy(s["input_ids"]) for s in samples])}

    loader = StreamingDataLoader(dataset(local, Halved), batch_size=4, collate_fn=collate)
    audited = AuditedSampler(loader, run=tmp_path / "run")
    for _ in itertools.islice(audited, 3):
        assert set(audited.dataset[5]) == {"input_ids", "half"}  # read by index, in the loop
        assert "__getitem__" not in vars(audited.dataset)
    audited.close()
    assert kinds == [{dict}] * 3


def resumed(make: Callable[[], Any], run: Path | None) -> dict[str, list[Any]]:
    """Four attempts in an epoch, each from the state of the one before alone."""
    found: dict[str, list[Any]] = {"batches": [], "states": [], "random": [], "log": []}
    for n_batches in (3, 4, 2, None):
        seed(len(found["states"]))
        gc.collect()
        optimizer = new_optimizer()
        loader = make()
        if run is not None:
            loader = AuditedSampler(loader, run=run, optimizer=optimizer)
        if found["states"]:
            loader.load_state_dict(found["states"][-1])
        for batch in itertools.islice(iter(loader), n_batches):
            take_step(optimizer)
            step = len(found["batches"])
            found["log"] += [
                (step, place, n) for place, n in enumerate(numbers(batch["input_ids"]))
            ]
            found["batches"].append(batch)
        found["states"].append(loader.state_dict())
        found["random"].append(random_state())
        if run is not None:
            loader.close()
        del loader
    return found


@zero_and_two
@pytest.mark.parametrize("name", ["StreamingDataLoader", "a dataset of one's own"])
def test_three_resumes_make_one_epoch_and_go_as_those_of_the_bare_loader(
    name: str, workers: int, local: str, truth: Any, tmp_path: Path
) -> None:
    def make() -> Any:
        return LOADERS[name](local, num_workers=workers)

    bare = resumed(make, None)
    audited = resumed(make, tmp_path / "run")
    assert bare["states"][0]["sample_in_epoch"] == 12
    for what in ("states", "batches", "random"):
        assert_equal(audited[what], bare[what])
    expected = [(step, place, *place_of(n, local)) for step, place, n in audited["log"]]
    assert recorded(tmp_path / "run") == expected
    assert sorted(n for _, _, n in audited["log"]) == list(range(N))


def test_streams_are_sources(tmp_path: Path) -> None:
    """A mix of two corpora, each a stream: its shards have the same names in both."""
    web = write(tmp_path / "web", 0, 40)
    books = write(tmp_path / "books", 40, 20)
    mixed = StreamingDataset(
        streams=[Stream(local=web), Stream(local=books)], shuffle=True, batch_size=4
    )

    def truth(batch: Any) -> list[tuple[Any, ...]]:
        places = []
        for number in numbers(batch["input_ids"]):
            source, first = (web, 0) if number < 40 else (books, 40)
            _, _, file, row, n = place_of(number - first, source)
            places.append((str(number), source, file, row, n))
        return places

    loader = StreamingDataLoader(mixed, batch_size=4, num_workers=2)
    assert_recorded_as_received(loader, tmp_path / "run", truth)


def test_shards_of_the_run_are_the_files_that_it_reads(local: str, tmp_path: Path) -> None:
    audited = AuditedSampler(LOADERS["DataLoader"](local), run=tmp_path / "run")
    audited.close()
    paths = [Path(shard["path"]) for shard in Run.open(tmp_path / "run").shards]
    assert paths == sorted(Path(local).glob("*.mds"))


class Pairs(StreamingDataset):
    """Makes one sample of two."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield {"input_ids": sample["input_ids"] + 1}
            break
        samples = super().__iter__()
        for one, other in zip(samples, samples, strict=False):
            yield {"input_ids": np.concatenate([one["input_ids"], other["input_ids"]])}


@zero_and_two
def test_a_sample_made_of_several_claims_no_index(workers: int, local: str, tmp_path: Path) -> None:
    loader = DataLoader(dataset(local, Pairs), batch_size=1, num_workers=workers)
    audited = AuditedSampler(loader, run=tmp_path / "run")
    received = list(audited)
    audited.close()
    run = Run.open(tmp_path / "run")
    assert run.gaps() == []
    table = run.scan("exposures").collect()
    assert table.height == len(received)
    paired = [len(batch["input_ids"][0]) > T for batch in received]
    assert any(paired)
    for is_pair, row in zip(paired, table["row"], strict=True):
        assert (row is None) == is_pair


def test_a_numbered_stream_passes_for_the_dataset_and_can_be_pickled(local: str) -> None:
    stream = NumberedStream(dataset(local))
    assert isinstance(stream, StreamingDataset)
    assert len(stream) == N
    assert stream[3]["input_ids"][0] == 3
    state = stream.state_dict(8, False)
    assert state["sample_in_epoch"] == 8
    first = next(iter(stream))
    assert isinstance(first, Numbered)
    assert first.sample["input_ids"][0] == first.index
    kind, arguments = stream.__reduce__()
    assert kind is NumberedStream
    assert arguments[0].size == N
    assert pickle.loads(pickle.dumps(kind)) is NumberedStream


def test_example_runs(tmp_path: Path) -> None:
    run = run_pipeline("mosaic_streaming.py", tmp_path, "--workers", "2")
    trained = run.scan("exposures").collect()
    assert trained["shard"].str.ends_with(".mds").all()
    assert trained["row"].is_not_null().all()
    assert trained["source"].n_unique() == 4
