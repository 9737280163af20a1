"""Nothing is hurt, lost or mixed up: attempts, claims, kills, failures, limits."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from documents import Documents, exposures, tiny_transformer
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

from auditor import AuditedSampler, GradeMonitor, Located, Run
from auditor.errors import RunClaimedError
from auditor.record.background import GROUP_TASKS, QUEUE_TASKS
from auditor.record.exposures import FLUSH_BATCHES
from auditor.record.recorder import recorder_for


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


def broken_sketches(described: Any) -> Any:
    raise RuntimeError("a bug of ours")


def broken_locator(index: Any, sample: Any) -> Located:
    raise RuntimeError("a bug in the locator")


@pytest.mark.parametrize("workers", [0, 1])
def test_failure_of_ours_never_reaches_the_loop(workers: int, tmp_path: Path, caplog: Any) -> None:
    loader = AuditedSampler(
        DataLoader(
            Documents(), batch_size=8, num_workers=workers, collate_fn=list,
            timeout=30 if workers else 0,
        ),
        run=tmp_path / "run",
    )  # fmt: skip
    loader._describer.sketches = broken_sketches  # type: ignore[method-assign]
    assert len(list(loader)) == 9
    loader.close()
    assert len([one for one in caplog.records if "a bug of ours" in one.getMessage()]) == 1
    attempt = json.loads((tmp_path / "run/attempts/rank-00000/attempt-0000.json").read_text())
    assert sum(attempt["failures"].values()) == 9
    assert Run.open(tmp_path / "run").gaps()


def no_locator(index: Any, sample: Any) -> None:
    return None


def foreign_locator(index: Any, sample: Any) -> Any:
    """Right but for every third sample."""
    return {"sample_id": "x"} if index % 3 == 0 else Located(source="located")


def test_readers_of_a_running_run_know_what_was_lost(tmp_path: Path, monkeypatch: Any) -> None:
    """And so do those of a run that is killed later."""
    monkeypatch.setattr("auditor.record.recorder.HEARTBEAT_S", 0.01)
    recorder = recorder_for(tmp_path / "run")
    recorder.submit(lambda: None, what="batches")  # whatever begins the writing
    recorder.failed("writing", OSError(errno.ENOSPC, "No space left on device"))
    deadline = time.monotonic() + 20
    while not any("writing failed" in gap for gap in Run.open(tmp_path / "run").gaps()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert any("still running" in gap for gap in Run.open(tmp_path / "run").gaps())
    recorder.close()
    assert Run.open(tmp_path / "run").gaps() == ["attempt 0, rank 0: writing failed 1 times"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("locator", "n_failed", "words"),
    [
        (broken_locator, 70, "a bug in the locator"),
        (no_locator, 70, "returned None"),
        (foreign_locator, 24, "sample_id"),
    ],
)
def test_samples_that_the_locator_fails_on_are_told_by_index_and_columns(
    locator: Any, n_failed: int, words: str, workers: int, tmp_path: Path, caplog: Any
) -> None:
    loader = AuditedSampler(
        DataLoader(Documents(), batch_size=8, num_workers=workers),
        run=tmp_path / "run",
        locator=locator,
    )
    assert len(list(loader)) == 9
    loader.close()
    table = exposures(tmp_path / "run")
    assert table["key"].to_list() == list(range(70))
    assert table["sample_id"].to_list() == [f"doc-{i}" for i in range(70)]
    located = ["located"] * 2 if locator is foreign_locator else []
    assert table["source"].to_list()[:3] == ["a", *(located or "ba")]
    (told,) = [one.getMessage() for one in caplog.records if "locator" in one.getMessage()]
    assert "sample 0" in told
    assert words in told
    assert Run.open(tmp_path / "run").gaps() == [
        f"attempt 0, rank 0: {n_failed} samples that the locator failed on"
    ]


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


def test_optimizer_without_hooks_leaves_the_steps_to_the_monitor(tmp_path: Path) -> None:
    class Handmade:
        """Not a torch optimizer at all."""

        def __init__(self) -> None:
            self.param_groups = [{"lr": 0.1}]

    model, _ = tiny_transformer()
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
    model, _ = tiny_transformer()
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
        model, _probe = tiny_transformer()
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
    idle = recorder._background._idle
    monkeypatch.setattr(recorder._background, "_idle", lambda empty: hang.wait() and idle(empty))
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
    assert recorder.counts["dropped_batches"] >= 4000 - QUEUE_TASKS - FLUSH_BATCHES - GROUP_TASKS
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


def test_run_that_is_deleted_while_it_is_recorded_is_noticed_and_stays_deleted(
    tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("auditor.record.recorder.SYNC_S", 0.01)
    monkeypatch.setattr("auditor.record.recorder.HEARTBEAT_S", 0.01)
    run = tmp_path / "run"
    loader = AuditedSampler(DataLoader(Documents(), batch_size=8), run=run)
    batches = iter(loader)
    next(batches)
    assert loader.flush()
    shutil.rmtree(run)
    next(batches)
    assert not loader.flush()
    for _ in batches:
        time.sleep(0.02)
    assert not loader.flush()
    loader.close()
    assert not loader.flush()
    assert not run.exists()
    (told,) = [one.getMessage() for one in caplog.records]
    assert "deleted" in told
    assert str(run) in told


def test_new_sampler_on_a_deleted_run_records_a_new_run(tmp_path: Path) -> None:
    """As a notebook does, whose first sampler was never closed."""
    run = tmp_path / "run"
    first = AuditedSampler(DataLoader(Documents(), batch_size=8), run=run)
    list(first)
    shutil.rmtree(run)
    second = AuditedSampler(DataLoader(Documents(16), batch_size=8), run=run)
    list(second)
    assert second.flush()
    second.close()
    assert exposures(run)["key"].to_list() == list(range(16))
    assert [one["attempt"] for one in Run.open(run).attempts] == [0]
    assert Run.open(run).gaps() == []
    first.close()
    assert exposures(run).height == 16


def test_flush_tells_what_the_disk_refused_since_it_was_last_asked(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    loader = AuditedSampler(DataLoader(Documents(), batch_size=10), run=tmp_path / "run")
    full = False
    write = os.write

    def refuse(*arguments: Any) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr("auditor.ledger.os.write", refuse)
    batches = iter(loader)
    next(batches)
    assert loader.flush()
    full = True
    next(batches)
    assert not loader.flush()
    full = False
    next(batches)
    assert loader.flush()
    loader.close()
    assert loader.flush()
    assert exposures(tmp_path / "run")["batch"].unique().sort().to_list() == [0, 2]
    assert any("writing failed" in gap for gap in Run.open(tmp_path / "run").gaps())
    assert len([one for one in caplog.records if "No space" in one.getMessage()]) == 1


def train(loader: Any, optimizer: torch.optim.Optimizer, n_steps: int | None = None) -> None:
    for _ in itertools.islice(loader, n_steps):
        optimizer.param_groups[0]["params"][0].sum().backward()
        optimizer.step()


def new_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize("again", [True, False], ids=["optimizer given again", "not given"])
def test_start_step_after_batches_were_recorded_begins_a_new_attempt(
    again: bool, tmp_path: Path
) -> None:
    """As a notebook does that goes back to a checkpoint."""
    run, optimizer = tmp_path / "run", new_optimizer()
    data = DataLoader(Documents(), batch_size=10)
    train(AuditedSampler(data, run=run, optimizer=optimizer), optimizer, 5)
    second = AuditedSampler(data, run=run, optimizer=optimizer if again else None, start_step=3)
    train(second, optimizer)
    second.close()
    table = Run.open(run).scan("exposures").sort("step", "position").collect()
    assert table["step"].to_list() == [step for step in range(10) for _ in range(10)]
    assert table["attempt"].to_list() == [0] * 30 + [1] * 70
    assert table["key"].to_list() == [*range(30), *range(70)]


def test_start_step_of_a_second_sampler_before_the_first_batch_begins_nothing(
    tmp_path: Path,
) -> None:
    run, optimizer = tmp_path / "run", new_optimizer()
    for number in range(2):
        loader = AuditedSampler(
            DataLoader(Documents(), batch_size=10), run=run, optimizer=optimizer, start_step=40
        )
        assert number == 0 or train(loader, optimizer) is None
    loader.close()
    table = exposures(run)
    assert set(table["attempt"]) == {0}
    assert table["step"].unique().sort().to_list() == list(range(40, 47))


def test_monitor_follows_a_sampler_that_starts_again_from_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, _ = tiny_transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    monitor = GradeMonitor(model, run=run, every=2)
    for start in (None, 4):
        loader = AuditedSampler(DataLoader(Documents(), batch_size=10), run=run, start_step=start)
        for batch in loader:
            loss = model(batch["input_ids"]).square().mean()
            loss.backward()
            monitor.step(loss, optimizer=optimizer)
            optimizer.step()
    monitor.close()
    losses = Run.open(run).scan("signals").filter(pl.col("signal") == "loss").sort("step").collect()
    assert losses["step"].to_list() == list(range(11))
    assert losses["attempt"].to_list() == [0] * 4 + [1] * 7


def test_loader_that_is_iterated_after_close_goes_on_with_its_optimizer(tmp_path: Path) -> None:
    run, optimizer = tmp_path / "run", new_optimizer()
    loader = AuditedSampler(DataLoader(Documents(), batch_size=10), run=run, optimizer=optimizer)
    for _ in range(2):
        train(loader, optimizer)
        loader.close()
    table = exposures(run)
    assert set(table["state"]) == {"trained"}
    assert table["step"].unique().sort().to_list() == list(range(14))
    assert table["attempt"].unique().sort().to_list() == [0, 1]


def test_looking_at_a_closed_loader_opens_no_attempt(tmp_path: Path) -> None:
    loader = AuditedSampler(DataLoader(Documents(), batch_size=14), run=tmp_path / "run")
    list(loader)
    loader.close()
    assert loader.last is not None
    assert loader.last["batch"] == 4
    assert loader.flush()
    assert [one["attempt"] for one in Run.open(tmp_path / "run").attempts] == [0]


def test_loop_in_a_forked_child_is_told_once_that_nothing_is_recorded(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from auditor import AuditedSampler\n"
        "loader = AuditedSampler([['one'], ['two'], ['three']], run=sys.argv[1])\n"
        "next(iter(loader))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    list(loader), list(loader), os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "loader.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("nothing is recorded in process") == 1
    assert exposures(tmp_path / "run").height == 1
