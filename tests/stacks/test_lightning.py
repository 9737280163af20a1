"""Under Lightning's Trainer, what is recorded is what ``training_step`` was given."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="Lightning is not installed")

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning_worker import QUIET, Documents, Module, Stream, expected, fit
from sources import assert_equal

from auditor import AuditedSampler, Run
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.errors import RunClaimedError
from auditor.record.exporters import JSONLines
from auditor.record.frameworks.lightning import AuditCallback
from auditor.record.recorder import Recorder

WORKER = Path(__file__).with_name("lightning_worker.py")
pytestmark = pytest.mark.filterwarnings("ignore")


def exposures(run: Path) -> pl.DataFrame:
    return Run.open(run).scan("exposures", view="all").collect()


def recorded(run: Path, state: str = "trained") -> list[tuple[int, str]]:
    table = exposures(run).filter(pl.col("state") == state).sort("attempt", "batch", "position")
    return list(table.select("step", "sample_id").iter_rows())


def assert_same_training(left: Module, right: Module) -> None:
    """Batches, their order, what was trained when, random state and weights."""
    assert len(left.seen) > 1
    assert_equal(left.seen, right.seen)
    assert left.log_of_steps == right.log_of_steps
    assert_equal(dict(left.state_dict()), dict(right.state_dict()))


# -- kinds of training -----------------------------------------------------------------------------


class DrawsInHooks(Module):
    """Its hooks use random numbers between the start of an iterator and its first batch."""

    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        torch.rand(3)


class ChangesBatches(Module):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "noise": batch["noise"] * 2}

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        batch["id"] = list(batch["id"])
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["noise"].add_(1)
        return batch


class Stops(Module):
    """Asks to stop, while a batch of unknown length's loader has been fetched ahead."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class SkipsEpochs(Module):
    """Gives an epoch up when it sees its fourth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if batch_idx == 3:
            self.passed_over += batch["id"]
            return -1
        return None


class ByHand(Module):
    """Manual optimization, two batches to a step, without Lightning's own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (part,) = self.note(batch)
        optimizer = self.optimizers()
        self(part).backward()
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


class SkipsEpochsByHand(SkipsEpochs, ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.note(batch)
        self.manual_backward(self(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


class Adversaries(Module):
    """Two optimizers, both of which step on every batch: two of Lightning's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (part,) = self.note(batch)
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(sign * self(part))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.layers[0].parameters(), lr=1e-2),
            torch.optim.AdamW(self.layers[2].parameters(), lr=1e-2),
        ]


class TakesForItself(Module):
    """Takes batches from the iterator, at its own pace."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        batch, _, _ = next(dataloader_iter)
        (part,) = self.note(batch)
        return self(part)


class SearchesLines(Module):
    """An optimizer that evaluates the batch several times in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = torch.nn.Identity()

    def note(self, batch: Any, trained: bool = True) -> Any:
        entry = (self.trainer.global_step, list(batch["id"]))
        return [batch] if entry in self.log_of_steps else super().note(batch, trained)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1e-2, max_iter=3)


class OnlyAccumulates(Module):
    """Leaves a step out now and then, by its own hook."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 3 == 1:
            optimizer_closure()
            self.passed_over += self.log_of_steps.pop()[1]
        else:
            optimizer.step(closure=optimizer_closure)


def documents(module: Callable[[], Module] = Module, **options: Any) -> Callable[[], Any]:
    options = {"batch_size": 8, "shuffle": True, **options}
    return lambda: (module(), DataLoader(Documents(), **options))


def stream(module: Callable[[], Module] = Module, **options: Any) -> Callable[[], Any]:
    return lambda: (module(), DataLoader(Stream(), **{"batch_size": 8, **options}))


def some_lost(samples: list[dict[str, Any]]) -> Any:
    """A collate function that gives up on one batch."""
    if samples[0]["id"] == "streamed-24":
        return None
    return torch.utils.data.default_collate(samples)


def several(mode: str | None = None) -> Callable[[], Any]:
    def make() -> Any:
        loaders = {
            "long": DataLoader(Documents(70), batch_size=8, shuffle=True),
            "short": DataLoader(Documents(20, "other"), batch_size=5, shuffle=True),
        }
        return Module(), loaders if mode is None else CombinedLoader(loaders, mode)

    return make


def several_streams() -> Any:
    loaders = {
        "long": DataLoader(Stream(70), batch_size=8),
        "short": DataLoader(Documents(20, "other"), batch_size=5, shuffle=True),
        "streamed": DataLoader(Stream(24), batch_size=8),
    }
    return Module(), loaders


def no_loss(module: Module, batch_idx: int) -> bool:
    return batch_idx % 4 != 1


def with_validation() -> Any:
    module = Module()
    module.val_dataloader = lambda: DataLoader(Documents(24, "held-out"), batch_size=8)
    return module, DataLoader(Documents(), batch_size=8, shuffle=True)


def reloaded() -> Any:
    module = Module()
    module.train_dataloader = lambda: DataLoader(Stream(), batch_size=8)
    return module, None


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffled": (documents(), {"max_epochs": 2}),
    "in 2 workers": (documents(num_workers=2), {"max_epochs": 2}),
    "in persistent workers": (
        documents(num_workers=2, persistent_workers=True),
        {"max_epochs": 2},
    ),
    "random numbers in hooks": (documents(DrawsInHooks, num_workers=1), {"max_epochs": 2}),
    "of unknown length": (stream(), {"max_epochs": 2}),
    "of unknown length, 2 workers": (stream(num_workers=2), {"max_epochs": 2}),
    "accumulation that leaves a rest": (
        documents(), {"max_epochs": 2, "accumulate_grad_batches": 4}
    ),
    "accumulation of unknown length": (stream(), {"max_epochs": 2, "accumulate_grad_batches": 4}),
    "max_steps": (documents(), {"max_steps": 5, "max_epochs": -1, "accumulate_grad_batches": 2}),
    "max_steps of unknown length": (stream(), {"max_steps": 12, "max_epochs": -1}),
    "limited": (documents(), {"max_epochs": 3, "limit_train_batches": 3}),
    "limited of unknown length": (stream(), {"max_epochs": 3, "limit_train_batches": 3}),
    "stopped early": (stream(Stops), {"max_epochs": 2}),
    "clipped": (documents(), {"max_epochs": 1, "gradient_clip_val": 0.01}),
    "double precision": (documents(), {"max_epochs": 1, "precision": "64-true"}),
    "mixed precision": (documents(), {"max_epochs": 1, "precision": "bf16-mixed"}),
    "hooks that change batches": (documents(ChangesBatches), {"max_epochs": 2}),
    "validation in between": (with_validation, {"max_epochs": 2, "val_check_interval": 3}),
    "reloaded every epoch": (
        reloaded, {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    ),
    "overfitting": (documents(), {"max_epochs": 2, "overfit_batches": 2}),
    "manual": (documents(ByHand), {"max_epochs": 1, "limit_train_batches": 8}),
    "two optimizers": (documents(Adversaries), {"max_epochs": 2}),
    "line search": (documents(SearchesLines), {"max_epochs": 1}),
    "batches taken in the step": (stream(TakesForItself), {"max_epochs": 2}),
    "batches of known number taken in the step": (documents(TakesForItself), {"max_epochs": 2}),
    "batches of nothing": (stream(collate_fn=some_lost), {"max_epochs": 2}),
    "steps without loss": (documents(lambda: Module(no_loss)), {"max_epochs": 2}),
    "accumulated steps without loss": (
        documents(lambda: Module(no_loss)), {"max_epochs": 2, "accumulate_grad_batches": 2}
    ),
    "epochs given up": (documents(SkipsEpochs), {"max_epochs": 3}),
    "epochs of unknown length given up": (stream(SkipsEpochs), {"max_epochs": 3}),
    "epochs given up by hand": (documents(SkipsEpochsByHand), {"max_epochs": 3}),
    "several loaders, the short one cycled": (several(), {"max_epochs": 2}),
    "several loaders, to the shortest": (several("min_size"), {"max_epochs": 2}),
    "several loaders, to the longest": (several("max_size"), {"max_epochs": 2}),
    "several loaders of unknown length": (several_streams, {"max_epochs": 2}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_record_is_the_steps_own_log_and_training_is_the_bare_one(
    kind: str, tmp_path: Path
) -> None:
    make, options = KINDS[kind]
    bare = fit(make, options, None)
    audited = fit(make, options, tmp_path / "run")
    assert_same_training(audited, bare)
    run = tmp_path / "run"
    assert recorded(run) == expected(audited)
    table = exposures(run).filter(pl.col("state") != "trained")
    assert sorted(table["sample_id"]) == sorted(audited.passed_over)
    assert set(table["state"]) <= {"delivered"}
    assert Run.open(run).gaps() == []


def test_gradients_that_were_accumulated_and_cleared_are_discarded(tmp_path: Path) -> None:
    make, options = documents(OnlyAccumulates), {"max_epochs": 2}
    audited = fit(make, options, tmp_path / "run")
    assert_same_training(audited, fit(make, options, None))
    steps_apart = [name for _, name in recorded(tmp_path / "run")]
    assert steps_apart == [name for _, name in expected(audited)]
    discarded = exposures(tmp_path / "run").filter(pl.col("state") == "discarded")
    assert sorted(discarded["sample_id"]) == sorted(audited.passed_over)


def test_what_an_attempt_says_of_its_samples_is_what_a_sampler_says(tmp_path: Path) -> None:
    fit(documents(num_workers=1), {"max_epochs": 2}, tmp_path / "run")
    table = exposures(tmp_path / "run")
    assert set(table["source"]) == {"a", "b"}
    assert set(table["n_tokens"]) == {16}
    assert (table.sort("batch").tail(70)["duplication"] == 1.0).all()


# -- beginnings and ends -----------------------------------------------------------------------


def checkpointed(run: Path | None, folder: Path, loader: Any, seed: int = 5) -> list[Module]:
    """Three steps of an epoch, a checkpoint, and on from there in another trainer."""
    modules = []
    for max_steps in (3, 12):
        lightning.seed_everything(seed, verbose=False)
        callbacks = [] if run is None else [AuditCallback(run=run)]
        trainer = lightning.Trainer(
            **QUIET, devices=1, max_steps=max_steps, max_epochs=-1, callbacks=callbacks
        )
        modules.append(Module())
        checkpoint = folder / "there.ckpt"
        trainer.fit(modules[-1], loader(), ckpt_path=checkpoint if max_steps == 12 else None)
        if max_steps == 3:
            trainer.save_checkpoint(checkpoint)
    return modules


def test_resumed_inside_an_epoch_the_record_shows_the_data_that_came_again(
    tmp_path: Path,
) -> None:
    """A plain loader starts over, while Lightning goes on counting batches."""

    def loader() -> Any:
        return DataLoader(Documents(), batch_size=8)

    first, second = checkpointed(tmp_path / "run", tmp_path, loader)
    bare = checkpointed(None, tmp_path, loader)
    assert [one.log_of_steps for one in bare] == [first.log_of_steps, second.log_of_steps]
    assert recorded(tmp_path / "run") == expected(first) + expected(second)
    table = exposures(tmp_path / "run")
    again = table.filter(pl.col("attempt") == 1)["sample_id"].to_list()[:24]
    assert again == table.filter(pl.col("attempt") == 0)["sample_id"].to_list()
    assert table.filter(pl.col("attempt") == 1)["step"].min() == 3


def mid_epoch_checkpoint(run: Path | None, folder: Path, workers: int) -> list[Module]:
    """A checkpoint written while an epoch runs, by a loader that can be resumed."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="no torchdata")
    modules = []
    for resume in (False, True):
        lightning.seed_everything(5, verbose=False)
        loader = torchdata.StatefulDataLoader(Documents(), batch_size=8, num_workers=workers)
        saved = ModelCheckpoint(
            dirpath=folder / str(run is None), every_n_train_steps=4, save_top_k=-1
        )
        options = {**QUIET, "enable_checkpointing": True, "devices": 1, "max_epochs": 1}
        callbacks = [saved] if run is None else [saved, AuditCallback(run=run)]
        trainer = lightning.Trainer(**options, callbacks=callbacks)
        modules.append(Module())
        path = folder / str(run is None) / "epoch=0-step=4.ckpt" if resume else None
        trainer.fit(modules[-1], loader, ckpt_path=path, weights_only=False)
    return modules


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_that_can_be_resumed_goes_on_where_it_was(workers: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = mid_epoch_checkpoint(run, tmp_path, workers)
    bare_first, bare_second = mid_epoch_checkpoint(None, tmp_path, workers)
    assert first.log_of_steps == bare_first.log_of_steps
    assert second.log_of_steps == bare_second.log_of_steps
    assert second.log_of_steps[0] == (4, [f"doc-{i}" for i in range(32, 40)])
    assert recorded(run) == expected(first) + expected(second)
    effective = Run.open(run).scan("exposures").collect()
    assert sorted(effective["sample_id"]) == sorted(f"doc-{i}" for i in range(70))


def test_second_fit_is_a_second_attempt_and_the_loaders_are_back_in_between(
    tmp_path: Path,
) -> None:
    loaders = {
        "a": DataLoader(Documents(16), batch_size=8),
        "b": DataLoader(torch.ones(4), batch_size=2),
    }
    combined = CombinedLoader(loaders, "min_size")

    class Both(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (part,) = self.note({"a": batch["a"]})
            return self(part) * batch["b"].sum()

    trainer = lightning.Trainer(
        **QUIET, devices=1, max_epochs=2, callbacks=[AuditCallback(tmp_path / "run")]
    )
    module = Both()
    process = trainer.strategy.process_dataloader
    for max_epochs in (2, 3):
        trainer.fit_loop.max_epochs = max_epochs
        trainer.fit(module, combined)
        assert combined.flattened == list(loaders.values())
        assert trainer.train_dataloader == loaders
        assert trainer.strategy.process_dataloader == process
    table = exposures(tmp_path / "run")
    assert table["attempt"].unique().sort().to_list() == [0, 1]
    assert table.filter(pl.col("attempt") == 1)["step"].unique().sort().to_list() == [4, 5]


def test_training_that_fails_leaves_a_closed_record_of_what_it_had(tmp_path: Path) -> None:
    class Fails(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                raise ArithmeticError("no more")
            return loss

    with pytest.raises(ArithmeticError, match="no more"):
        fit(documents(Fails), {"max_epochs": 1}, tmp_path / "run")
    assert Run.open(tmp_path / "run").gaps() == []
    table = exposures(tmp_path / "run").unique("batch", maintain_order=True)
    assert table["state"].to_list() == ["trained", "trained", "delivered"]


def test_early_stopping_by_validation_is_where_the_record_ends(tmp_path: Path) -> None:
    def make() -> Any:
        module, loader = with_validation()
        module.validation_step = lambda batch, batch_idx: module.log("bad", 1.0)
        return module, loader

    options = {"max_epochs": 9, "callbacks": [EarlyStopping("bad", patience=1)]}
    module = fit(make, options, tmp_path / "run")
    assert len(module.log_of_steps) == 18
    assert recorded(tmp_path / "run") == expected(module)


def test_checkpoint_is_written_after_what_led_to_it(tmp_path: Path) -> None:
    class Saves(lightning.Callback):
        on_disk: list[int]

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "there.ckpt")
            self.on_disk = sorted(set(exposures(tmp_path / "run")["step"]))

    saves = Saves()
    fit(documents(), {"max_epochs": 1, "callbacks": [saves]}, tmp_path / "run")
    assert saves.on_disk == list(range(9))


# -- what must not happen ----------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["delivered", "watch", "withdraw", "drain"])
def test_failures_of_the_recorder_are_counted_and_do_not_reach_training(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options = documents(lambda: Module(no_loss)), {"max_epochs": 1}
    bare = fit(make, options, None)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(Recorder, broken, fail)
    audited = fit(make, options, tmp_path / "run")
    assert_same_training(audited, bare)
    if broken != "drain":  # of checkpoints, and there was none
        assert any("failed" in gap for gap in Run.open(tmp_path / "run").gaps())


@pytest.mark.parametrize("hook", [
    "train_start", "watch", "batch_start", "backward", "before_step", "batch_end", "settle", "end",
    "_lent",
])  # fmt: skip
def test_failures_of_hooks_do_not_reach_training(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = fit(documents(), {"max_epochs": 1}, None)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(f"auditor.record.frameworks.lightning._Fit.{hook}", fail)
    assert_same_training(fit(documents(), {"max_epochs": 1}, tmp_path / "run"), bare)
    monkeypatch.undo()
    AuditedSampler(run=tmp_path / "run").close()  # what a broken end() left open


def test_run_that_somebody_records_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claimed(*_: Any, **__: Any) -> None:
        raise RunClaimedError("run/: rank 0 is recorded by process 7")

    monkeypatch.setattr("auditor.record.recorder.open_attempt", claimed)
    with pytest.raises(RunClaimedError):
        fit(documents(), {"max_epochs": 1}, tmp_path / "run")


def test_every_must_be_positive() -> None:
    with pytest.raises(ValueError, match="every"):
        AuditCallback("run", every=0)
    with pytest.raises(ValueError, match="on_alert: of a monitor, which every= asks for"):
        AuditCallback("run", on_alert=print)


def test_loader_in_the_trainers_hands_is_still_the_users(tmp_path: Path) -> None:
    """Callbacks read and set attributes of ``trainer.train_dataloader``."""
    dataset = Documents()
    found: dict[str, Any] = {}

    def upper(samples: list[dict[str, Any]]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        return {**batch, "id": [name.upper() for name in batch["id"]]}

    class Looks(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            loader = trainer.train_dataloader
            found.update(dataset=loader.dataset, size=loader.batch_size, n=len(loader))
            loader.collate_fn = upper

    loader = DataLoader(dataset, batch_size=8)
    module = fit(
        lambda: (Module(), loader), {"max_epochs": 2, "callbacks": [Looks()]}, tmp_path / "run"
    )
    assert found["dataset"] is dataset
    assert (found["size"], found["n"]) == (8, 9)
    assert loader.collate_fn is upper
    assert module.log_of_steps[-1][1][0] == "DOC-64"
    assert [name for _, name in recorded(tmp_path / "run")][:3] == ["doc-0", "doc-1", "doc-2"]


def test_loader_that_is_audited_already_is_recorded_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        loader = DataLoader(Documents(), batch_size=8)
        return Module(), AuditedSampler(loader, run=tmp_path / "run")

    module = fit(make, {"max_epochs": 1}, tmp_path / "run")
    assert "audited already" in caplog.text
    assert recorded(tmp_path / "run") == expected(module)


def test_callback_can_be_pickled_before_training() -> None:
    copy = pickle.loads(pickle.dumps(AuditCallback("run", columns=["url"])))
    assert isinstance(copy, AuditCallback)


def test_search_for_a_learning_rate_is_not_recorded(tmp_path: Path) -> None:
    class WithRate(Module):
        lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    finds = LearningRateFinder(num_training_steps=70, early_stop_threshold=None)
    options = {"max_epochs": 1, "callbacks": [finds], "default_root_dir": tmp_path}
    module = fit(documents(WithRate, batch_size=1), options, tmp_path / "run")
    assert len(module.log_of_steps) == 70 + 70
    assert recorded(tmp_path / "run") == expected(module)[-70:]
    assert Run.open(tmp_path / "run").gaps() == []


# -- the monitor -------------------------------------------------------------------------------


class Trains(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(GPTConfig(n_positions=16))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = next_byte_loss(self.model, batch["input_ids"] % 256)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_monitor_grades_without_changing_training(tmp_path: Path) -> None:
    probe = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(1))

    def trained(callbacks: list[Any]) -> Trains:
        lightning.seed_everything(3, verbose=False)
        module = Trains()
        options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        trainer = lightning.Trainer(
            **QUIET, devices=1, max_epochs=2, callbacks=callbacks, **options
        )
        trainer.fit(module, DataLoader(Documents(), batch_size=8, shuffle=True))
        return module

    callback = AuditCallback(
        tmp_path / "run",
        every=2,
        probe=probe,
        probe_loss=lambda module, probe: next_byte_loss(module.model, probe),
        exporters=[JSONLines(tmp_path / "metrics.jsonl")],
    )
    audited, bare = trained([callback]), trained([])
    assert_equal(dict(audited.state_dict()), dict(bare.state_dict()))
    assert audited.losses == bare.losses
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    by_signal = {name: table.sort("step") for (name,), table in signals.group_by("signal")}
    losses = by_signal["loss"]
    assert losses["step"].to_list() == list(range(10))
    windows = [audited.losses[i : i + 2] for i in (0, 2, 4, 6)] + [audited.losses[8:9]]
    assert losses["value"].to_list()[:5] == pytest.approx([sum(w) / len(w) for w in windows])
    assert by_signal["probe_loss"]["step"].to_list() == [0, 2, 4, 6, 8]
    kinds = by_signal["token_rank"].filter(pl.col("variant") == "raw")["kind"].value_counts()
    assert dict(kinds.iter_rows()) == {"live": 10, "probe": 10}  # 5 samples of 2 blocks
    assert by_signal["grad_norm"]["value"].drop_nulls().max() > 0.5  # before clipping
    exported = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in exported if "auditor/loss" in line] == list(range(10))


def test_model_without_blocks_is_recorded_and_not_graded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = lightning.Trainer(
        **QUIET, devices=1, max_epochs=1, callbacks=[AuditCallback(tmp_path / "run", every=5)]
    )
    module = Module()
    trainer.fit(module, DataLoader(Documents(), batch_size=8))
    assert "no transformer blocks" in caplog.text
    assert recorded(tmp_path / "run") == expected(module)


# -- other ways to start it --------------------------------------------------------------------


def test_works_under_the_older_name_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    program = """
import sys, torch, pytorch_lightning as pl
from torch.utils.data import DataLoader
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=.1)
from auditor.record.frameworks.lightning import AuditCallback
assert "lightning.pytorch" not in sys.modules
assert issubclass(AuditCallback, pl.Callback)
trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
    callbacks=[AuditCallback(run=sys.argv[1])])
trainer.fit(Module(), DataLoader(torch.rand(12, 3), batch_size=4))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        check=True, timeout=120, env=environment, cwd=tmp_path,
    )  # fmt: skip
    table = exposures(tmp_path / "run")
    assert table["key"].to_list() == list(range(12))
    assert table["step"].to_list() == [0] * 4 + [1] * 4 + [2] * 4


# -- two ranks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """The folder of runs, and what both ranks logged, bare and audited, of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    finished = subprocess.run(
        [sys.executable, str(WORKER), str(folder)],
        capture_output=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    logs = [json.loads((folder / f"log-{rank}.json").read_text()) for rank in (0, 1)]
    return folder, {way: [log[way] for log in logs] for way in ("bare", "audited")}


def of_rank(table: pl.DataFrame, rank: int) -> list[list[Any]]:
    rows = table.filter(pl.col("rank") == rank).sort("batch", "position")
    return [list(row) for row in rows.select("step", "sample_id").iter_rows()]


@pytest.mark.parametrize("case", [
    "shuffled", "balanced", "with replacement", "undivided", "fabric", "fabric, undivided",
])  # fmt: skip
def test_each_rank_records_what_it_received_and_trains_as_it_did(
    case: str, ranks: tuple[Path, dict[str, list[Any]]]
) -> None:
    folder, logs = ranks
    table = exposures(folder / case / "run")
    assert set(table["state"]) == {"trained"}
    for rank in (0, 1):
        audited, bare = logs["audited"][rank][case], logs["bare"][rank][case]
        assert of_rank(table, rank) == audited["log"]
        for what in ("log", "seen", "weights"):
            assert audited[what] == bare[what]
    assert Run.open(folder / case / "run").gaps() == []


def received(logs: dict[str, list[Any]], case: str) -> list[set[str]]:
    return [{name for _, name in log[case]["log"]} for log in logs["audited"]]


def messages(logs: dict[str, list[Any]], case: str) -> list[str]:
    return [" ".join(log[case]["messages"]) for log in logs["audited"]]


@pytest.mark.parametrize("case", ["undivided", "fabric, undivided"])
def test_ranks_that_train_on_the_same_data_are_warned_of(
    case: str, ranks: tuple[Path, dict[str, list[Any]]]
) -> None:
    _, logs = ranks
    assert received(logs, case)[0] == received(logs, case)[1]
    for text in messages(logs, case):
        assert "does not divide the data" in text
    for other in ("shuffled", "fabric"):
        assert received(logs, other)[0] != received(logs, other)[1]
        assert "does not divide" not in "".join(messages(logs, other))


def test_samplers_that_lightning_wraps_or_replaces_are_named(
    ranks: tuple[Path, dict[str, list[Any]]],
) -> None:
    """As in Lightning issue 1995: the order of a sampler of one's own is not what is trained."""
    _, logs = ranks
    assert "every 2-th index that your Balanced draws" in messages(logs, "balanced")[0]
    text = messages(logs, "with replacement")[0]
    assert "replaced your RandomSampler by a DistributedSampler" in text
    assert len(logs["audited"][0]["with replacement"]["log"]) == 35  # and not 32 / 2
    assert "your" not in messages(logs, "shuffled")[0]


@pytest.mark.parametrize(
    "case", ["batch sampler that cannot be made again", "batch sampler without a sampler"]
)
def test_lightnings_own_error_is_what_the_user_sees(
    case: str, ranks: tuple[Path, dict[str, list[Any]]]
) -> None:
    """As in Lightning issue 20272."""
    _, logs = ranks
    for rank in (0, 1):
        assert logs["audited"][rank][case] == logs["bare"][rank][case]
        assert logs["audited"][rank][case]["error"].startswith("TypeError")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    yield
    for one, level in zip(loggers, levels, strict=True):
        one.setLevel(level)
