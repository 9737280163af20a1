"""A Trainer that logs for itself what it computes losses of, and what it is run on.

As a program, the lives of a training that is killed at some steps and resumed, or two ranks:

    python trainer_runs.py FOLDER lives STEP...
    python trainer_runs.py FOLDER ranks accumulated|dispatched

FOLDER/run is the record; what was received goes to FOLDER/received-RANK.jsonl, one line per
micro-batch. Processes are forked off, so that the libraries are imported once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from auditor.record.frameworks.transformers import audited

N = 70
HELD_OUT = 100
"""Samples from this index on are for evaluation."""


def row(index: int, n_tokens: int = 12) -> dict[str, Any]:
    """A sample that can be told by its first token."""
    tokens = torch.randint(0, 128, (n_tokens,), generator=torch.Generator().manual_seed(index))
    tokens[0] = index
    ids = tokens.tolist()
    return {
        "input_ids": ids,
        "labels": ids,
        "id": f"doc-{index}",
        "source": "ab"[index % 2],
        "text": f"the text of document {index}",
    }


class Documents(Dataset):
    def __init__(self, n: int = N, first: int = 0, lengths: bool = False) -> None:
        self.n, self.first, self.lengths = n, first, lengths

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.n:  # what ends an iteration over it
            raise IndexError(index)
        return row(self.first + index, 4 + index % 9 if self.lengths else 12)


class Stream(IterableDataset):
    """Without length, endless, sharded over workers."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while True:
            yield from (row(index) for index in range(start, N, step))


class LoggingTrainer(Trainer):
    """Logs (global step, indices) of each micro-batch whose loss it computes in training."""

    def __init__(self, *args: Any, log: Path | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: list[tuple[int, list[int]]] = []
        self.log_file = log

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            self.received.append((self.state.global_step, inputs["input_ids"][:, 0].tolist()))
            if self.log_file is not None:
                with self.log_file.open("a") as log:
                    log.write(json.dumps(self.received[-1]) + "\n")
        return super().compute_loss(model, inputs, *args, **kwargs)


def tiny_model() -> GPT2LMHeadModel:
    set_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=32, n_embd=16, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def trainer_of(
    folder: Path, dataset: Any, *, kind: type[Trainer] = LoggingTrainer, **options: Any
) -> Any:
    """A trainer of a fresh model; ``options`` are of ``TrainingArguments``, but for these."""
    of_trainer = {
        name: options.pop(name)
        for name in ("data_collator", "eval_dataset", "callbacks", "log", "model", "optimizers")
        if name in options
    }
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(str(folder / "checkpoints"), **{**arguments, **options})
    of_trainer.setdefault("model", tiny_model())
    return kind(args=args, train_dataset=dataset, **of_trainer)


class Dying(TrainerCallback):
    def __init__(self, at: int | None) -> None:
        self._at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, how: str, die_at: int | None = None) -> None:
    trainer = trainer_of(
        folder,
        Documents(),
        gradient_accumulation_steps=2 if how == "accumulated" else 1,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=4,
        accelerator_config={"dispatch_batches": True if how == "dispatched" else None},
        callbacks=[Dying(die_at)],
        log=folder / f"received-{os.environ.get('RANK', 0)}.jsonl",
    )
    trainer = audited(trainer, run=folder / "run")
    checkpoints = folder / "checkpoints"
    last = get_last_checkpoint(str(checkpoints)) if checkpoints.exists() else None
    trainer.train(resume_from_checkpoint=last)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def forked(*arguments: Any, **environment: str) -> int:
    process = os.fork()
    if process == 0:
        os.environ.update(environment)
        train(*arguments)
        sys.exit()
    return process


def ending(process: int) -> int:
    """The exit status, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main() -> None:
    folder, what, *rest = Path(sys.argv[1]), *sys.argv[2:]
    if what == "lives":
        for die_at in map(int, rest):
            assert ending(forked(folder, "alone", die_at)) == -signal.SIGKILL
        assert ending(forked(folder, "alone")) == 0
        return
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = str(listening.getsockname()[1])
    everyone = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [
        forked(folder, rest[0], RANK=str(rank), LOCAL_RANK=str(rank), **everyone)
        for rank in range(2)
    ]
    assert [ending(process) for process in ranks] == [0, 0]


if __name__ == "__main__":
    main()
