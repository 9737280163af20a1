"""What is trained under Lightning in these tests, and, as a program, the same on several ranks.

    python lightning_worker.py FOLDER

starts its second rank itself. Each rank trains everything bare and audited, and writes what its
training steps received, by their own account, to FOLDER/log-RANK.json.
"""

from __future__ import annotations

import collections
import copy
import json
import logging
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from auditor import AuditedSampler
from auditor.record.frameworks.lightning import AuditCallback

N = 70
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Documents(Dataset):
    """Rows with tokens, an id and a source, and noise from the process's random state."""

    def __init__(self, n: int = N, name: str = "doc") -> None:
        self.n = n
        self.name = name

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "input_ids": torch.arange(16) * (index + 3) % 997,
            "noise": torch.rand(4),
            "id": f"{self.name}-{index}",
            "source": "ab"[index % 2],
        }


class Stream(IterableDataset):
    """Of unknown length, divided over workers."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        documents = Documents(self.n, "streamed")
        return (documents[i] for i in range(start, self.n, step))


class Module(pl.LightningModule):
    """A small model that writes down every batch it is trained on, and when."""

    def __init__(self, loss: Callable[[Module, int], bool] = lambda *_: True) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(20, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )
        self.has_loss = loss
        self.seen: list[Any] = []
        self.log_of_steps: list[tuple[int, list[str]]] = []
        self.passed_over: list[str] = []

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        rows = torch.cat([batch["input_ids"].to(batch["noise"].dtype) / 997, batch["noise"]], 1)
        return self.layers(rows.to(self.layers[0].weight.dtype)).square().mean()

    def note(self, batch: Any, trained: bool = True) -> list[dict[str, Any]]:
        """The parts of the batch that there are, after they were written down."""
        self.seen.append(copy.deepcopy(batch))
        parts = [batch] if "id" in batch else [one for one in batch.values() if one is not None]
        ids = [name for part in parts for name in part["id"]]
        if trained:
            self.log_of_steps.append((self.trainer.global_step, ids))
        else:
            self.passed_over += ids
        return parts

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        trained = self.has_loss(self, batch_idx)
        parts = self.note(batch, trained)
        loss = torch.stack([self(part) for part in parts]).sum()
        return loss if trained else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def expected(module: Module) -> list[tuple[int, str]]:
    """(step, sample id) by the module's own log."""
    return [(step, name) for step, ids in module.log_of_steps for name in ids]


def fit(
    make: Callable[[], tuple[Module, Any]],
    options: dict[str, Any],
    run: Path | None,
    **of_fit: Any,
) -> Module:
    """Train what ``make`` makes, seeded; audited when there is a run."""
    pl.seed_everything(5, workers=True, verbose=False)
    module, loaders = make()
    callbacks = [*options.get("callbacks", ())]
    if run is not None:
        callbacks.append(AuditCallback(run=run))
    trainer = pl.Trainer(**{**QUIET, "devices": 1, **options, "callbacks": callbacks})
    trainer.fit(module, loaders, **of_fit)
    module.seen.append({"after": torch.get_rng_state(), "and": random.getstate()})
    return module


# -- two ranks -----------------------------------------------------------------------------------


class Balanced(WeightedRandomSampler):
    """Draws sources evenly, as one does against an imbalance."""

    def __init__(self, n: int) -> None:
        super().__init__([1.0 + 9 * (i % 2 == 0) for i in range(n)], n, replacement=True)


class Pairs(BatchSampler):
    """Can be made again by Lightning only where it is made inside of a hook."""

    def __init__(self, dataset: Documents, of: int) -> None:
        self.dataset = dataset
        super().__init__(SequentialSampler(dataset), of, False)


class PairsWithNoSampler:
    """Batches that Lightning cannot divide."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4, 5], [6, 7]])

    def __len__(self) -> int:
        return 4


def on_ranks(folder: Path) -> None:
    results = {way: on_this_rank(folder, way == "audited") for way in ("bare", "audited")}
    rank = torch.distributed.get_rank()
    (folder / f"log-{rank}.json").write_text(json.dumps(results))


def on_this_rank(folder: Path, audited: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    messages: list[str] = []

    class Messages(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Messages()
    logging.getLogger("auditor").addHandler(handler)
    cases: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "shuffled": (
            lambda: DataLoader(Documents(), batch_size=8, shuffle=True, num_workers=1),
            {"max_epochs": 2, "accumulate_grad_batches": 2},
        ),
        "balanced": (
            lambda: DataLoader(Documents(), batch_size=8, sampler=Balanced(N)),
            {"max_epochs": 1},
        ),
        "with replacement": (
            lambda: DataLoader(
                Documents(),
                batch_size=8,
                sampler=RandomSampler(Documents(), replacement=True, num_samples=32),
            ),
            {"max_epochs": 1},
        ),
        "undivided": (
            lambda: DataLoader(Documents(), batch_size=8),
            {"max_epochs": 1, "use_distributed_sampler": False},
        ),
        "batch sampler that cannot be made again": (
            lambda: DataLoader(Documents(), batch_sampler=Pairs(Documents(), 2)),
            {"max_epochs": 1},
        ),
        "batch sampler without a sampler": (
            lambda: DataLoader(Documents(), batch_sampler=PairsWithNoSampler()),
            {"max_epochs": 1},
        ),
    }
    for name, (loader, options) in cases.items():
        messages.clear()
        run = folder / name / "run" if audited else None
        options = {**options, "devices": 2, "strategy": "ddp"}
        try:
            module = fit(lambda loader=loader: (Module(), loader()), options, run)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        results[name] = {
            "log": expected(module),
            "weights": [value.tolist() for value in module.state_dict().values()],
            "seen": [{**one, "noise": one["noise"].tolist()} | {"input_ids": None}
                     for one in module.seen[:-1]],
            "messages": list(messages),
        }  # fmt: skip
    for name in ("fabric", "fabric, undivided"):
        messages.clear()
        run = folder / name / "run" if audited else None
        results[name] = under_fabric(run, devices=2, divided=name == "fabric")
        results[name]["messages"] = list(messages)
    logging.getLogger("auditor").removeHandler(handler)
    return results


def under_fabric(
    run: Path | None,
    *,
    devices: int = 1,
    divided: bool = True,
    workers: int = 0,
    iterable: bool = False,
) -> dict[str, Any]:
    """Two epochs in a loop of one's own, three batches to an update where there are as many."""
    pl.seed_everything(5, workers=True, verbose=False)
    strategy = "ddp" if devices > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    if devices > 1:
        fabric.launch()
    module = torch.nn.Linear(4, 1)
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(module, optimizer)
    loader: Any = DataLoader(
        Stream() if iterable else Documents(),
        batch_size=8,
        shuffle=None if iterable else True,
        num_workers=workers,
    )
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=divided)
    if run is not None:
        loader = AuditedSampler(loader, run=run, optimizer=optimizer)
    step, log, seen = 0, [], []
    n_batches = 5 if divided and devices > 1 else 10 if iterable and workers else 9
    for _ in range(2):
        for number, batch in enumerate(loader):
            assert set(batch) == {"input_ids", "noise", "id", "source"}
            steps = number % 3 == 2 or number == n_batches - 1
            with fabric.no_backward_sync(model, enabled=not steps):
                fabric.backward(model(batch["noise"]).square().mean())
            log += [(step, name) for name in batch["id"]]
            seen.append({name: value.tolist() if isinstance(value, torch.Tensor) else value
                         for name, value in batch.items()})  # fmt: skip
            if steps:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
    if run is not None:
        loader.close()
    weights = [value.tolist() for value in module.state_dict().values()]
    state = torch.get_rng_state().tolist()
    return {"log": log, "seen": seen, "weights": weights, "state": state}


def counted(log: list[Any]) -> collections.Counter[str]:
    return collections.Counter(name for _, name in log)


if __name__ == "__main__":
    on_ranks(Path(sys.argv[1]))
