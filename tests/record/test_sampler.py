"""What is recorded equals what the loop received; what the loop receives is what it would have."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from documents import Documents, N, Stream, exposures, received, tiny_transformer
from sources import assert_equal
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from auditor import AuditedSampler, GradeMonitor, Located, Run
from auditor.record.recorder import recorder_for


def own_collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Drops the source, changes the samples it is given, draws random numbers."""
    for sample in samples:
        sample.pop("source")
        sample["input_ids"] = sample["input_ids"].roll(int(torch.randint(0, 5, ())))
    return default_collate(samples)


LOADERS = {
    "map, no workers": (lambda: Documents(), {"shuffle": True}),
    "map, 2 workers": (lambda: Documents(), {"shuffle": True, "num_workers": 2}),
    "map, persistent workers": (
        lambda: Documents(),
        {"shuffle": True, "num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
    ),
    "map, 4 workers": (lambda: Documents(), {"num_workers": 4, "prefetch_factor": 1}),
    "map, spawn": (
        lambda: Documents(),
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ),
    "map, forkserver": (
        lambda: Documents(),
        {"num_workers": 2, "multiprocessing_context": "forkserver"},
    ),
    "map, own collate": (lambda: Documents(), {"collate_fn": own_collate}),
    "map, own collate, 2 workers": (
        lambda: Documents(),
        {"collate_fn": own_collate, "num_workers": 2},
    ),
    "map, own generator": (
        lambda: Documents(),
        {"shuffle": True, "generator": torch.Generator().manual_seed(5), "num_workers": 2},
    ),
    "drop_last": (lambda: Documents(), {"drop_last": True}),
    "iterable, no workers": (lambda: Stream(), {}),
    "iterable, 2 workers": (lambda: Stream(), {"num_workers": 2}),
}


@pytest.mark.parametrize("name", LOADERS)
def test_batches_order_and_random_state_are_those_of_the_bare_loader(
    name: str, tmp_path: Path
) -> None:
    make, options = LOADERS[name]

    def epochs(audited: bool) -> tuple[list[Any], torch.Tensor, int]:
        torch.manual_seed(7)
        if "generator" in options:
            options["generator"].manual_seed(5)
        loader: Any = DataLoader(make(), batch_size=8, **options)
        if audited:
            loader = AuditedSampler(loader, run=tmp_path / "run")
        batches = [list(loader) for _ in range(2)]
        n_batches = -1 if isinstance(loader.dataset, Stream) else len(loader)
        if audited:
            loader.close()
        return batches, torch.get_rng_state(), n_batches

    bare, bare_state, bare_length = epochs(audited=False)
    audited, audited_state, audited_length = epochs(audited=True)
    assert_equal(audited, bare)
    assert torch.equal(audited_state, bare_state)
    assert audited_length == bare_length


@pytest.mark.parametrize("name", LOADERS)
def test_recorded_exposures_equal_what_the_loop_received(name: str, tmp_path: Path) -> None:
    make, options = LOADERS[name]
    loader = AuditedSampler(DataLoader(make(), batch_size=8, **options), run=tmp_path / "run")
    model = torch.nn.Linear(48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    recorder_for(tmp_path / "run").watch(optimizer)
    log = []
    for step, batch in enumerate(loader):
        model(batch["input_ids"].float()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        log += [(step, position, name) for position, name in enumerate(received(batch))]
    loader.close()
    table = exposures(tmp_path / "run")
    assert table["state"].unique().to_list() == ["trained"]
    assert list(table.select("step", "position", "sample_id").iter_rows()) == log
    assert set(table["source"]) == {"a", "b"}
    assert set(table["n_tokens"]) == {48}


def test_accumulation_groups_micro_batches_and_the_epochs_tail(tmp_path: Path) -> None:
    loader = AuditedSampler(DataLoader(Documents(), batch_size=8), run=tmp_path / "run")
    model = torch.nn.Linear(48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    recorder_for(tmp_path / "run").watch(optimizer)
    for number, batch in enumerate(loader):  # 9 batches, 4 to a step: 4, 4, 1
        model(batch["input_ids"].float()).sum().backward()
        if number % 4 == 3 or number == len(loader) - 1:
            optimizer.step()
            optimizer.zero_grad()
    loader.close()
    sizes = exposures(tmp_path / "run").group_by("step").agg(pl.col("batch").n_unique())
    assert dict(sizes.sort("step").iter_rows()) == {0: 4, 1: 4, 2: 1}


def test_prefetched_batches_that_the_loop_never_took_are_not_recorded(tmp_path: Path) -> None:
    loader = AuditedSampler(
        DataLoader(Documents(700), batch_size=8, num_workers=2), run=tmp_path / "run"
    )
    log = []
    for number, batch in enumerate(loader):  # stops while workers are many batches ahead
        log += received(batch)
        if number == 2:
            break
    loader.close()
    table = exposures(tmp_path / "run")
    assert table["sample_id"].to_list() == log
    assert set(table["state"]) == {"delivered"}  # taken, and no step closed over them


@pytest.mark.parametrize("before", [True, False], ids=["before optimizer.step", "after it"])
@pytest.mark.parametrize("zero_grad_first", [True, False])
def test_monitor_and_optimizer_agree_on_steps(
    before: bool, zero_grad_first: bool, tmp_path: Path
) -> None:
    model, probe = tiny_transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = AuditedSampler(DataLoader(Documents(), batch_size=10), run=tmp_path / "run")
    monitor = GradeMonitor(model, run=tmp_path / "run", every=2, probe=probe)
    log = []
    for step, batch in enumerate(loader):
        if zero_grad_first:
            optimizer.zero_grad()
        loss = model(batch["input_ids"]).square().mean()
        loss.backward()
        if before:
            monitor.step(loss, optimizer=optimizer)
        optimizer.step()
        if not before:
            monitor.step(loss, optimizer=optimizer)
        if not zero_grad_first:
            optimizer.zero_grad()
        log += [(step, name) for name in received(batch)]
    monitor.close()
    table = exposures(tmp_path / "run")
    assert list(table.select("step", "sample_id").iter_rows()) == log
    losses = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "loss")
    assert losses.sort("step").collect()["step"].to_list() == list(range(7))


def test_step_that_the_optimizer_skipped_is_discarded_and_told_apart(tmp_path: Path) -> None:
    """As with mixed precision when gradients overflowed: backward ran, the update did not."""
    model, _ = tiny_transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = AuditedSampler(DataLoader(Documents(), batch_size=10), run=tmp_path / "run")
    monitor = GradeMonitor(model, run=tmp_path / "run", every=100)
    for number, batch in enumerate(loader):
        loss = model(batch["input_ids"]).square().mean()
        loss.backward()
        monitor.step(loss, optimizer=optimizer)
        if number not in {2, 3}:
            optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    table = exposures(tmp_path / "run").unique("batch", maintain_order=True)
    assert table["state"].to_list() == ["trained"] * 2 + ["discarded"] * 2 + ["trained"] * 3
    assert table["step"].to_list() == [0, 1, 2, 2, 2, 3, 4]


def test_loader_that_is_not_a_dataloader_is_told_by_content(tmp_path: Path) -> None:
    """A plain generator of batches, as with random windows of a memmap."""
    windows = [torch.randint(0, 50, (4, 32), generator=torch.Generator().manual_seed(i % 3))
               for i in range(6)]  # fmt: skip
    loader = AuditedSampler(windows, run=tmp_path / "run")
    assert all(a is b for a, b in zip(loader, windows, strict=True))
    loader.close()
    table = exposures(tmp_path / "run")
    keys = table["key"].to_numpy().reshape(6, 4)
    assert (keys[:3] == keys[3:]).all()
    assert len(np.unique(keys[:3])) == 12
    assert table["dup_window"].to_list() == [0.0] * 12 + [1.0] * 12


def test_bare_sampler_records_what_was_drawn_and_says_no_more(tmp_path: Path) -> None:
    batches = BatchSampler(RandomSampler(range(20)), batch_size=6, drop_last=False)
    audited = AuditedSampler(batches, run=tmp_path / "run")
    torch.manual_seed(0)
    drawn = list(audited)
    torch.manual_seed(0)
    assert drawn == list(batches)
    assert len(audited) == len(batches)
    audited.close()
    table = exposures(tmp_path / "run")
    assert table["key"].to_list() == [index for batch in drawn for index in batch]
    assert set(table["state"]) == {"drawn"}


def test_dataset_whose_items_are_batches_is_recorded_by_index(tmp_path: Path) -> None:
    loader = AuditedSampler(
        DataLoader(Documents(), batch_size=None, sampler=[5, 3, 8]), run=tmp_path / "run"
    )
    assert [sample["id"] for sample in loader] == ["doc-5", "doc-3", "doc-8"]
    loader.close()
    assert exposures(tmp_path / "run")["key"].to_list() == [5, 3, 8]


def test_locator_names_what_columns_do_not(tmp_path: Path) -> None:
    tokens = torch.arange(60).reshape(12, 5)
    loader = AuditedSampler(
        DataLoader(TensorDataset(tokens), batch_size=4),
        run=tmp_path / "run",
        locator=lambda index, sample: Located(
            sample_id=f"window-{index}", source="web", shard=f"s{index // 6}.bin", row=index % 6
        ),
    )
    list(loader)
    loader.close()
    table = exposures(tmp_path / "run")
    assert table["sample_id"].to_list() == [f"window-{i}" for i in range(12)]
    assert table["shard"].to_list() == ["s0.bin"] * 6 + ["s1.bin"] * 6
    assert table["n_tokens"].to_list() == [5] * 12


def test_skipped_batches_are_drawn_recorded_and_not_yielded(tmp_path: Path) -> None:
    loader = AuditedSampler(
        DataLoader(Documents(40), batch_size=10), run=tmp_path / "run", skip=[1, "doc-35"]
    )
    assert [batch["id"][0] for batch in loader] == ["doc-0", "doc-20"]
    loader.close()
    table = exposures(tmp_path / "run").unique("batch", maintain_order=True)
    assert table["state"].to_list() == ["delivered", "skipped", "delivered", "skipped"]


def test_duplicates_are_found_within_the_window_and_counted_over_the_run(tmp_path: Path) -> None:
    loader = AuditedSampler(DataLoader(Documents(), batch_size=10), run=tmp_path / "run")
    list(loader)
    list(loader)  # a second epoch: everything was seen before
    loader.close()
    table = exposures(tmp_path / "run")
    first, second = table.head(N), table.tail(N)
    repeats = [i % 7 == 0 and i > 0 for i in range(N)]
    assert [value >= 0.8 for value in first["duplication"]] == repeats
    assert [value > 0 for value in first["dup_run"]] == repeats
    assert (second["duplication"] == 1.0).all()
    for row in first.filter(pl.col("duplication") >= 0.8).iter_rows(named=True):
        assert row["dup_of"] % 7 == 0
        assert row["dup_of"] < row["key"]


def test_attributes_reach_the_loader_and_worker_code_reaches_the_dataset(tmp_path: Path) -> None:
    def shard(worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.n = 12  # the way the documentation shards an iterable dataset

    stream = Stream(40)
    loader = AuditedSampler(
        DataLoader(stream, batch_size=4, num_workers=1, worker_init_fn=shard), run=tmp_path / "run"
    )
    assert loader.dataset.n == 40
    assert loader.batch_size == 4
    assert sum(len(batch["id"]) for batch in loader) == 12
    with pytest.raises(AttributeError):
        _ = loader.no_such_thing
    loader.close()


def test_pickled_sampler_records_again(tmp_path: Path) -> None:
    loader = AuditedSampler(DataLoader(Documents(8), batch_size=4), run=tmp_path / "run")
    copy = pickle.loads(pickle.dumps(loader))
    loader.close()
    list(copy)
    copy.close()
    assert exposures(tmp_path / "run").height == 8


class Mapped(Dataset):
    """A dataset whose keys are text, and whose samples carry all sorts of columns."""

    def __getitem__(self, key: str) -> dict[str, Any]:
        return {"tokens": torch.arange(5) + len(key), "row": "seven", "flag": torch.tensor(3)}

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [2, None])
def test_keys_that_are_no_numbers_are_ids(
    workers: int, batch_size: int | None, tmp_path: Path
) -> None:
    names = ["a", "bb", "ccc", "dddd"]
    loader = AuditedSampler(
        DataLoader(Mapped(), batch_size=batch_size, sampler=names, num_workers=workers),
        run=tmp_path / "run",
    )
    list(loader)
    loader.close()
    assert exposures(tmp_path / "run")["sample_id"].to_list() == names


def test_a_buffer_that_the_loop_fills_again_is_recorded_as_it_was(tmp_path: Path) -> None:
    def windows() -> Iterator[torch.Tensor]:
        buffer = torch.zeros(4, 16, dtype=torch.int64)
        for i in range(40):
            buffer.copy_(torch.arange(64).reshape(4, 16) + 1000 * i)
            yield buffer

    loader = AuditedSampler(windows(), run=tmp_path / "run")
    list(loader)
    loader.close()
    assert exposures(tmp_path / "run")["key"].n_unique() == 160


def test_padding_under_an_attention_mask_is_no_content(tmp_path: Path) -> None:
    rows = [
        {"input_ids": torch.cat([torch.arange(20) + 100 * i, torch.zeros(44, dtype=torch.int64)]),
         "attention_mask": torch.cat([torch.ones(20), torch.zeros(44)])}
        for i in range(8)
    ]  # fmt: skip
    loader = AuditedSampler(DataLoader(rows, batch_size=4), run=tmp_path / "run")
    list(loader)
    loader.close()
    table = exposures(tmp_path / "run")
    assert table["repetition"].to_list() == [0.0] * 8
    assert table["duplication"].to_list() == [0.0] * 8
    assert table["n_tokens"].to_list() == [20] * 8


def test_loader_must_be_iterable(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int"):
        AuditedSampler(3, run=tmp_path / "run")


class Slow(Documents):
    """The first of every sixteen samples takes long, so that later batches overtake it."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 16 == 0:
            time.sleep(0.3)
        return super().__getitem__(index)


def test_batches_that_overtake_each_other_are_recorded_as_they_arrive(tmp_path: Path) -> None:
    """pytorch #141833: with ``in_order=False`` delivery is not the order of the sampler."""
    loader = AuditedSampler(
        DataLoader(Slow(64), batch_size=8, num_workers=2, in_order=False), run=tmp_path / "run"
    )
    log = [name for batch in loader for name in received(batch)]
    loader.close()
    assert log != sorted(log, key=lambda name: int(name[4:]))
    assert exposures(tmp_path / "run")["sample_id"].to_list() == log


class Counting(RandomSampler):
    """Counts what is drawn from it."""

    n_drawn = 0

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.n_drawn += 1
            yield index


def test_sampler_is_ahead_of_the_loop_and_the_record_is_not(tmp_path: Path) -> None:
    """lhotse #785: a sampler knows what workers will need, not what was trained."""
    sampler = Counting(Documents(640))
    loader = AuditedSampler(
        DataLoader(Documents(640), batch_size=8, sampler=sampler, num_workers=2, prefetch_factor=4),
        run=tmp_path / "run",
    )
    log = [name for batch in itertools.islice(loader, 5) for name in received(batch)]
    loader.close()
    assert sampler.n_drawn >= (5 + 2 * 4 - 1) * 8
    assert exposures(tmp_path / "run")["sample_id"].to_list() == log


class Failing(Documents):
    """Sample 20 cannot be read; where ``deadly``, sample 44 takes its worker with it."""

    deadly = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 20:
            raise OSError("sample 20 is damaged")
        if index == 44 and self.deadly:
            os._exit(1)
        return super().__getitem__(index)


def log_of_iteration(loader: Any) -> list[str]:
    """What arrives when the loop carries on after an exception, to the end or a worker's death."""
    names: list[str] = []
    iterator = iter(loader)
    while True:
        try:
            names += received(next(iterator))
        except OSError:
            names.append("damaged")
        except StopIteration:
            return names
        except RuntimeError:
            return [*names, "dead"]


def test_sample_that_cannot_be_read_costs_the_loop_what_it_would_have(tmp_path: Path) -> None:
    def loader() -> DataLoader:
        return DataLoader(Failing(), batch_size=8, num_workers=2)

    audited = AuditedSampler(loader(), run=tmp_path / "run")
    log = log_of_iteration(audited)
    audited.close()
    assert log.count("damaged") == 1
    assert log == log_of_iteration(loader())
    assert exposures(tmp_path / "run")["sample_id"].to_list() == [
        name for name in log if name != "damaged"
    ]


def test_worker_that_dies_ends_the_loop_and_what_came_before_is_recorded(tmp_path: Path) -> None:
    dataset = Failing()
    dataset.deadly = True
    audited = AuditedSampler(DataLoader(dataset, batch_size=8, num_workers=2), run=tmp_path / "run")
    log = log_of_iteration(audited)
    audited.close()
    assert log.pop() == "dead"
    assert exposures(tmp_path / "run")["sample_id"].to_list() == [
        name for name in log if name != "damaged"
    ]


def test_iteration_begins_when_it_would_without_us(tmp_path: Path) -> None:
    """A loader draws its seed when ``iter`` is called, not when the first batch is asked for."""

    def drawn(audited: bool) -> tuple[Any, torch.Tensor]:
        torch.manual_seed(3)
        loader: Any = DataLoader(Documents(), batch_size=8, shuffle=True)
        if audited:
            loader = AuditedSampler(loader, run=tmp_path / "run")
        iterator = iter(loader)
        number = torch.rand(1)
        return next(iterator), number

    (bare, bare_number), (audited, audited_number) = drawn(audited=False), drawn(audited=True)
    assert_equal(audited, bare)
    assert torch.equal(audited_number, bare_number)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [default_collate, own_collate])
def test_further_columns_are_kept_on_request(workers: int, collate: Any, tmp_path: Path) -> None:
    loader = AuditedSampler(
        DataLoader(Documents(), batch_size=8, num_workers=workers, collate_fn=collate),
        run=tmp_path / "run",
        columns=["index", "no such"] if collate is own_collate else ["index"],
    )
    list(loader)
    loader.close()
    samples = Run.open(tmp_path / "run").scan("samples").sort("key").collect()
    kept = [json.loads(text) for text in samples["columns"]]
    assert [one["index"] for one in kept] == list(range(N))
    assert all(one.get("no such") is None for one in kept)


def test_scores_of_the_latest_batch_are_at_hand_for_the_loop(tmp_path: Path) -> None:
    loader = AuditedSampler(DataLoader(Documents(), batch_size=14), run=tmp_path / "run")
    assert loader.last is None
    for number, _ in enumerate(loader):
        assert loader.flush()
        scores = loader.last
        assert scores is not None
        assert scores["batch"] == number
        assert scores["key"].tolist() == list(range(14 * number, 14 * number + 14))
        assert scores["dup_batch"][7] == 1.0  # every seventh repeats the first
        assert scores["dup_run"][7] == 2 * number + 1
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_ids_alone_are_recorded_without_scores_and_in_fewer_bytes(
    workers: int, tmp_path: Path
) -> None:
    for duplication in (True, False):
        loader = AuditedSampler(
            DataLoader(Documents(), batch_size=8, num_workers=workers),
            run=tmp_path / str(duplication),
            duplication=duplication,
        )
        list(loader)
        loader.close()
    table = exposures(tmp_path / "False")
    assert table["duplication"].null_count() == table["dup_run"].null_count() == N
    identity = ["sample_id", "source", "n_tokens", "batch", "position", "state"]
    assert table.select(identity).equals(exposures(tmp_path / "True").select(identity))


def first_four(samples: list[dict[str, Any]]) -> Any:
    return default_collate(samples[:4])


def twice(samples: list[dict[str, Any]]) -> Any:
    return [*samples, *samples]


def packed_in_pairs(samples: list[dict[str, Any]]) -> Any:
    """Ten documents in five rows."""
    tokens = torch.stack([one["input_ids"] for one in samples])
    return tokens.reshape(len(samples) // 2, -1), torch.ones(len(samples) // 2, 96)


def deep_inside(samples: list[dict[str, Any]]) -> Any:
    return [{"nested": (torch.zeros(3), [one["input_ids"] for one in samples])}]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("collate", "rows"), [(first_four, 4), (twice, 20), (packed_in_pairs, 5)])
def test_batches_of_other_length_than_their_samples_are_counted_and_told_once(
    collate: Any, rows: int, workers: int, tmp_path: Path, caplog: Any
) -> None:
    loader = AuditedSampler(
        DataLoader(Documents(), batch_size=10, num_workers=workers, collate_fn=collate),
        run=tmp_path / "run",
    )
    assert len(list(loader)) == 7
    loader.close()
    (told,) = [one.getMessage() for one in caplog.records if "collate" in one.getMessage()]
    assert f"{rows} rows of 10 samples" in told
    assert Run.open(tmp_path / "run").gaps() == [
        "attempt 0, rank 0: 7 batches with more or fewer rows than samples"
    ]
    assert exposures(tmp_path / "run").height == N


@pytest.mark.parametrize(
    "collate", [list, own_collate, deep_inside, lambda samples: tuple(zip(*samples, strict=True))]
)
def test_batches_whose_rows_are_their_samples_are_not_counted(collate: Any, tmp_path: Path) -> None:
    loader = AuditedSampler(
        DataLoader(Documents(), batch_size=10, collate_fn=collate), run=tmp_path / "run"
    )
    list(loader)
    loader.close()
    assert Run.open(tmp_path / "run").gaps() == []
