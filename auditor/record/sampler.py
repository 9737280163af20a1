"""``AuditedSampler``: the same batches in the same order, and a record of what was consumed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from os import PathLike
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from auditor.record.identity import Locator
from auditor.record.recorder import Recorder, recorder_for
from auditor.record.tagging import Rows, Tag, TaggedBatch, tagging_copy


class AuditedSampler:
    """Wrap a loader; record each batch at the moment the loop takes it.

    Example:
        loader = AuditedSampler(DataLoader(dataset, batch_size=32), run="run/")
        for batch in loader:
            ...

    Args:
        loader: a ``DataLoader`` (it is copied, not changed; samplers and generators are shared);
            or any iterable of batches, whose samples are then told by their id columns or content;
            or a ``Sampler`` or batch sampler to hand to a loader, which records what was *drawn*
            only, since a sampler cannot know what arrives.
        run: the run directory, made when it is not there. A ``GradeMonitor`` on the same path
            shares its steps.
        optimizer: when given, its own ``step()`` closes each training step. Without it, and
            without a ``GradeMonitor``, batches are recorded as delivered and belong to no step.
        start_step: number of the first step; by default one past the last recorded step, 0 at
            first. Give it when a run is resumed from a checkpoint.
        locator: ``locator(index, sample) -> Located`` names id, source, shard, row or content of
            a raw sample where its columns do not. ``index`` is None for iterable datasets.
        skip: batches not to train on, by ordinal (int), or samples by id (str), whose batches are
            left out. They are drawn, recorded as ``skipped`` and not yielded.

    Attributes of the loader (``dataset``, ``state_dict``, ``sampler.set_epoch``, ...) are reached
    through the wrapper.

    Raises:
        RunClaimedError: another live process records this run and rank.
        ValueError: ``loader`` is not iterable.
    """

    def __init__(
        self,
        loader: Any,
        *,
        run: str | PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        start_step: int | None = None,
        locator: Locator | None = None,
        skip: Collection[int | str] | None = None,
    ) -> None:
        if not isinstance(loader, Iterable):
            raise ValueError(f"loader must be iterable, got {type(loader).__name__}")
        self._loader: Any = loader
        self._run = run
        self._locator = locator
        self._skip = frozenset(skip or ())
        self._n_batches = 0
        self._inner = tagging_copy(loader, locator) if isinstance(loader, DataLoader) else loader
        self._recorder: Recorder | None = None
        recorder = self._open()
        if start_step is not None:
            recorder.next_step = start_step
        if optimizer is not None:
            recorder.watch(optimizer)
        dataset = getattr(loader, "dataset", None)
        if dataset is not None:
            recorder.describe_dataset(dataset)

    def _open(self) -> Recorder:
        if self._recorder is None or self._recorder.closed:
            self._recorder = recorder_for(self._run)
        return self._recorder

    def __iter__(self) -> Iterator[Any]:
        recorder = self._open()
        if isinstance(self._loader, Sampler):
            for drawn in self._inner:
                self._note_drawn(recorder, drawn)
                yield drawn
            return
        for item in self._inner:
            if isinstance(item, TaggedBatch):
                batch, tag = item.batch, item.tag
            else:
                batch, tag = item, self._tag(item)
            ordinal = self._n_batches
            self._n_batches += 1
            if self._skip and self._is_skipped(recorder, ordinal, tag):
                continue
            self._note_delivered(recorder, tag, "delivered")
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in {"_inner", "_loader"}:  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recorder": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def close(self) -> None:
        """Write what is waiting and give the run directory back; also done when Python exits."""
        if self._recorder is not None:
            self._recorder.close()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all that was recorded so far is on disk; False when it took too long."""
        return self._open().drain(timeout_s)

    def _is_skipped(self, recorder: Recorder, ordinal: int, tag: Tag) -> bool:
        try:
            skipped = ordinal in self._skip or any(
                one.sample_id in self._skip for one in tag.describe().located
            )
        except Exception as error:
            recorder.failed("skip=", error)
            return False
        if skipped:
            self._note_delivered(recorder, tag, "skipped")
        return skipped

    def _tag(self, batch: Any) -> Tag:
        try:
            return Tag(Rows(batch), None, self._locator)
        except Exception as error:
            return Tag.of_failure(error)

    def _note_delivered(self, recorder: Recorder, tag: Tag, state: str) -> None:
        try:
            recorder.delivered(tag, state=state, dataset=getattr(self._loader, "dataset", None))
        except Exception as error:
            recorder.failed("recording a batch", error)

    @staticmethod
    def _note_drawn(recorder: Recorder, drawn: Any) -> None:
        try:
            recorder.drawn(drawn if isinstance(drawn, list | tuple) else [drawn])
        except Exception as error:
            recorder.failed("recording a draw", error)
