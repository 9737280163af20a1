"""Recording under ``transformers.Trainer``, with one line.

    trainer = audited(Trainer(model, args, train_dataset=dataset), run="run/")
    trainer.train()

The Trainer builds its own loader, and builds another one when it resumes inside an epoch, from the
dataset and the collate function of the first; so those two carry the tags, and they are outermost:
they see samples as the dataset returned them, before unused columns are removed. A whole
accumulation window of batches is fetched before the first of them is trained; so a batch counts as
delivered when ``training_step`` is called with it. Callbacks never see a batch, and a hook on the
model's forward would not survive ``torch.compile`` or a loss that does not pass the batch on; so
two methods of the trainer are wrapped while it trains: ``get_batch_samples`` takes the tags off,
and ``training_step`` says which batch it was given.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from auditor.errors import IdentityError
from auditor.record.datasets import is_a
from auditor.record.frameworks.exchange import SAVE_WAIT_S, exchange
from auditor.record.identity import Located, Locator
from auditor.record.lookup import Lookup
from auditor.record.monitor import NOT_KNOWN, GradeMonitor
from auditor.record.recorder import Recorder, rank_and_world, recorder_for
from auditor.record.sites import eager, find_blocks
from auditor.record.steps import inner_optimizer
from auditor.record.tagging import Describer, RawTag, SendingRows, SentTag, Tag, tagging_copy

log = logging.getLogger("auditor")

COMPARED_ROWS: Final = 16
"""Rows by which a dataset is known to be another one without some of its columns."""

_LOOPS: Final = ("_inner_training_loop", "_run_epoch")
"""Methods of the Trainer that iterate its loader."""

_TrainerT = TypeVar("_TrainerT", bound=Trainer)


def audited(
    trainer: _TrainerT,
    *,
    run: str | PathLike[str],
    every: int | None = None,
    probe: Any = None,
    probe_loss: Callable[[nn.Module, Any], Tensor] | None = None,
    locator: Locator | None = None,
    columns: Sequence[str] = (),
    duplication: bool | str | PathLike[str] = True,
    **monitor: Any,
) -> _TrainerT:
    """Let a ``Trainer`` record what it trains on, and, with ``every``, grade its model.

    Example:
        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        trainer = audited(trainer, run="run/", every=200, probe=held_out_batch)
        trainer.train()

    Steps have the trainer's numbers, counted from 0: the first update is step 0, and after it the
    trainer's ``global_step`` is 1. Each call of ``train()`` is an attempt of its own; resumed from
    a checkpoint, it goes on at that checkpoint's step, and what came after it in the attempt before
    counts as rolled back. Ids and sources are those of the dataset's columns, also of those that
    the Trainer removes. Evaluation is not recorded.

    Args:
        trainer: a ``Trainer`` or a subclass that leaves the training loop as it is. It is changed
            while ``train()`` runs, by a callback and around two methods, and returned.
        run: the run directory, made when it is not there.
        every: steps between samples of a ``GradeMonitor``; None for no monitor. Its losses are
            those that the Trainer averages for its own log, on this rank.
        probe: of the monitor: a held-out batch, or a callable that returns one. A batch is moved to
            the trainer's device.
        probe_loss: of the monitor.
        locator: ``locator(index, sample) -> Located``, as of ``AuditedSampler``. Of a
            ``datasets.Dataset``, the sample has all columns.
        columns: further columns of the samples to keep with the record, by name.
        duplication: whether to score how duplicated each sample is; or a folder of sketches.
        monitor: further arguments of ``GradeMonitor``: ``policy``, ``on_alert``, ``exporters``, ...

    Raises:
        RunClaimedError: another live process records this run and rank.
        RunError: ``duplication`` is a folder without sketches.
        TypeError: ``trainer`` is not a ``Trainer``.
        ValueError: the trainer is audited already; ``every`` is not positive, or not given though
            the monitor has arguments; the model has no transformer blocks to monitor.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(one, _Audit) for one in callbacks):
        raise ValueError("this trainer is audited already")
    model = trainer.model
    if every is not None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every!r}")
        if model is not None and "sites" not in monitor and not find_blocks(eager(model)):
            raise ValueError(f"no transformer blocks found in {type(model).__name__}")
    elif monitor:
        raise ValueError(f"{', '.join(monitor)}: of a monitor, which every= asks for")
    options = {"run": run, "every": every, "probe": probe, "probe_loss": probe_loss, **monitor}
    audit = _Audit(
        trainer,
        run,
        monitor=None if every is None else options,
        locator=locator,
        columns=columns,
        duplication=duplication,
    )
    callbacks.insert(0, audit)  # before those that look at the loader
    return trainer


class _Carried(NamedTuple):
    """A batch and its tag on their way through the loader; moved, sliced and joined as tuples are.

    ``tag``: a tensor, as :class:`SendingRows` makes it, where a rank dispatches to others.
    """

    batch: Any
    tag: Any


def _carried(batch: Any, tag: Tag | RawTag) -> _Carried:
    return _Carried(batch, tag)


class _CarriedRows:
    def __init__(self, describer: Describer) -> None:
        self._rows = SendingRows(describer)

    def __call__(self, batch: Any, tag: Tag | RawTag) -> _Carried:
        return _Carried(*self._rows(batch, tag))


class _Audit(TrainerCallback):
    """What an audited trainer is audited by: it begins, numbers and ends the attempts."""

    def __init__(
        self,
        trainer: Any,
        run: str | PathLike[str],
        *,
        monitor: Mapping[str, Any] | None,
        locator: Locator | None,
        columns: Sequence[str],
        duplication: bool | str | PathLike[str],
    ) -> None:
        self._trainer = trainer
        self._run = run
        self._monitor = monitor
        self._locator = locator
        self._columns = columns
        self._duplication = duplication
        self._lookup = None if isinstance(duplication, bool) else Lookup(Path(duplication))
        self._training: _Training | None = None
        self._recorder = self._open()

    def on_train_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        self._end()  # of a training that an exception broke off
        try:
            recorder = self._recorder
            if recorder.pending or recorder.last_batches:
                recorder.close()  # another trainer's, broken off as well
            if recorder.closed:
                self._recorder = self._open()
            self._begin(args, state, of_trainer)
        except Exception as error:
            self._recorder.failed("beginning to record", error)
            if self._training is not None:
                self._training.put_back()  # no tag without one who takes it off

    def _open(self) -> Recorder:
        recorder = recorder_for(self._run)
        if self._duplication:
            recorder.score_duplication()
        return recorder

    def _begin(self, args: Any, state: Any, of_trainer: Mapping[str, Any]) -> None:
        recorder, trainer, loader = self._recorder, self._trainer, of_trainer["train_dataloader"]
        recorder.next_step = state.global_step
        dataset = _dataset_of(trainer, loader)
        recorder.describe_dataset(dataset)
        locator = self._locator
        if locator is not None and is_a(dataset, "datasets", "Dataset"):
            locator = _LocatorOfRows(locator, dataset)
        describer = Describer(
            locator=locator,
            columns=self._columns,
            sketching=self._duplication is not False,
            lookup=self._lookup,
        )
        describer.of_attempt(
            recorder.attempt.ledger("samples"), recorder.dataset_number(dataset), dataset
        )
        self._training = _Training(recorder, describer)
        if own := _own_loop(trainer):
            log.warning(
                "auditor: %s trains in a way of its own (%s); what it trains on is not recorded",
                type(trainer).__name__,
                own,
            )
        elif not self._training.tag(loader):
            log.warning(
                "auditor: a %s cannot be recorded: it is neither a DataLoader nor one that "
                "Accelerate made of it",
                type(loader).__name__,
            )
        else:
            # Whoever else looks at the loader finds it as it was.
            trainer.callback_handler.train_dataloader = self._training.untagged
            self._training.wrap(trainer)
        recorder.watch(of_trainer["optimizer"])
        if self._monitor is not None:
            self._training.monitor(self._monitor, trainer, args.device)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        if self._training is not None:
            self._training.measure(of_trainer["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        if self._training is not None:
            self._training.close_step(self._trainer, of_trainer["optimizer"], state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        if self._training is not None:
            self._recorder.drain(SAVE_WAIT_S)

    def on_train_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        self._end()

    def _end(self) -> None:
        training, self._training = self._training, None
        if training is not None:
            training.end()


class _Training:
    """One call of ``train()``: what is wrapped and tagged for it, and put back at its end."""

    def __init__(self, recorder: Recorder, describer: Describer) -> None:
        self._recorder = recorder
        self._describer = describer
        self._fetched: list[_Carried] = []
        self._undo = contextlib.ExitStack()
        self._monitor: GradeMonitor | None = None
        self._loss: Tensor | None = None
        self._grad_norm: Any = None
        self.untagged: Any = None

    # -- the loader ------------------------------------------------------------------------

    def tag(self, loader: Any) -> bool:
        """Let the loader's batches carry tags, in place; False when it is none that we know."""
        attributes = getattr(loader, "__dict__", {})
        inner = attributes.get("base_dataloader")
        if isinstance(inner, DataLoader):  # Accelerate's
            # One that dispatches to others sends tensors alone. By itself it passes anything on;
            # streams come from it also then, and their duplicates can be scored as ever.
            sends = type(loader).__name__ == "DataLoaderDispatcher" and rank_and_world()[1] > 1
            attach = _CarriedRows(self._describer) if sends else _carried
            tagged = {"base_dataloader": tagging_copy(inner, self._describer, attach)}
        elif isinstance(loader, DataLoader):
            attributes_of_copy = vars(tagging_copy(loader, self._describer, _carried))
            tagged = {
                name: attributes_of_copy[name] for name in ("dataset", "collate_fn", "_iterator")
            }
        else:
            return False
        # A copy without calling anything: Accelerate's loaders are not made to be copied.
        self.untagged = object.__new__(type(loader))
        vars(self.untagged).update(attributes)
        original = {name: attributes[name] for name in tagged}
        self._undo.callback(attributes.update, original)
        attributes.update(tagged)
        return True

    # -- the methods -----------------------------------------------------------------------

    def wrap(self, trainer: Any) -> None:
        """Wrap the two methods between which the tags are taken off and the batch is consumed."""
        get_batch_samples, training_step = trainer.get_batch_samples, trainer.training_step

        @functools.wraps(get_batch_samples)
        def fetch(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            self._fetched.clear()  # what is left was fetched and never trained
            result = get_batch_samples(_WithoutTags(iterator, self._fetched), *args, **kwargs)
            self._notice_replaced(result)
            return result

        @functools.wraps(training_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._deliver(args[1] if len(args) > 1 else kwargs.get("inputs"))
            return training_step(*args, **kwargs)

        exchange(self._undo, trainer, "get_batch_samples", fetch)
        exchange(self._undo, trainer, "training_step", step)

    def _notice_replaced(self, result: Any) -> None:
        """A subclass may make new batches of those it fetched; as many, in order, are the same."""
        batches = result[0] if isinstance(result, tuple) and result else None
        if isinstance(batches, list) and len(batches) == len(self._fetched):
            self._fetched[:] = [
                _Carried(batch, carried.tag)
                for batch, carried in zip(batches, self._fetched, strict=True)
            ]

    def _deliver(self, batch: Any) -> None:
        try:
            found = [one for one in self._fetched if one.batch is batch]
            if not found:
                raise IdentityError("training_step was given a batch that no loader returned")
            tag = found[0].tag
            if isinstance(tag, Tensor):
                tag = SentTag(tag)
            self._recorder.delivered(tag, self._describer)
        except Exception as error:
            self._recorder.failed("recording a batch", error)

    # -- steps -----------------------------------------------------------------------------

    def close_step(self, trainer: Any, optimizer: Any, global_step: int) -> None:
        """The trainer has made a step; from now on its number is ``global_step``."""
        try:
            if self._recorder.pending:
                # Its optimizer did not say that it stepped: it skipped this one, or it never does.
                says = hasattr(inner_optimizer(optimizer), "register_step_post_hook")
                skipped = says or trainer.accelerator.optimizer_step_was_skipped
                self._recorder.close_step("discarded" if skipped else "trained")
            # The trainer counts a skipped step as well.
            self._recorder.next_step = global_step
        except Exception as error:
            self._recorder.failed("closing a step", error)

    # -- the monitor -----------------------------------------------------------------------

    def monitor(self, options: Mapping[str, Any], trainer: Any, device: torch.device) -> None:
        probe = options["probe"]
        try:
            if not callable(probe):
                probe = send_to_device(probe, device)
            # The wrapped model, that tells whether it is compiled.
            self._monitor = GradeMonitor(trainer.model_wrapped, **{**options, "probe": probe})
        except Exception as error:
            self._recorder.failed("making the monitor", error)
            return
        training_step = trainer.training_step

        @functools.wraps(training_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            self._add_loss(loss)
            return loss

        exchange(self._undo, trainer, "training_step", step)
        # Gradients are clipped before callbacks see them; the norm they had is returned here.
        clip = trainer.accelerator.clip_grad_norm_

        @functools.wraps(clip)
        def clip_grad_norm(*args: Any, **kwargs: Any) -> Any:
            self._grad_norm = clip(*args, **kwargs)
            return self._grad_norm

        exchange(self._undo, trainer.accelerator, "clip_grad_norm_", clip_grad_norm)

    def _add_loss(self, loss: Any) -> None:
        """The Trainer scales the losses of a window so that their sum is the loss of the step."""
        try:
            loss = loss.detach()
            self._loss = loss if self._loss is None else self._loss + loss
        except Exception as error:
            self._recorder.failed("the loss of a step", error)

    def measure(self, optimizer: Any) -> None:
        """The optimizer has stepped and its gradients are still there."""
        if self._monitor is None:
            return
        loss, self._loss = self._loss, None
        norm, self._grad_norm = self._grad_norm, None
        self._monitor.step(
            NOT_KNOWN if loss is None else loss,
            optimizer=optimizer,
            grad_norm=NOT_KNOWN if norm is None else norm,
        )

    def put_back(self) -> None:
        """Leave loader and trainer as they were before."""
        try:
            self._undo.close()
        except Exception as error:
            self._recorder.failed("ceasing to record", error)
        self._fetched.clear()

    def end(self) -> None:
        """Put everything back, and close the attempt."""
        self.put_back()
        if self._monitor is not None:
            self._monitor.close()
        self._recorder.close()


class _WithoutTags:
    """An iterator of batches; what it took off them is added to ``fetched``."""

    def __init__(self, iterator: Iterator[Any], fetched: list[_Carried]) -> None:
        self._iterator = iterator
        self._fetched = fetched

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._iterator)
        if not isinstance(item, _Carried):
            return item
        self._fetched.append(item)
        return item.batch


class _LocatorOfRows:
    """Calls a locator with all columns of a ``datasets.Dataset``; picklable where that one is."""

    def __init__(self, locator: Locator, dataset: Any) -> None:
        self._locator = locator
        self._rows = dataset.with_format(None)

    def __call__(self, index: Any, sample: Any) -> Located | Sequence[Located]:
        return self._locator(index, {**self._rows[index], **sample})


def _dataset_of(trainer: Any, loader: Any) -> Any:
    """The dataset that indices mean: the trainer's, where the loader's is it without columns."""
    read: Any = getattr(loader, "dataset", None)
    whole: Any = trainer.train_dataset
    if is_a(read, "accelerate", "IterableDatasetShard"):
        read = read.dataset
    if not is_a(read, "datasets", "Dataset") or not is_a(whole, "datasets", "Dataset"):
        return read
    shared = list(read.column_names)
    if len(read) != len(whole) or not set(shared) <= set(whole.column_names):
        return read
    places = sorted({i * (len(read) - 1) // COMPARED_ROWS for i in range(COMPARED_ROWS + 1)})
    rows = whole.with_format(None).select_columns(shared)[places]
    return whole if rows == read.with_format(None)[places] else read


def _own_loop(trainer: Any) -> str | None:
    """The method of a subclass, outside of transformers, that trains in a way of its own."""
    for name in _LOOPS:
        method = getattr(type(trainer), name, None)
        if method is not None and method.__module__.split(".")[0] != "transformers":
            return name
    return None
