"""One process of an Accelerate training, bare and audited; run as a program by the tests.

    python accelerate_worker.py OUT SCENARIO...

Each scenario is trained twice, with the bare prepared loader and with the audited one. What the
loop saw goes to ``OUT/SCENARIO/{bare,audited}-RANK.pt``, the record to ``OUT/SCENARIO/run``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.distributed.algorithms.join import Join
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from auditor import AuditedSampler, GradeMonitor

FIRST_ID = 1000
"""Ids are not indices, so that a record of one cannot pass for the other."""


def row(index: int) -> dict[str, Any]:
    """Tensors and numbers only: a dispatching loader sends nothing else."""
    generator = torch.Generator().manual_seed(index)
    return {
        "input_ids": torch.randint(1, 1000, (48,), generator=generator),
        "id": FIRST_ID + index,
    }


class Rows(Dataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return row(index)


class Stream(IterableDataset):
    """Divides itself among loader workers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (row(index) for index in range(start, self.n, step))


class Buckets:
    """A batch sampler of batches of its own making, without ``sampler`` and ``batch_size``."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[list[int]]:
        for bucket in range(len(self)):
            yield list(range(bucket, self.n, len(self)))


def halves(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
    """A ``slice_fn`` for dispatching that knows the batch: a mapping of columns."""
    return {name: values[part] for name, values in batch.items()}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How a training is set up; sizes are those of the loader before ``prepare``."""

    n: int = 37
    batch_size: int = 4
    epochs: int = 2
    workers: int = 0
    stream: bool = False
    sampler: str = "shuffled"
    accumulation: int = 1
    synced_accumulation: int = 1  # by hand, with every backward reduced
    config: Mapping[str, Any] = field(default_factory=dict)
    slice_fn: Callable[..., Any] | None = None
    bucket_view: bool = False
    uneven: bool = False  # ranks run out of batches at different times
    set_epoch: str = ""  # called on the "loader" the loop iterates, or on the "prepared" one
    skip: str = ""  # batches skipped on resume: before ("inside") or after ("outside") auditing
    before_prepare: bool = False
    checkpoint_at: int | None = None  # save here, train on, go back to here
    monitor: str = ""  # "synced": where gradients are; "always": on each micro-batch
    kill_at: int | None = None  # rank 1 at this step
    recorder_first: bool = False  # opened before the process group is there


SCENARIOS: dict[str, Scenario] = {
    "recorder-first": Scenario(epochs=1, recorder_first=True),  # first: nothing is set up yet
    "default": Scenario(),
    "workers": Scenario(workers=2),
    "uneven": Scenario(n=33, uneven=True, config={"even_batches": False}),
    "split": Scenario(batch_size=8, config={"split_batches": True}),
    "dispatch": Scenario(config={"dispatch_batches": True}),
    "dispatch-workers": Scenario(workers=2, config={"dispatch_batches": True}),
    "dispatch-split": Scenario(
        batch_size=8, config={"dispatch_batches": True, "split_batches": True}
    ),
    "dispatch-slice": Scenario(config={"dispatch_batches": True}, slice_fn=halves),
    "stream-dispatch": Scenario(stream=True),
    "stream-dispatch-workers": Scenario(
        stream=True, workers=2, n=40, config={"dispatch_batches": True}
    ),
    "stream": Scenario(stream=True, workers=2, config={"dispatch_batches": False}),
    "accumulate": Scenario(accumulation=2),
    "accumulate-dispatch": Scenario(accumulation=2, config={"dispatch_batches": True}),
    "accumulate-synced": Scenario(synced_accumulation=2, bucket_view=True),
    "no-sampler": Scenario(n=36, sampler="buckets"),
    "divided-twice": Scenario(sampler="distributed"),
    "seedable": Scenario(workers=2, config={"use_seedable_sampler": True}, set_epoch="loader"),
    "set-epoch-of-prepared": Scenario(
        config={"use_seedable_sampler": True}, epochs=3, set_epoch="prepared"
    ),
    "skip-inside": Scenario(skip="inside", accumulation=2),
    "skip-outside": Scenario(skip="outside", accumulation=2),
    "skip-outside-dispatch": Scenario(skip="outside", config={"dispatch_batches": True}),
    "before-prepare": Scenario(before_prepare=True),
    "stateful": Scenario(config={"use_stateful_dataloader": True}, checkpoint_at=2),
    "stateful-workers": Scenario(
        config={"use_stateful_dataloader": True}, checkpoint_at=2, workers=1
    ),
    "monitor": Scenario(accumulation=2, monitor="synced"),
    "monitor-always": Scenario(accumulation=2, monitor="always"),
    "killed": Scenario(n=400, epochs=1, kill_at=7),
}

SKIPPED_BATCHES = 2


def loader_of(scenario: Scenario) -> DataLoader:
    dataset: Any = Stream(scenario.n) if scenario.stream else Rows(scenario.n)
    options: dict[str, Any] = {"num_workers": scenario.workers}
    if scenario.sampler == "buckets":
        return DataLoader(dataset, batch_sampler=Buckets(scenario.n), **options)
    if scenario.sampler == "distributed":
        options["sampler"] = DistributedSampler(dataset, shuffle=False)
    elif not scenario.stream:
        options["shuffle"] = True
    return DataLoader(dataset, batch_size=scenario.batch_size, **options)


class Messages(logging.Handler):
    """What the product logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Training:
    """One training of a scenario, and what its loop saw."""

    def __init__(self, scenario: Scenario, out: Path, *, audited: bool) -> None:
        self.out = out / ("audited" if audited else "bare")
        self.run = out / "run" if audited else None
        if scenario.recorder_first and self.run is not None:
            assert not torch.distributed.is_initialized()
            AuditedSampler(run=self.run)
        AcceleratorState._reset_state()
        GradientState._reset_state()
        set_seed(5)
        self.scenario = scenario
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision="no",
            gradient_accumulation_steps=scenario.accumulation,
            dataloader_config=DataLoaderConfiguration(**scenario.config),
            kwargs_handlers=[
                DistributedDataParallelKwargs(gradient_as_bucket_view=scenario.bucket_view)
            ],
        )
        self.seen: dict[str, list[Any]] = {
            name: [] for name in ("batches", "states", "random", "exposures", "metrics")
        }
        self.step = 0
        self.saved = False
        self.pending: list[list[int]] = []
        self.monitor: GradeMonitor | None = None

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    def train(self) -> dict[str, Any]:
        scenario = self.scenario
        messages = Messages()
        logging.getLogger("auditor").addHandler(messages)
        if scenario.monitor:
            block = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
            network: torch.nn.Module = torch.nn.Sequential(
                torch.nn.Embedding(1000, 16),
                torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False),
            )
        else:
            network = torch.nn.Linear(48, 1)
        optimizer: Any = torch.optim.SGD(network.parameters(), lr=1e-3)
        self.model, self.optimizer = self.accelerator.prepare(network, optimizer)
        loader: Any = loader_of(scenario)
        if scenario.before_prepare and self.run is not None:
            loader = AuditedSampler(loader, run=self.run, optimizer=self.optimizer)
            loader = self.accelerator.prepare(loader)
        elif not scenario.before_prepare:
            loader = self.accelerator.prepare_data_loader(
                loader, slice_fn_for_dispatch=scenario.slice_fn
            )
        self.prepared = loader
        if scenario.skip == "inside":
            resumed = skip_first_batches(self.prepared, SKIPPED_BATCHES)
            resumed = self.audited(resumed)
            loader = self.audited(loader)
        else:
            loader = self.audited(loader)
            resumed = None
            if scenario.skip == "outside":
                resumed = skip_first_batches(loader, SKIPPED_BATCHES)
        self.loader = loader
        if scenario.monitor and self.run is not None:
            self.monitor = GradeMonitor(self.model, run=self.run, every=2)
        for epoch in range(scenario.epochs):
            if scenario.set_epoch:
                # Not 0, 1, 2: a loop that starts later than the loader's own counting.
                (loader if scenario.set_epoch == "loader" else self.prepared).set_epoch(epoch + 3)
            self.epoch(loader if epoch or resumed is None else resumed)
        if self.run is not None:
            loader.close()
        logging.getLogger("auditor").removeHandler(messages)
        length = None if scenario.stream else len(loader)
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        return {**self.seen, "length": length, "weights": weights, "messages": messages.texts}

    def audited(self, loader: Any) -> Any:
        if self.run is None or self.scenario.before_prepare:
            return loader
        return AuditedSampler(loader, run=self.run, optimizer=self.optimizer)

    def epoch(self, loader: Any) -> None:
        if self.scenario.uneven:
            # What accelerator.join_uneven_inputs does on GPUs; on CPUs it does nothing.
            with Join([self.model]):
                self.iterate(loader)
        else:
            self.iterate(loader)
        self.seen["random"].append(torch.get_rng_state())

    def iterate(self, loader: Any) -> None:
        for number, batch in enumerate(loader):
            with self.accelerator.accumulate(self.model):
                self.update(batch, number)
            state = self.accelerator.gradient_state
            self.seen["states"].append(
                (state.sync_gradients, state.end_of_dataloader, state.remainder)
            )
            if self.scenario.config.get("even_batches", True):
                gathered = self.accelerator.gather_for_metrics(batch["id"])
                self.seen["metrics"] += gathered.tolist()
            if number == self.scenario.checkpoint_at and not self.saved:
                self.saved = True
                self.accelerator.save_state(str(self.out / "saved"))
                self.accelerator.wait_for_everyone()
            if self.step - 1 == self.scenario.kill_at and self.rank == 1 and self.run is not None:
                loader.flush()
                os.kill(os.getpid(), signal.SIGKILL)

    def update(self, batch: Any, number: int) -> None:
        scenario = self.scenario
        inputs = batch["input_ids"]
        outputs = self.model(inputs if scenario.monitor else inputs / 1000)
        loss = outputs[..., 0].square().mean()
        self.accelerator.backward(loss)
        self.seen["batches"].append(batch)
        self.pending.append(batch["id"].tolist())
        if self.monitor is not None and (
            scenario.monitor == "always" or self.accelerator.sync_gradients
        ):
            self.monitor.step(loss, optimizer=self.optimizer)
        by_hand = scenario.synced_accumulation
        if number % by_hand != by_hand - 1:
            return
        parameter = next(self.model.parameters())
        before = parameter.detach().clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        # The truth about steps: the weights have moved, whatever anyone says.
        if not torch.equal(before, parameter):
            self.seen["exposures"] += [
                (self.step, batch_number, position, str(one))
                for batch_number, ids in enumerate(self.pending)
                for position, one in enumerate(ids)
            ]
            self.pending = []
            self.step += 1


def main() -> None:
    out = Path(sys.argv[1])
    for name in sys.argv[2:]:
        for audited in (True, False) if SCENARIOS[name].recorder_first else (False, True):
            folder = out / name
            folder.mkdir(parents=True, exist_ok=True)
            training = Training(SCENARIOS[name], folder, audited=audited)
            seen = training.train()
            if SCENARIOS[name].checkpoint_at is not None:
                seen["resumed"] = resumed(SCENARIOS[name], folder, training, audited=audited)
            torch.save(seen, f"{training.out}-{training.rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def resumed(
    scenario: Scenario, folder: Path, before: Training, *, audited: bool
) -> list[list[int]]:
    """The ids of the epoch that a new training goes on with, from the saved state."""
    training = Training(scenario, folder, audited=audited)
    if audited:
        training.run = folder / "resumed"
    network = torch.nn.Linear(48, 1)
    training.model, training.optimizer, loader = training.accelerator.prepare(
        network, torch.optim.SGD(network.parameters(), lr=1e-3), loader_of(scenario)
    )
    loader = training.audited(loader)
    training.accelerator.load_state(str(before.out / "saved"))
    epochs = [[one for batch in loader for one in batch["id"].tolist()] for _ in range(2)]
    if audited:
        loader.close()
    return epochs


if __name__ == "__main__":
    main()
