"""Recording under Lightning's ``Trainer``, with one line.

    trainer = Trainer(max_epochs=1, callbacks=[AuditCallback(run="run/")])
    trainer.fit(module, loader)

The Trainer rebuilds the loaders it is given, starts their iterators before the first training hook,
and may fetch a batch ahead of the one it trains. So each training loader is exchanged where the
strategy is asked to process it: after samplers were injected, before it is iterated. What it hands
out waits until ``on_train_batch_start`` says that it is trained; what was only fetched is not
recorded.

Under Fabric the loop is one's own: wrap what ``setup_dataloaders`` returned in ``AuditedSampler``.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler, SequentialSampler

from auditor.errors import AuditorError
from auditor.record.frameworks.exchange import SAVE_WAIT_S, exchange
from auditor.record.identity import Locator
from auditor.record.live import call_on, evaluating
from auditor.record.monitor import NOT_KNOWN, GradeMonitor
from auditor.record.recorder import Recorder, recorder_for
from auditor.record.sampler import AuditedSampler
from auditor.record.sites import find_blocks
from auditor.record.tagging import RawTag, SentTag, Tag

# Of the two names of one library, the one that the program has loaded already.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

log = logging.getLogger("auditor")

WAITING_BATCHES: Final = 64
"""Batches handed out and not trained that are kept, per loader. The Trainer fetches one ahead; more
wait only where it iterates without callbacks, to find a learning rate for instance."""

_HookT = TypeVar("_HookT", bound=Callable[..., Any])


def _guarded(hook: _HookT) -> _HookT:
    """The hook, whose exceptions are counted and do not reach the Trainer."""

    @functools.wraps(hook)
    def guarded(self: AuditCallback, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            self._failed(f"AuditCallback.{hook.__name__}", error)

    return guarded  # type: ignore[return-value]


class AuditCallback(Callback):
    """Record what a ``Trainer`` trains on, and, with ``every``, grade its model.

    Example:
        trainer = Trainer(
            max_epochs=1,
            callbacks=[AuditCallback(run="run/", every=200, probe=held_out_batch)],
        )
        trainer.fit(module, train_loader)

    Steps have the Trainer's numbers, counted from 0: the first update is step 0, and after it
    ``trainer.global_step`` is 1. With several optimizers, a step has the number of the first of
    them that stepped. Each ``fit`` is an attempt of its own; resumed from a checkpoint, it goes on
    at that checkpoint's step, and what came after it in the attempt before counts as rolled back.
    Of several training loaders, each is recorded, and their batches belong to one step. Sanity
    checks, validation and what is fetched without being trained are not recorded; a batch that
    ``training_step`` or ``on_train_batch_start`` passed over is ``delivered`` and part of no step.

    Where ``training_step`` takes ``dataloader_iter``, a batch is recorded when it is taken from
    there.

    Args:
        run: the run directory, made when it is not there.
        every: steps between samples of a ``GradeMonitor``; None for no monitor.
        probe: of the monitor: a held-out batch, or a callable that returns one. A batch is moved to
            the module's device.
        probe_loss: of the monitor, called as ``probe_loss(module, probe)`` with the
            ``LightningModule``. By default the part of it that holds the transformer blocks is
            called on the probe.
        locator: ``locator(index, sample) -> Located``, as of ``AuditedSampler``.
        columns: further columns of the samples to keep with the record, by name.
        duplication: whether to score how duplicated each sample is; or a folder of sketches.
        monitor: further arguments of ``GradeMonitor``: ``policy``, ``on_alert``, ``exporters``, ...

    Raises:
        ValueError: ``every`` is not positive, or not given though the monitor has arguments.
        RunClaimedError: by ``fit``, before it trains: another live process records this run and
            rank.
    """

    def __init__(
        self,
        run: str | PathLike[str],
        *,
        every: int | None = None,
        probe: Any = None,
        probe_loss: Callable[[Any, Any], Tensor] | None = None,
        locator: Locator | None = None,
        columns: Sequence[str] = (),
        duplication: bool | str | PathLike[str] = True,
        **monitor: Any,
    ) -> None:
        super().__init__()
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1 step, got {every!r}")
        if monitor and every is None:
            raise ValueError(f"{', '.join(monitor)}: of a monitor, which every= asks for")
        self._run = run
        self._every = every
        self._probe = probe
        self._probe_loss = probe_loss
        self._of_monitor = monitor
        self._of_loaders = {"locator": locator, "columns": columns, "duplication": duplication}
        self._fit: _Fit | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._end()  # of a fit that was broken off
        try:
            self._fit = _Fit(trainer, pl_module, self._run, self._of_loaders)
        except AuditorError:  # nothing would be recorded: said before training, as by the sampler
            raise
        except Exception as error:
            self._failed("AuditCallback.setup", error)

    @_guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.train_start()
            if self._every is not None:
                self._fit.monitor(self._every, self._probe, self._probe_loss, self._of_monitor)

    @_guarded
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.watch()

    @_guarded
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.batch_start()

    @_guarded
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._fit is not None:
            self._fit.backward(loss)

    @_guarded
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._fit is not None:
            self._fit.before_step(optimizer)

    @_guarded
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.batch_end()

    @_guarded
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.settle()

    @_guarded
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if self._fit is not None:
            self._fit.recorder.drain(SAVE_WAIT_S)

    @_guarded
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    @_guarded
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._end()

    def _end(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.end()

    def _failed(self, place: str, error: Exception) -> None:
        if self._fit is not None:
            self._fit.recorder.failed(place, error)
        else:
            log.warning("auditor: %s failed; training is not affected: %r", place, error)


class _LentLoader(AuditedSampler):
    """A training loader in the Trainer's hands; what it handed out waits to be trained."""

    _fit: _Fit
    _waiting: collections.deque[Tag | SentTag | RawTag]
    _exhausted: bool

    def __init__(self, loader: Any, fit: _Fit, **options: Any) -> None:
        # These first: an attribute that is set later, and that the loader has, is meant for it.
        vars(self).update(_fit=fit, _waiting=collections.deque(), _exhausted=True, _recorder=None)
        super().__init__(loader, **options)

    @property
    def lent(self) -> Any:
        """The loader as it was."""
        return self._loader

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("_inner")
        if inner is None or name in vars(self) or not hasattr(inner, name):
            super().__setattr__(name, value)
            return
        setattr(self._loader, name, value)
        if name == "collate_fn" and self._tagged:
            collate = copy.copy(inner.collate_fn)
            collate._collate = value
            value = collate
        setattr(inner, name, value)

    def __iter__(self) -> Iterator[Any]:
        # An iterator left before its end has handed out what is never trained. One that came to its
        # end has not: in a cycle of several loaders its last batch may still wait.
        if not self._exhausted:
            self._waiting.clear()
        self._exhausted = False
        return _Noticed(super().__iter__(), self._note_exhausted)

    def _note_exhausted(self) -> None:
        self._exhausted = True

    def _hand_over(self, batch: Any, tag: Tag | SentTag | RawTag) -> None:
        try:
            if self._fit.takes_at_once:
                super()._hand_over(batch, tag)
            elif batch is not None or not self._fit.is_only(self):
                self._waiting.append(tag)
                if len(self._waiting) > WAITING_BATCHES:
                    self._waiting.popleft()
        except Exception as error:
            self._open().failed("handing a batch over", error)

    def deliver(self) -> int | None:
        """The batch that waits longest is trained now; its number, None where none waits."""
        return self._note_delivered(self._waiting.popleft(), "delivered") if self._waiting else None


class _StatefulLentLoader(_LentLoader):
    """Of a loader that can be resumed, which the Trainer tells by these two methods."""

    def state_dict(self) -> Any:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._inner.load_state_dict(state_dict)


class _Noticed(Iterator[Any]):
    """An iterator whose end is noticed."""

    def __init__(self, iterator: Iterator[Any], at_end: Callable[[], None]) -> None:
        self._iterator = iterator
        self._at_end = at_end

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._at_end()
            raise


class _Fit:
    """One call of ``fit``: what is exchanged and watched for it, and put back at its end."""

    def __init__(
        self,
        trainer: Any,
        module: Any,
        run: str | PathLike[str],
        of_loaders: dict[str, Any],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._run = run
        self._of_loaders = of_loaders
        self.recorder: Recorder = recorder_for(run)
        self.takes_at_once = "dataloader_iter" in inspect.signature(module.training_step).parameters
        self._undo = contextlib.ExitStack()
        self._batches: list[int] = []  # of the training step that runs
        self._is_trained = False
        self._monitor: GradeMonitor | None = None
        self._losses: list[Tensor] = []
        self._exchange_loaders()

    # -- loaders ---------------------------------------------------------------------------

    def _exchange_loaders(self) -> None:
        trainer, strategy = self._trainer, self._trainer.strategy
        process, prepare = strategy.process_dataloader, trainer._data_connector._prepare_dataloader

        @functools.wraps(process)
        def process_dataloader(dataloader: Any) -> Any:
            processed = process(dataloader)
            if not trainer.training:
                return processed
            try:
                return self._lent(processed)
            except Exception as error:
                self.recorder.failed("auditing a loader", error)
                return processed

        @functools.wraps(prepare)
        def prepare_dataloader(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = prepare(dataloader, *args, **kwargs)
            if trainer.training and prepared is not dataloader:
                self._warn_of_replaced_sampler(dataloader, prepared)
            return prepared

        exchange(self._undo, strategy, "process_dataloader", process_dataloader)
        exchange(self._undo, trainer._data_connector, "_prepare_dataloader", prepare_dataloader)

    def _lent(self, loader: Any) -> Any:
        if isinstance(loader, _LentLoader):  # in a CombinedLoader that is given again
            loader = loader.lent
        if isinstance(loader, AuditedSampler):
            log.warning("auditor: AuditCallback leaves a loader alone that is audited already")
            return loader
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        lend = _StatefulLentLoader if stateful else _LentLoader
        return lend(loader, self, run=self._run, **self._of_loaders)

    def _loaders(self) -> list[Any]:
        """The training loaders now, in the order of their batches."""
        combined = self._trainer.fit_loop._combined_loader
        return [] if combined is None else combined.flattened

    def is_only(self, loader: Any) -> bool:
        """Whether its batches are the Trainer's, and not parts of them."""
        return self._trainer.train_dataloader is loader

    def _warn_of_replaced_sampler(self, before: Any, after: Any) -> None:
        try:
            sampler, new = before.sampler, after.sampler
            if after.batch_sampler is not None and not isinstance(new, torch.utils.data.Sampler):
                new = getattr(after.batch_sampler, "sampler", new)
            if not self._trainer.is_global_zero or _is_plain(sampler, before.dataset):
                return
            wrapped = getattr(getattr(new, "dataset", None), "_sampler", None) is sampler
            if wrapped:
                log.warning(
                    "auditor: Lightning trains on every %d-th index that your %s draws. Each rank "
                    "draws for itself: unless all are seeded alike, they divide different draws",
                    self._trainer.world_size,
                    type(sampler).__name__,
                )
            else:
                log.warning(
                    "auditor: Lightning replaced your %s by a %s: it does not decide what is "
                    "trained on. Trainer(use_distributed_sampler=False) keeps it",
                    type(sampler).__name__,
                    type(new).__name__,
                )
        except Exception as error:
            self.recorder.failed("looking at samplers", error)

    # -- the training loop -----------------------------------------------------------------

    def train_start(self) -> None:
        # A Trainer that has counted no step of a resumed training does not count them: with
        # optimizers that step behind its back.
        if self._trainer.global_step or not getattr(self._trainer, "ckpt_path", None):
            self.recorder.next_step = self._trainer.global_step
        self.watch()

    def watch(self) -> None:
        for optimizer in self._trainer.optimizers:
            self.recorder.watch(optimizer)

    def batch_start(self) -> None:
        self.settle()
        # Also over steps that it counted and that no batch took part in.
        self.recorder.next_step = max(self.recorder.next_step, self._trainer.global_step)
        self._is_trained = False
        numbers = [one.deliver() for one in self._loaders() if isinstance(one, _LentLoader)]
        self._batches = [number for number in numbers if number is not None]

    def backward(self, loss: Tensor) -> None:
        self._is_trained = True
        if self._monitor is None:
            return
        loss = loss.detach()
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None:  # of mixed precision; the loss is scaled already
            loss = loss / scaler.scale(torch.ones_like(loss))
        if self._module.automatic_optimization:
            loss = loss * self._trainer.accumulate_grad_batches
        self._losses.append(loss)

    def before_step(self, optimizer: Any) -> None:
        """Gradients are there, unscaled and not yet clipped."""
        # The Trainer steps also where the last batch of a window gave no loss.
        if self._module.automatic_optimization:
            self.settle()
        if self._monitor is not None and self.recorder.pending:
            losses, self._losses = self._losses, []
            loss = torch.stack(losses).mean() if losses else NOT_KNOWN
            self._monitor.step(loss, optimizer=optimizer)

    def batch_end(self) -> None:
        # In manual optimization nobody need tell of a backward.
        self._is_trained = self._is_trained or not self._module.automatic_optimization
        self.settle()

    def settle(self) -> None:
        """What the step that runs, or ran, was given and did not train takes part in no update."""
        if not self._is_trained:
            self.recorder.withdraw(self._batches)
            self._batches = []

    # -- the monitor -----------------------------------------------------------------------

    def monitor(
        self,
        every: int,
        probe: Any,
        probe_loss: Callable[[Any, Any], Tensor] | None,
        options: Mapping[str, Any],
    ) -> None:
        module, trainer = self._module, self._trainer
        if probe is not None and not callable(probe):
            probe = module.transfer_batch_to_device(probe, module.device, 0)

        def loss_of_probe(part: nn.Module, batch: Any) -> Any:
            with trainer.precision_plugin.forward_context(), evaluating(module):
                if probe_loss is not None:
                    return probe_loss(module, batch)
                return getattr(call_on(part, batch), "loss", None)

        self._monitor = GradeMonitor(
            _part_with_blocks(module),
            run=self._run,
            every=every,
            probe=probe,
            probe_loss=loss_of_probe,
            **options,
        )

    def end(self) -> None:
        """Put everything back, and close the attempt."""
        try:
            self._undo.close()
            loaders = self._loaders()
            if any(isinstance(one, _LentLoader) for one in loaders):
                self._trainer.fit_loop._combined_loader.flattened = [
                    one.lent if isinstance(one, _LentLoader) else one for one in loaders
                ]
        except Exception as error:
            self.recorder.failed("ceasing to record", error)
        if self._monitor is not None:
            self._monitor.close()
        self.recorder.close()


def _is_plain(sampler: Any, dataset: Any) -> bool:
    """Whether a sampler says no more than whether to shuffle."""
    if type(sampler) is SequentialSampler:
        return True
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(dataset)
    )


def _part_with_blocks(module: nn.Module) -> nn.Module:
    """The child that holds the transformer blocks, which ``training_step`` calls; else the module.

    ``training_step`` need not call the module itself.
    """
    blocks = find_blocks(module)
    path = blocks[0].path.split(".") if blocks else []
    return getattr(module, path[0]) if len(path) > 2 else module
