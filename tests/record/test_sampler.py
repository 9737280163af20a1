"""What is recorded equals what the loop received; what the loop receives is what it would have."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

from auditor import AuditedSampler, GradeMonitor, Located, Run
from auditor.errors import RunClaimedError
from auditor.record.recorder import QUEUE_TASKS, recorder_for

N = 70


class Documents(Dataset):
    """Rows with tokens, an id and a source; every seventh row repeats row 0."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        seed = 0 if index % 7 == 0 else index
        tokens = torch.randint(0, 1000, (48,), generator=torch.Generator().manual_seed(seed))
        return {
            "input_ids": tokens,
            "id": f"doc-{index}",
            "source": "ab"[index % 2],
            "index": index,
        }


class Stream(IterableDataset):
    """An iterable dataset that shards itself over workers."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        documents = Documents(self.n)
        return (documents[i] for i in range(start, self.n, step))


def exposures(run: Path) -> pl.DataFrame:
    return Run.open(run).scan("exposures", view="all").collect()


def received(batch: dict[str, Any]) -> list[str]:
    """The independent log: what the loop itself saw in the batch."""
    return list(batch["id"])


def assert_equal_batches(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for name in left:
            assert_equal_batches(left[name], right[name])
    elif isinstance(left, list | tuple):
        for a, b in itertools.zip_longest(left, right):
            assert_equal_batches(a, b)
    else:
        assert left == right


LOADERS = {
    "map, no workers": (lambda: Documents(), {"shuffle": True}),
    "map, 2 workers": (lambda: Documents(), {"shuffle": True, "num_workers": 2}),
    "map, persistent workers": (
        lambda: Documents(),
        {"shuffle": True, "num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
    ),
    "map, spawn": (
        lambda: Documents(),
        {"num_workers": 1, "multiprocessing_context": "spawn"},
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
    assert_equal_batches(audited, bare)
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
    model, probe = _tiny_transformer()
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
    model, _ = _tiny_transformer()
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


def test_resume_opens_an_attempt_and_readers_see_each_step_once(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def train(start: int | None, n_steps: int) -> None:
        loader = AuditedSampler(DataLoader(Documents(), batch_size=8), run=run, start_step=start)
        model = torch.nn.Linear(48, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        recorder_for(run).watch(optimizer)
        for batch in itertools.islice(loader, n_steps):
            model(batch["input_ids"].float()).sum().backward()
            optimizer.step()
        loader.close()

    train(None, 6)  # steps 0 to 5
    train(4, 3)  # rolled back to a checkpoint: 4 to 6
    train(None, 2)  # goes on: 7, 8
    table = Run.open(run).scan("exposures").collect()
    attempts = table.group_by("step").agg(pl.col("attempt").unique()).sort("step")
    assert dict(attempts.iter_rows()) == {
        **{key: [0] for key in range(4)},
        **{key: [1] for key in range(4, 7)},
        **{key: [2] for key in range(7, 9)},
    }
    everything = Run.open(run).scan("exposures", view="all").collect()
    assert everything.height == 11 * 8


def test_second_live_process_on_one_run_is_refused_and_a_dead_one_is_taken_over(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    program = (
        "import sys, time\n"
        "from auditor.record.recorder import recorder_for\n"
        "recorder_for(sys.argv[1]); print('open', flush=True); time.sleep(600)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(run)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(RunClaimedError, match=f"process {other.pid}"):
            AuditedSampler(DataLoader(Documents()), run=run)
    finally:
        other.kill()
        other.wait()
    loader = AuditedSampler(DataLoader(Documents()), run=run)
    loader.close()
    assert [attempt["attempt"] for attempt in Run.open(run).attempts] == [0, 1]
    assert any("killed" in gap for gap in Run.open(run).gaps())


def test_run_of_a_killed_process_is_readable_up_to_the_last_moments(tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = (
        "import sys, time, torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "from auditor import AuditedSampler\n"
        "from auditor.record.recorder import recorder_for\n"
        "data = TensorDataset(torch.arange(10**6)[:, None].expand(-1, 16))\n"
        "model = torch.nn.Linear(16, 1); o = torch.optim.SGD(model.parameters(), lr=1e-9)\n"
        "loader = AuditedSampler(DataLoader(data, batch_size=4), run=sys.argv[1], optimizer=o)\n"
        "for i, (batch,) in enumerate(loader):\n"
        "    model(batch.float()).sum().backward(); o.step()\n"
        "    print(i, flush=True); time.sleep(0.002)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(run)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = -1
    deadline = time.monotonic() + 90
    while last < 300 and time.monotonic() < deadline:
        last = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().split()
    last = int(rest[-1]) if rest and rest[-1].isdigit() else last
    process.wait()
    table = exposures(run).filter(pl.col("state") == "trained")
    steps = table["step"].unique().sort().to_list()
    assert steps == list(range(len(steps)))
    assert len(steps) >= last - 100  # the stated bound
    assert table["key"].to_list() == list(range(len(steps) * 4))


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


def broken_locator(index: Any, sample: Any) -> Located:
    raise RuntimeError("a bug in the locator")


@pytest.mark.parametrize("workers", [0, 1])
def test_failure_of_ours_never_reaches_the_loop(workers: int, tmp_path: Path, caplog: Any) -> None:
    loader = AuditedSampler(
        DataLoader(Documents(), batch_size=8, num_workers=workers, timeout=30 if workers else 0),
        run=tmp_path / "run",
        locator=broken_locator,
    )
    assert len(list(loader)) == 9
    loader.close()
    assert len([one for one in caplog.records if "a bug in the locator" in one.getMessage()]) == 1
    attempt = json.loads((tmp_path / "run/attempts/rank-00000/attempt-0000.json").read_text())
    assert sum(attempt["failures"].values()) == 9
    assert Run.open(tmp_path / "run").gaps()


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


def test_two_datasets_and_two_attempts_do_not_mix_up_their_samples(tmp_path: Path) -> None:
    class Named(Documents):
        def __init__(self, name: str) -> None:
            super().__init__(8)
            self.name = name

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {
                "text": f"{self.name} {index}",
                "id": f"{self.name}{index}",
                "source": self.name,
            }

    run = tmp_path / "run"
    first = AuditedSampler(DataLoader(Named("A"), batch_size=4), run=run)
    second = AuditedSampler(DataLoader(Named("B"), batch_size=4), run=run)
    for _ in zip(first, second, strict=True):
        pass
    first.close()
    third = AuditedSampler(DataLoader(Named("C"), batch_size=4), run=run)
    list(third)
    third.close()
    table = exposures(run)
    assert table["sample_id"].to_list() == [
        *(f"{name}{i}" for start in (0, 4) for name in "AB" for i in range(start, start + 4)),
        *(f"C{i}" for i in range(8)),
    ]
    assert dict(table["source"].value_counts().iter_rows()) == {"A": 8, "B": 8, "C": 8}


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


def test_optimizer_without_hooks_leaves_the_steps_to_the_monitor(tmp_path: Path) -> None:
    class Handmade:
        """Not a torch optimizer at all."""

        def __init__(self) -> None:
            self.param_groups = [{"lr": 0.1}]

    model, _ = _tiny_transformer()
    loader = AuditedSampler(DataLoader(Documents(), batch_size=10), run=tmp_path / "run")
    monitor = GradeMonitor(model, run=tmp_path / "run", every=100)
    for batch in loader:
        loss = model(batch["input_ids"]).square().mean()
        loss.backward()
        monitor.step(loss, optimizer=Handmade())  # type: ignore[arg-type]
    monitor.close()
    table = exposures(tmp_path / "run")
    assert set(table["state"]) == {"trained"}
    assert table["step"].unique().sort().to_list() == list(range(7))


def test_monitor_goes_on_when_the_sampler_was_closed_between_epochs(tmp_path: Path) -> None:
    model, _ = _tiny_transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = AuditedSampler(DataLoader(Documents(), batch_size=10), run=tmp_path / "run")
    monitor = GradeMonitor(model, run=tmp_path / "run", every=2)
    for _ in range(2):
        for batch in loader:
            loss = model(batch["input_ids"]).square().mean()
            loss.backward()
            monitor.step(loss, optimizer=optimizer)
            optimizer.step()
        loader.close()
    monitor.close()
    table = Run.open(tmp_path / "run").scan("exposures").collect()
    assert set(table["state"]) == {"trained"}
    assert table["step"].unique().sort().to_list() == list(range(14))
    losses = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "loss")
    assert losses.collect()["step"].unique().sort().to_list() == list(range(14))


def test_resumed_run_with_a_monitor_only_goes_on_counting(tmp_path: Path) -> None:
    for _ in range(2):
        model, _probe = _tiny_transformer()
        monitor = GradeMonitor(model, run=tmp_path / "run", every=2)
        for _ in range(5):
            loss = model(torch.randint(0, 1000, (4, 48))).square().mean()
            loss.backward()
            monitor.step(loss)
        monitor.close()
    losses = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "loss")
    found = losses.sort("step").collect()
    assert found["step"].to_list() == list(range(10))
    assert found["attempt"].to_list() == [0] * 5 + [1] * 5


def test_forked_child_neither_closes_nor_writes_the_parents_run(tmp_path: Path) -> None:
    loader = AuditedSampler(DataLoader(Documents(8), batch_size=4), run=tmp_path / "run")
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if child == 0:
        loader.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "run/attempts/rank-00000/claim.json").exists()
    list(iterator)
    loader.close()
    assert exposures(tmp_path / "run").height == 8


def test_number_of_a_dead_process_used_again_does_not_block_a_run(tmp_path: Path) -> None:
    """As in a container, where the training is always process 1."""
    claim = tmp_path / "run/attempts/rank-00000/claim.json"
    claim.parent.mkdir(parents=True)
    holder = {"host": socket.gethostname(), "pid": 1, "process_started": "long ago", "heartbeat": 0}
    claim.write_text(json.dumps(holder))
    loader = AuditedSampler(DataLoader(Documents(8), batch_size=4), run=tmp_path / "run")
    loader.close()
    assert not claim.exists()


def test_of_processes_that_open_a_run_at_once_one_gets_it(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from auditor.attempt import open_attempt\n"
        "from auditor.errors import RunClaimedError\n"
        "from pathlib import Path\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "try: open_attempt(Path(sys.argv[1])); print('mine', flush=True); time.sleep(3)\n"
        "except RunClaimedError: print('refused', flush=True)\n"
    )
    start = str(time.time() + 4)
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "run"), start],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    said = sorted(rival.communicate()[0].strip() for rival in rivals)
    assert said == ["mine", "refused", "refused", "refused"]


def test_slow_recorder_holds_no_more_samples_than_its_budget(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("auditor.record.recorder.QUEUE_BYTES", 2**20)
    data = TensorDataset(torch.zeros(400, 8192, dtype=torch.int64))  # 64 kB a sample
    loader = AuditedSampler(DataLoader(data, batch_size=4), run=tmp_path / "run")
    recorder = recorder_for(tmp_path / "run")
    hang = threading.Event()
    append = recorder._append
    monkeypatch.setattr(recorder, "_append", lambda *args: (hang.wait(), append(*args)))
    assert len(list(loader)) == 100
    assert recorder._bytes_in - recorder._bytes_out <= 2**20
    assert recorder.counts["batches_without_content"] >= 90
    hang.set()
    loader.close()
    table = exposures(tmp_path / "run")  # what was consumed is known all the same
    assert table["key"].to_list() == list(range(400))
    assert any("without content" in gap for gap in Run.open(tmp_path / "run").gaps())


def test_hung_disk_does_not_block_training(tmp_path: Path, monkeypatch: Any) -> None:
    loader = AuditedSampler(
        DataLoader(TensorDataset(torch.arange(4000)[:, None]), batch_size=1), run=tmp_path / "run"
    )
    recorder = recorder_for(tmp_path / "run")
    hang = threading.Event()
    monkeypatch.setattr(recorder, "_append", lambda *_: hang.wait())
    assert len(list(loader)) == 4000
    assert recorder.counts["dropped_batches"] >= 4000 - QUEUE_TASKS - 1
    hang.set()
    loader.close()
    assert any("dropped batches" in gap for gap in Run.open(tmp_path / "run").gaps())


def test_shards_of_the_dataset_are_noted_with_their_hash(tmp_path: Path) -> None:
    shard = tmp_path / "a.jsonl"
    shard.write_text('{"text": "x"}\n')
    dataset = Documents()
    dataset.shards = [shard]  # type: ignore[attr-defined]
    loader = AuditedSampler(DataLoader(dataset, batch_size=8), run=tmp_path / "run")
    list(loader)
    loader.close()
    (noted,) = Run.open(tmp_path / "run").shards
    expected = hashlib.sha256(shard.read_bytes()).hexdigest()
    assert noted == {"path": str(shard), "bytes": 14, "sha256": expected}


def test_loader_must_be_iterable(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int"):
        AuditedSampler(3, run=tmp_path / "run")


def _tiny_transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(1000, 16),
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    )
    return model, torch.randint(0, 1000, (4, 48))
