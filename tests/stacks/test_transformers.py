"""Under ``transformers.Trainer``, what is recorded is what the loss was computed of, and no bit of
training is another one for it."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import datasets
from trainer_runs import (
    HELD_OUT,
    Documents,
    LoggingTrainer,
    N,
    Stream,
    row,
    trainer_of,
)
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from auditor import Located, Run
from auditor.record.exporters import JSONLines
from auditor.record.frameworks.transformers import _Training, audited
from auditor.record.recorder import recorder_for

PROGRAM = Path(__file__).parent / "trainer_runs.py"
ROOT = Path(__file__).parents[2]


def exposures(run: Path, view: Any = "all") -> pl.DataFrame:
    return Run.open(run).scan("exposures", view=view).collect()


def recorded(table: pl.DataFrame) -> list[tuple[int, list[int]]]:
    """(step, indices) of each micro-batch, in order, by the ids of the record."""
    batches = table.group_by("attempt", "batch", maintain_order=True).agg("step", "sample_id")
    return [
        (steps[0], [int(name.removeprefix("doc-")) for name in names])
        for _, _, steps, names in batches.iter_rows()
    ]


def history(trainer: Any) -> list[Any]:
    timings = ("_runtime", "_per_second")
    return [
        {name: value for name, value in entry.items() if not name.endswith(timings)}
        for entry in trainer.state.log_history
    ]


def assert_same_training(bare: Any, other: Any) -> None:
    assert bare.received == other.received
    assert history(bare) == history(other)
    assert len(history(bare)) > 1
    weights = other.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in bare.model.state_dict().items())


def assert_no_gaps(run: Path) -> None:
    assert Run.open(run).gaps() == []


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "labels": ids.clone()}


def table(first: int = 0, n: int = N) -> datasets.Dataset:
    return datasets.Dataset.from_list([row(index) for index in range(first, first + n)])


def generated() -> Any:
    return datasets.IterableDataset.from_generator(lambda: (row(index) for index in range(N)))


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "torch dataset": (Documents, {"num_train_epochs": 2}),
    "torch dataset, 2 workers": (Documents, {"dataloader_num_workers": 2}),
    "torch dataset, 2 workers that stay, 2 epochs": (
        Documents,
        {
            "dataloader_num_workers": 2,
            "dataloader_persistent_workers": True,
            "num_train_epochs": 2,
        },
    ),
    "datasets": (table, {}),
    "datasets, shuffled and formatted": (lambda: table().shuffle(seed=1).with_format("torch"), {}),
    "datasets, 2 workers": (table, {"dataloader_num_workers": 2}),
    "accumulation that does not divide the epoch": (
        table,
        {"gradient_accumulation_steps": 4, "num_train_epochs": 2},
    ),
    "max_steps inside an epoch": (
        Documents,
        {"max_steps": 5, "dataloader_num_workers": 2, "gradient_accumulation_steps": 2},
    ),
    "samples balanced by length": (
        lambda: Documents(lengths=True),
        {"train_sampling_strategy": "batch_rebalance", "data_collator": pad},
    ),
    "samples of a length together": (
        lambda: Documents(lengths=True),
        {"train_sampling_strategy": "group_by_length", "data_collator": pad},
    ),
    "endless stream": (Stream, {"max_steps": 6}),
    "endless stream, 2 workers": (Stream, {"max_steps": 6, "dataloader_num_workers": 2}),
    "iterable datasets": (generated, {"max_steps": 11, "gradient_accumulation_steps": 2}),
    "iterable datasets, not dispatched": (
        generated,
        {"max_steps": 6, "accelerator_config": {"dispatch_batches": False}},
    ),
    "dispatched batches": (Documents, {"accelerator_config": {"dispatch_batches": True}}),
    "label smoothing": (Documents, {"label_smoothing_factor": 0.1}),
    "evaluation on the way": (
        table,
        {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_on_start": True,
            "eval_dataset": table(HELD_OUT, 12),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_record_is_what_losses_were_computed_of_and_training_is_the_same(
    name: str, tmp_path: Path
) -> None:
    make, options = CASES[name]
    bare = trainer_of(tmp_path, make(), **options)
    bare.train()
    trainer = audited(trainer_of(tmp_path, make(), **options), run=tmp_path / "run")
    trainer.train()
    assert_same_training(bare, trainer)
    exposed = exposures(tmp_path / "run")
    assert recorded(exposed) == trainer.received
    assert len(trainer.received) >= 5
    assert set(exposed["state"]) == {"trained"}
    assert exposed["step"].max() == trainer.state.global_step - 1
    sources = ["ab"[int(name.removeprefix("doc-")) % 2] for name in exposed["sample_id"]]
    assert exposed["source"].to_list() == sources
    assert exposed["duplication"].null_count() == 0
    assert_no_gaps(tmp_path / "run")


class InputsAlone(LoggingTrainer):
    """Its loss passes nothing of the batch on but the ids, and pops what it needs."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.received.append((self.state.global_step, inputs["input_ids"][:, 0].tolist()))
        assert set(inputs) == {"input_ids", "labels"}
        labels = inputs.pop("labels")
        logits = model(input_ids=inputs["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_loss_that_calls_the_model_in_its_own_way_is_recorded(tmp_path: Path) -> None:
    bare = trainer_of(tmp_path, Documents(), kind=InputsAlone)
    bare.train()
    trainer = audited(trainer_of(tmp_path, Documents(), kind=InputsAlone), run=tmp_path / "run")
    trainer.train()
    assert_same_training(bare, trainer)
    assert recorded(exposures(tmp_path / "run")) == trainer.received


class OwnLoader(LoggingTrainer):
    """Its loader was not prepared by Accelerate, its batches are lists, fetched and made anew."""

    def get_train_dataloader(self) -> DataLoader:
        return self.my_loader

    def get_batch_samples(self, iterator: Any, n: int, device: Any) -> Any:
        return [list(next(iterator)) for _ in range(n)], None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(inputs, list)
        tokens = torch.tensor([sample["input_ids"] for sample in inputs])
        return super().compute_loss(model, {"input_ids": tokens, "labels": tokens})


def test_loader_and_batches_of_the_users_own_making_are_recorded(tmp_path: Path) -> None:
    def make() -> Any:
        trainer = trainer_of(tmp_path, Documents(), kind=OwnLoader)
        trainer.my_loader = DataLoader(
            Documents(), batch_size=10, shuffle=True, num_workers=1, collate_fn=list
        )
        return trainer

    bare = make()
    bare.train()
    trainer = audited(make(), run=tmp_path / "run")
    trainer.train()
    assert_same_training(bare, trainer)
    assert recorded(exposures(tmp_path / "run")) == trainer.received
    # After training the loader is the user's again.
    assert next(iter(trainer.my_loader))[0]["id"].startswith("doc-")


class Looking(TrainerCallback):
    """Looks at the training loader, as callbacks may."""

    def on_train_begin(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
        self.seen = next(iter(train_dataloader))


def test_callbacks_find_the_loader_as_it_was(tmp_path: Path) -> None:
    looking = Looking()
    trainer = trainer_of(tmp_path, Documents(), callbacks=[looking])
    audited(trainer, run=tmp_path / "run").train()
    assert set(looking.seen) == {"input_ids", "labels"}
    assert recorded(exposures(tmp_path / "run")) == trainer.received


def test_early_stopping_leaves_prefetched_batches_out(tmp_path: Path) -> None:
    options = {
        "dataloader_num_workers": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 20,
        "learning_rate": 0.5,  # so that the loss soon rises
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "eval_dataset": Documents(8, HELD_OUT),
    }

    def make() -> Any:
        stopping = EarlyStoppingCallback(early_stopping_patience=2)
        return trainer_of(tmp_path, Documents(), callbacks=[stopping], **options)

    bare = make()
    bare.train()
    trainer = audited(make(), run=tmp_path / "run")
    trainer.train()
    assert_same_training(bare, trainer)
    assert trainer.state.global_step < 90
    assert recorded(exposures(tmp_path / "run")) == trainer.received


class Stopping(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_batch_whose_step_was_never_made_was_delivered_and_not_trained(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, Documents(), gradient_accumulation_steps=3, callbacks=[Stopping()]
    )
    audited(trainer, run=tmp_path / "run").train()
    exposed = exposures(tmp_path / "run").unique("batch", maintain_order=True)
    # Two steps of three; of the third window one was trained on, two were only fetched.
    assert exposed["state"].to_list() == ["trained"] * 6 + ["delivered"]
    assert exposed["step"].to_list() == [0, 0, 0, 1, 1, 1, None]
    assert [received for _, received in recorded(exposures(tmp_path / "run"))] == [
        received for _, received in trainer.received
    ]


class Skipping(TrainerCallback):
    """Skips the third update, as a gradient scaler does on an overflow."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        if state.global_step == 2:
            optimizer.step = lambda: vars(optimizer).pop("step") and None


def test_skipped_update_is_discarded_and_steps_keep_the_trainers_numbers(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, Documents(), gradient_accumulation_steps=2, callbacks=[Skipping()]
    )
    audited(trainer, run=tmp_path / "run").train()
    exposed = exposures(tmp_path / "run")
    assert recorded(exposed) == trainer.received
    states = exposed.unique("step", maintain_order=True)["state"].to_list()
    assert states == ["trained", "trained", "discarded", "trained", "trained"]


class BrokenOffError(RuntimeError):
    pass


class Breaking(TrainerCallback):
    def __init__(self, at: int | None) -> None:
        self._at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._at:
            raise BrokenOffError


@pytest.mark.parametrize("workers", [0, 2])
def test_training_resumed_twice_inside_an_epoch_counts_each_step_once(
    workers: int, tmp_path: Path
) -> None:
    def lives(folder: Path, run: Path | None) -> list[Any]:
        folder.mkdir()
        trainers = []
        for breaks_at, checkpoint in ((5, None), (9, "checkpoint-4"), (None, "checkpoint-8")):
            trainer = trainer_of(
                folder,
                table(),
                gradient_accumulation_steps=2,
                per_device_train_batch_size=3,
                save_strategy="steps",
                save_steps=4,
                dataloader_num_workers=workers,
                callbacks=[Breaking(breaks_at)],
            )
            if run is not None:
                audited(trainer, run=run)
            resume = None if checkpoint is None else str(folder / "checkpoints" / checkpoint)
            if breaks_at is None:
                trainer.train(resume_from_checkpoint=resume)
            else:
                with pytest.raises(BrokenOffError):
                    trainer.train(resume_from_checkpoint=resume)
            trainers.append(trainer)
        return trainers

    run = tmp_path / "run"
    bare, trainers = lives(tmp_path / "bare", None), lives(tmp_path / "audited", run)
    for left, right in zip(bare, trainers, strict=True):
        assert_same_training(left, right)
    everything = exposures(run)
    for number, trainer in enumerate(trainers):
        assert recorded(everything.filter(attempt=number)) == trainer.received
    first, second, third = (trainer.received for trainer in trainers)
    assert second[0][0] == 4  # it began again behind a checkpoint, at a step that was lost
    effective = [one for one in first if one[0] < 4] + [one for one in second if one[0] < 8] + third
    assert recorded(exposures(run, "effective")) == effective
    assert {step for step, _ in effective} == set(range(12))
    assert_no_gaps(run)


def test_batch_size_that_is_found_by_trying_begins_a_new_attempt(tmp_path: Path) -> None:
    class TooLarge(LoggingTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if len(inputs["input_ids"]) == 8 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")
            return loss

    trainer = trainer_of(
        tmp_path,
        Documents(),
        kind=TooLarge,
        auto_find_batch_size=True,
        per_device_train_batch_size=8,
    )
    audited(trainer, run=tmp_path / "run").train()
    everything = exposures(tmp_path / "run")
    tried, trained = trainer.received[:3], trainer.received[3:]
    assert recorded(everything.filter(attempt=1)) == trained
    assert [one for _, one in recorded(everything.filter(attempt=0))] == [one for _, one in tried]
    assert everything.filter(attempt=0)["state"].to_list() == ["trained"] * 16 + ["delivered"] * 8
    effective = exposures(tmp_path / "run", "effective").filter(state="trained")
    assert recorded(effective) == trained


def run_program(folder: Path, *options: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *options],
        env=environment,
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def log_of(folder: Path, rank: int = 0) -> list[tuple[int, list[int]]]:
    """(step, indices) of what a program received."""
    lines = (folder / f"received-{rank}.jsonl").read_text().splitlines()
    return [(step, indices) for step, indices in map(json.loads, lines)]


@pytest.mark.slow
def test_killed_and_resumed_three_times_each_step_counts_once(tmp_path: Path) -> None:
    run_program(tmp_path, "lives", "6", "10", "13")
    # By step, the batch that the last life to make it received.
    received = log_of(tmp_path)
    last = dict(received)
    assert [step for step, _ in received[:8]] == [0, 1, 2, 3, 4, 5, 4, 5]
    assert len(received) == 18 + 2 + 2 + 1  # what was made since the last checkpoint, twice
    effective = exposures(tmp_path / "run", "effective")
    assert recorded(effective) == sorted(last.items())
    assert set(effective["state"]) == {"trained"}
    assert effective["attempt"].unique().sort().to_list() == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["accumulated", "dispatched"])
def test_each_of_two_ranks_records_its_own_share(how: str, tmp_path: Path) -> None:
    """The data is divided once (transformers #34365): together they see each sample, evened."""
    run_program(tmp_path, "ranks", how)
    everything = exposures(tmp_path / "run")
    for rank in (0, 1):
        assert recorded(everything.filter(rank=rank)) == log_of(tmp_path, rank)
    assert set(everything["state"]) == {"trained"}
    assert set(everything["source"]) == {"a", "b"}
    shown = everything.group_by("sample_id").len()
    assert len(shown) == N
    assert set(shown["len"]) <= {1, 2}  # twice what evens out the last batch
    assert_no_gaps(tmp_path / "run")


def test_monitor_is_told_the_trainers_own_losses_norms_and_rates(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_grad_norm": 0.05}
    probe = pad([row(HELD_OUT + i) for i in range(8)])
    bare = trainer_of(tmp_path, Documents(), **options)
    bare.train()
    trainer = audited(
        trainer_of(tmp_path, Documents(), **options),
        run=tmp_path / "run",
        every=3,
        probe=probe,
        exporters=[JSONLines(tmp_path / "metrics.jsonl")],
    )
    trainer.train()
    assert_same_training(bare, trainer)
    logged = {entry["step"] - 1: entry for entry in history(trainer) if "loss" in entry}
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    for signal, name in (("loss", "loss"), ("grad_norm", "grad_norm"), ("lr", "learning_rate")):
        values = dict(signals.filter(signal=signal).select("step", "value").iter_rows())
        assert values == pytest.approx({step: entry[name] for step, entry in logged.items()})
        assert len(values) == 10
    assert min(entry["grad_norm"] for entry in logged.values()) > 0.05  # before it was clipped
    probed = signals.filter(kind="probe", signal="probe_loss")
    assert probed["step"].to_list() == [0, 3, 6, 9]
    assert signals.filter(kind="live", signal="token_rank")["step"].n_unique() >= 3
    assert recorded(exposures(tmp_path / "run")) == trainer.received
    exported = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in exported if "auditor/loss" in line] == sorted(logged)


def locate(index: int, sample: dict[str, Any]) -> Located:
    return Located(sample_id=f"doc-{sample['id'][4:]}", source=sample["text"][:3], row=index)


@pytest.mark.parametrize("make", [Documents, table])
@pytest.mark.parametrize("workers", [0, 1])
def test_locator_and_columns_see_what_the_trainer_removes(
    make: Callable[[], Any], workers: int, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, make(), dataloader_num_workers=workers, max_steps=3)
    audited(trainer, run=tmp_path / "run", locator=locate, columns=["text"], duplication=False)
    trainer.train()
    exposed = exposures(tmp_path / "run")
    assert recorded(exposed) == trainer.received
    assert set(exposed["source"]) == {"the"}
    assert exposed["row"].to_list() == exposed["key"].to_list()
    samples = Run.open(tmp_path / "run").scan("samples").collect()
    for name, columns in samples.select("sample_id", "columns").iter_rows():
        index = name.removeprefix("doc-")
        assert json.loads(columns) == {"text": f"the text of document {index}"}


class Reversed(LoggingTrainer):
    def get_train_dataloader(self) -> Any:
        other = self.train_dataset.select(range(N - 1, -1, -1))
        return self._get_dataloader(other, "Training", 8, self._get_train_sampler)


def test_ids_are_not_taken_from_a_dataset_that_is_read_in_another_order(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, table(), kind=Reversed)
    audited(trainer, run=tmp_path / "run").train()
    received = [index for _, indices in trainer.received for index in indices]
    exposed = exposures(tmp_path / "run")
    # What is read has lost its ids; its samples are told by their rows in the table.
    assert exposed["sample_id"].to_list() == [str(index) for index in received]
    assert exposed["key"].to_list() == [N - 1 - index for index in received]


def test_second_training_is_another_attempt(tmp_path: Path) -> None:
    trainer = audited(trainer_of(tmp_path, Documents()), run=tmp_path / "run")
    trainer.train()
    n_batches = len(trainer.received)
    trainer.train()
    everything = exposures(tmp_path / "run")
    assert recorded(everything.filter(attempt=0)) == trainer.received[:n_batches]
    assert recorded(everything.filter(attempt=1)) == trainer.received[n_batches:]
    assert recorded(exposures(tmp_path / "run", "effective")) == trainer.received[n_batches:]


def test_after_training_nothing_of_ours_is_left_on_the_trainer(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Documents())
    before = set(vars(trainer))
    assert audited(trainer, run=tmp_path / "run", every=2) is trainer
    assert copy.deepcopy(trainer.args).to_dict() == trainer.args.to_dict()
    assert pickle.loads(pickle.dumps(trainer.args)).to_dict() == trainer.args.to_dict()
    trainer.train()
    assert not {"get_batch_samples", "training_step"} & (set(vars(trainer)) - before)
    assert "clip_grad_norm_" not in vars(trainer.accelerator)
    assert pickle.loads(pickle.dumps(trainer.args)).to_dict() == trainer.args.to_dict()
    copied = copy.deepcopy(trainer.model)
    assert not any(module._forward_hooks for module in copied.modules())


@pytest.mark.parametrize("workers", [0, 1])
def test_failures_of_ours_are_counted_and_training_is_the_same(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(index: int, sample: Any) -> Located:
        raise ValueError("the locator is wrong")

    options = {"dataloader_num_workers": workers, "max_steps": 4}
    bare = trainer_of(tmp_path, Documents(), **options)
    bare.train()
    trainer = trainer_of(tmp_path, Documents(), **options)
    audited(trainer, run=tmp_path / "run", locator=failing)
    with caplog.at_level(logging.WARNING, "auditor"):
        trainer.train()
    assert_same_training(bare, trainer)
    assert Run.open(tmp_path / "run").gaps() == [
        "attempt 0, rank 0: 32 samples that the locator failed on"
    ]
    assert "the locator is wrong" in caplog.text


@pytest.mark.parametrize("place", ["wrap", "watch"])
def test_failure_at_the_beginning_leaves_the_training_alone(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = trainer_of(tmp_path, Documents())
    bare.train()
    trainer = audited(trainer_of(tmp_path, Documents()), run=tmp_path / "run")

    def refuse(*_: Any) -> None:
        raise OSError("no")

    owner = _Training if place == "wrap" else recorder_for(tmp_path / "run")
    monkeypatch.setattr(owner, place, refuse)
    trainer.train()
    assert_same_training(bare, trainer)
    gaps = Run.open(tmp_path / "run").gaps()
    assert gaps == ["attempt 0, rank 0: beginning to record failed 1 times"]
    assert exposures(tmp_path / "run").height == 0


class OwnLoop(LoggingTrainer):
    def _run_epoch(self, *args: Any, train_dataloader: Any, **kwargs: Any) -> None:
        self.seen = next(iter(train_dataloader))
        super()._run_epoch(*args, train_dataloader=train_dataloader, **kwargs)


def test_training_loop_of_a_subclass_is_left_alone_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = audited(trainer_of(tmp_path, Documents(), kind=OwnLoop), run=tmp_path / "run")
    with caplog.at_level(logging.WARNING, "auditor"):
        trainer.train()
    assert set(trainer.seen) == {"input_ids", "labels"}
    assert "OwnLoop trains in a way of its own (_run_epoch)" in caplog.text
    assert exposures(tmp_path / "run").height == 0


class ListOfBatches(LoggingTrainer):
    def get_train_dataloader(self) -> Any:
        return [pad([row(i) for i in range(8)])] * 3


def test_loader_that_is_none_is_left_alone_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path, Documents(), kind=ListOfBatches, max_steps=3)
    audited(trainer, run=tmp_path / "run", every=2)
    with caplog.at_level(logging.WARNING, "auditor"):
        trainer.train()
    assert len(trainer.received) == 3
    assert "a list cannot be recorded" in caplog.text
    losses = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "loss").collect()
    assert losses["step"].to_list() == [0, 1, 2]
    logged = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert losses["value"].to_list() == pytest.approx([float(one) for one in logged], abs=1e-3)


def test_mistakes_are_told_at_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Documents())
    with pytest.raises(TypeError, match="Linear"):
        audited(torch.nn.Linear(1, 1), run=tmp_path / "run")  # type: ignore[type-var]
    with pytest.raises(ValueError, match="every"):
        audited(trainer, run=tmp_path / "run", every=0)
    with pytest.raises(ValueError, match="on_alert: of a monitor, which every= asks for"):
        audited(trainer, run=tmp_path / "run", on_alert=print)
    without = Trainer(torch.nn.Linear(1, 1), args=trainer.args)
    with pytest.raises(ValueError, match="no transformer blocks"):
        audited(without, run=tmp_path / "run", every=2)
    audited(trainer, run=tmp_path / "run")
    with pytest.raises(ValueError, match="already"):
        audited(trainer, run=tmp_path / "run")


@pytest.mark.slow
def test_example_runs_and_its_record_names_every_sample(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "pipelines/hf_trainer.py", "--out", tmp_path, "--steps", "40"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "run/derived/report.html").is_file()
    exposed = exposures(tmp_path / "run")
    assert exposed["step"].unique().sort().to_list() == list(range(40))
    assert set(exposed["source"]) == {"speeches", "novels", "statutes", "peps"}
    assert exposed["sample_id"].str.contains("-").all()
