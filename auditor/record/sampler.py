"""``AuditedSampler``: the same batches in the same order, and a record of what was consumed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from auditor.record import arguments
from auditor.record.batches import Rows
from auditor.record.frameworks.accelerate import divides_twice, is_prepared, tagging_view
from auditor.record.identity import Locator
from auditor.record.lookup import Lookup
from auditor.record.recorder import Recorder, rank_and_world, recorder_for
from auditor.record.steps import inner_optimizer
from auditor.record.tagging import (
    Describer,
    RawTag,
    SentTag,
    Tag,
    has_untagged_workers,
    other_rows,
    paired,
    restart_workers,
    tagging_copy,
)

log = logging.getLogger("auditor")


class AuditedSampler:
    """Wrap a loader; record each batch at the moment the loop takes it.

    Example:
        loader = AuditedSampler(DataLoader(dataset, batch_size=32), run="run/")
        for batch in loader:
            ...

    Args:
        loader: a ``DataLoader`` (it is copied, not changed; samplers and generators are shared),
            also one that Accelerate or Fabric prepared; or any iterable of batches, whose samples
            are then told by their id columns or content; or a ``Sampler`` or batch sampler to hand
            to a loader, which records what was *drawn* only, since a sampler cannot know what
            arrives. Without a loader, the loop says what it takes: see :meth:`record`.
        run: the run directory, made when it is not there. A ``GradeMonitor`` on the same path
            shares its steps.
        optimizer: when given, its own ``step()`` closes each training step. Without it, and
            without a ``GradeMonitor``, batches are recorded as delivered and belong to no step.
        start_step: number of the first step; by default one past the last recorded step, 0 at
            first. Give it when a run is resumed from a checkpoint. Where this process has recorded
            batches of the run, a new attempt begins.
        locator: ``locator(index, sample) -> Located`` names id, source, shard, row or content of
            a raw sample where its columns do not; a list of ``Located`` for a row that packs
            several documents. ``index`` is None for iterable datasets.
        skip: batches not to train on, by ordinal (int), or samples by id (str), whose batches are
            left out; a list, set, array or tensor of them, or the file with them that ``auditor
            propose --skip-list json`` wrote. They are drawn, recorded as ``skipped`` and not
            yielded.
        columns: further columns of the samples to keep with the record, by name.
        duplication: whether to score how duplicated each sample is: in its batch, in the last 64
            batches, over the run, and inside itself. Done in loader workers and on a background
            thread. False records ids alone; a folder that ``auditor sketch`` wrote is looked up by
            sample id instead of sketching the same samples again.

    Attributes of the loader (``dataset``, ``state_dict``, ``sampler.set_epoch``, ...) are reached
    through the wrapper.

    Raises:
        RunClaimedError: another live process records this run and rank.
        RunError: ``duplication`` is a folder without sketches.
        ValueError: an argument is not what it has to be; ``loader`` is recorded in ``run`` already.
    """

    def __init__(
        self,
        loader: Any = None,
        *,
        run: str | PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        start_step: int | None = None,
        locator: Locator | None = None,
        skip: Collection[int | str] | PathLike[str] | None = None,
        columns: Sequence[str] = (),
        duplication: bool | str | PathLike[str] = True,
    ) -> None:
        if loader is not None and not isinstance(loader, Iterable):
            raise ValueError(f"loader must be iterable, got {type(loader).__name__}")
        arguments.check_path("run", run)
        if not isinstance(duplication, bool):
            arguments.check_path("duplication", duplication)
        if locator is not None and not callable(locator):
            raise ValueError(f"locator must be callable, got {locator!r}")
        if optimizer is not None and not callable(getattr(optimizer, "step", None)):
            raise ValueError(
                f"optimizer must be one optimizer, with a step(), got {type(optimizer).__name__}"
            )
        columns = arguments.names("columns", columns)
        start_step = None if start_step is None else arguments.natural("start_step", start_step)
        _check_not_recorded(loader, run)
        self._loader: Any = loader
        self._run = run
        # Weakly, as the recorder does: a loader that is kept keeps no optimizer of an earlier run.
        self._optimizer = None if optimizer is None else weakref.ref(inner_optimizer(optimizer))
        self._skip = arguments.skipped(skip)
        self._duplication = duplication
        self._n_batches = 0
        self._rebuilt = False
        self._describer = Describer(
            locator=locator,
            columns=columns,
            sketching=duplication is not False,
            lookup=None if isinstance(duplication, bool) else Lookup(Path(duplication)),
            unwanted=frozenset(one for one in self._skip if isinstance(one, str)),
        )
        self._tagged = not _is_audited(loader) and (
            isinstance(loader, DataLoader) or _wraps_loader(loader)
        )
        if self._tagged and has_untagged_workers(loader):
            self._tagged = False
            log.warning(
                "auditor: the loader's workers were started before it was wrapped: its samples are "
                "told by the id columns or the content of the batches, not by their dataset index"
            )
        self._inner: Any = self._tagging(loader)
        self._recorder: Recorder | None = None
        recorder = self._open()
        if start_step is not None:
            if recorder.has_begun:  # what follows may repeat its steps, which one attempt cannot
                watched = recorder.watched
                recorder.close()
                recorder = self._open()
                for one in watched:
                    recorder.watch(one)
            recorder.start_at(start_step)
        dataset = getattr(loader, "dataset", None)
        if dataset is not None:
            recorder.describe_dataset(dataset)
        _warn_of_undivided_data(loader)

    def _open(self) -> Recorder:
        """The recorder of the run; one of a new attempt after it was closed."""
        if self._recorder is None or self._recorder.closed:
            reopened = self._recorder is not None
            recorder = self._recorder = recorder_for(self._run)
            optimizer = None if self._optimizer is None else self._optimizer()
            if optimizer is not None:
                recorder.watch(optimizer)
            if self._duplication is not False:
                recorder.score_duplication()
            dataset = getattr(self._loader, "dataset", None)
            self._describer.of_attempt(
                recorder.attempt.ledger("samples"),
                recorder.dataset_number(dataset),
                dataset,
            )
            if reopened and self._tagged and getattr(self._inner, "persistent_workers", False):
                # Its workers describe for an earlier attempt.
                restart_workers(getattr(self._inner, "base_dataloader", self._inner))
        return self._recorder

    def _tagging(self, loader: Any) -> Any:
        if not self._tagged:
            return loader
        if is_prepared(loader):
            return tagging_view(loader, self._describer)
        tagged = tagging_copy(loader, self._describer)
        return paired(tagged) if isinstance(tagged, DataLoader) else tagged

    def __iter__(self) -> Iterator[Any]:
        self._open()
        if self._loader is None:
            raise TypeError("this AuditedSampler has no loader to iterate; use record()")
        # A map, not a generator: the loader's iterator starts now, as it would without us, and goes
        # on after an exception of a worker, which would end a generator.
        if isinstance(self._loader, Sampler):
            return map(self._draw, iter(self._inner))
        batches = map(self._take, iter(self._inner))
        return filter(_is_wanted, batches) if self._skip else batches

    def _take(self, item: Any) -> Any:
        """The loop takes a batch: its tag comes off, and it is recorded."""
        batch, tag = item if self._tagged else (item, self._tag_of(item))
        if isinstance(tag, torch.Tensor):
            tag = SentTag(tag)
        ordinal = self._n_batches
        self._n_batches += 1
        if self._skip and self._is_skipped(ordinal, tag):
            self._note_delivered(tag, "skipped")
            return _LEFT_OUT
        self._hand_over(batch, tag)
        return batch

    def _hand_over(self, batch: Any, tag: Tag | SentTag | RawTag) -> None:
        """The loop takes the batch here; where a framework trains it later, this is overridden."""
        self._note_delivered(tag, "delivered")

    def _draw(self, drawn: Any) -> Any:
        recorder = self._open()
        try:
            recorder.drawn(drawn if isinstance(drawn, list | tuple) else [drawn])
        except Exception as error:
            recorder.failed("recording a draw", error)
        return drawn

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in {"_inner", "_loader", "_rebuilt"}:  # not there yet while unpickling
            raise AttributeError(name)
        if name == "collate_fn" and is_prepared(self._loader) and not self._rebuilt:
            self._rebuilt = True
            log.warning(
                "auditor: another loader is built from an AuditedSampler (skip_first_batches does "
                "so): what it yields is not recorded. Skip first, then wrap: "
                "AuditedSampler(skip_first_batches(prepared, n), ...)"
            )
        # Of the copy, whose iteration state is the true one (a prepared loader shares it); but the
        # functions and the dataset that tag are ours, and not for others to build a loader from.
        of_original = is_prepared(self._loader) or name in {"collate_fn", "dataset"}
        return getattr(self._loader if of_original else self._inner, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Of a loader that Accelerate prepared, its class: by that ``skip_first_batches`` builds
        a loader that synchronises, moves to the device and ends as the prepared one does."""
        loader = self.__dict__.get("_loader")
        return type(loader) if is_prepared(loader) else type(self)

    def __reduce__(self) -> Any:
        return _restored, (type(self), self.__getstate__())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recorder": None, "_inner": None, "_optimizer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._inner = self._tagging(self._loader)

    def record(self, ids: Any, samples: Any = None) -> None:
        """Record a batch that the loop put together itself: call it where the batch is taken.

            audited = AuditedSampler(run="run/", optimizer=optimizer)
            starts = torch.randint(len(tokens) - T, (B,))
            x = torch.stack([tokens[i : i + T] for i in starts])
            audited.record(starts, x)

        Args:
            ids: one integer or text per sample: rows, window starts, names; a tensor [B] on the
                CPU, an array or a list. ``locator`` is called with each.
            samples: the batch, if duplication is to be scored: tensor [B, ...], mapping of
                columns, or list of samples. Integer tensors are copied.
        """
        try:
            indices = list(ids.tolist() if hasattr(ids, "tolist") else ids)
            rows: Any = [None] * len(indices)
            if samples is not None:
                n_rows = other_rows(samples, len(indices))
                if n_rows is not None:
                    raise ValueError(f"{len(indices)} ids for a batch of {n_rows} samples")
                rows = self._describer.columns_of(samples, len(indices)) or Rows(samples)
            self._open()
            self._note_delivered(RawTag(rows, indices), "delivered")
        except Exception as error:
            self._open().failed("AuditedSampler.record", error)

    @property
    def last(self) -> Mapping[str, Any] | None:
        """Scores of the latest batch that was scored, a moment after it was delivered.

        ``batch``, its ordinal; arrays [n]: ``key``, ``dup_batch``, ``dup_window``, ``dup_run``,
        ``repetition`` (as in ``schema.EXPOSURES``; NaN where the content is unknown). None before
        the first.
        """
        return None if self._recorder is None else self._recorder.last_scores

    def close(self) -> None:
        """Write what is waiting and give the run directory back; also done when Python exits."""
        if self._recorder is not None:
            self._recorder.close()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all that was recorded so far is on disk.

        False when it took too long, when something could not be written since the last call, or
        when the run was deleted.
        """
        return True if self._recorder is None else self._recorder.drain(timeout_s)

    def _is_skipped(self, ordinal: int, tag: Tag | SentTag | RawTag) -> bool:
        if ordinal in self._skip:
            return True
        try:
            if not isinstance(tag, RawTag):
                return tag.tag().unwanted
            return self._describer.is_unwanted(self._describer.describe(tag))
        except Exception as error:
            self._open().failed("skip=", error)
            return False

    def _tag_of(self, batch: Any) -> Tag | RawTag:
        try:
            return RawTag(self._describer.columns_of(batch, None) or Rows(batch), None)
        except Exception as error:
            return Tag.of_failure(error)

    def _note_delivered(self, tag: Tag | SentTag | RawTag, state: str) -> int | None:
        """The batch's number in the attempt, None where that failed."""
        recorder = self._open()
        try:
            return recorder.delivered(tag, self._describer, state=state)
        except Exception as error:
            recorder.failed("recording a batch", error)
            return None


def _restored(kind: type[AuditedSampler], state: dict[str, Any]) -> AuditedSampler:
    sampler = kind.__new__(kind)
    sampler.__setstate__(state)
    return sampler


_LEFT_OUT = object()


def _is_wanted(batch: Any) -> bool:
    return batch is not _LEFT_OUT


def _is_audited(loader: Any) -> bool:
    return issubclass(type(loader), AuditedSampler)  # its __class__ may be that of its loader


def _check_not_recorded(loader: Any, run: str | PathLike[str]) -> None:
    """Raises ``ValueError`` where every batch would be recorded twice."""
    while _is_audited(loader):
        if Path(loader._run).absolute() == Path(run).absolute():
            raise ValueError(f"loader is recorded in {Path(run)} already: wrap it once")
        loader = loader._loader


def _wraps_loader(loader: Any) -> bool:
    """A framework's own loader around a ``DataLoader``."""
    of_fabric = getattr(loader, "__dict__", {}).get("_dataloader")
    return is_prepared(loader) or isinstance(of_fabric, DataLoader)


def _warn_of_undivided_data(loader: Any) -> None:
    """Several ranks, and a loader that gives all of them the same data, or too little of it."""
    _, world_size = rank_and_world()
    if is_prepared(loader) and divides_twice(loader):
        log.warning(
            "auditor: the loader's DistributedSampler divides the data among %d ranks, and "
            "Accelerate divides each part again: most samples are never trained on. Give prepare() "
            "a loader without DistributedSampler",
            world_size,
        )
    if type(loader).__name__ == "_FabricDataLoader":  # it divides the data only if asked to
        loader = loader._dataloader
    if world_size == 1 or not isinstance(loader, DataLoader) or _wraps_loader(loader):
        return
    samplers = [getattr(loader, "sampler", None), getattr(loader.batch_sampler, "sampler", None)]
    if isinstance(loader.dataset, IterableDataset) or any(
        isinstance(one, DistributedSampler) or hasattr(one, "num_replicas") for one in samplers
    ):
        return
    log.warning(
        "auditor: %d ranks, and a loader whose sampler does not divide the data among them: every "
        "rank may see the same samples. Use a DistributedSampler; with Accelerate or Fabric wrap "
        "the loader that prepare() or setup_dataloaders() returned",
        world_size,
    )
