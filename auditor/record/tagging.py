"""Identity travels with the batch: from the dataset, through workers, to the training loop.

A sampler knows what was drawn, not what arrived: workers prefetch, drop, reorder. So a copy of the
loader is given a dataset that remembers the indices of each fetch, and a collate function that
puts a :class:`Tag` beside the batch it returns. The tag is taken off where the batch is consumed,
and the loop is handed the batch it would have had.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from auditor.errors import IdentityError
from auditor.measure.compact import WORDS, compact
from auditor.record.identity import Described, Locator, describe, keys_alone
from auditor.record.samples import SampleLedger
from auditor.record.transfer import to_host


@dataclass
class Tag:
    """The samples of one batch: keys i64 [n], and what is needed to score their duplication.

    ``sketches``: i64 [n, WORDS] made in a loader worker, or None. ``positions``: as in
    :class:`Described`. ``unwanted``: a sample of the batch was to be left out. ``failure``: why the
    samples cannot be told; an exception in a worker would cost the loop its batch.
    """

    keys: np.ndarray
    sketches: np.ndarray | None = None
    positions: np.ndarray | None = None
    unwanted: bool = False
    failure: str | None = None

    def tag(self) -> Tag:
        return self

    @classmethod
    def of_failure(cls, error: Exception) -> Tag:
        """A tag whose samples cannot be told."""
        return cls(np.zeros(0, np.int64), failure=f"{type(error).__name__}: {error}")


class RawTag:
    """The samples of one batch as the dataset returned them, to be described on another thread."""

    def __init__(self, samples: Sequence[Any], indices: Sequence[Any] | None) -> None:
        self.samples = samples
        self.indices = indices

    @property
    def n_bytes(self) -> int:
        """About how much memory the samples hold, from the first of them."""
        return len(self.samples) * _size_of(self.samples[0]) if len(self.samples) else 0


class SentTag:
    """A tag on its way from the device, where a framework moved it with the batch."""

    def __init__(self, rows: Tensor) -> None:
        self._fetch = to_host(rows)

    def tag(self) -> Tag:
        """The tag, on the recorder's thread."""
        rows = self._fetch()
        if (rows[:, 0] == _UNTOLD).any():
            return Tag.of_failure(IdentityError("samples could not be told where they are read"))
        return Tag(rows[:, 0].copy(), rows[:, 1:] if rows.shape[1] > 1 else None)


_UNTOLD = -1
"""In place of a key."""


class Describer:
    """Describes batches, in whichever process the dataset is read; picklable.

    Args:
        locator, columns: of the sampler.
        sketching: whether duplication is scored.
        unwanted: sample ids whose batches are left out.
    """

    def __init__(
        self,
        *,
        locator: Locator | None,
        columns: Sequence[str] = (),
        sketching: bool = True,
        unwanted: frozenset[str] = frozenset(),
    ) -> None:
        self._locator = locator
        self._columns = tuple(columns)
        self._unwanted = unwanted
        self.sketching = sketching
        self._ledger = Path()
        self._dataset = 0
        self._worker: tuple[int, SampleLedger] | None = None

    def of_attempt(self, ledger: Path, dataset: int) -> None:
        """Describe for this attempt from now on.

        ``ledger``: where its recorder writes descriptions; workers write beside it. ``dataset``:
        number of the dataset in the attempt, part of its samples' keys.
        """
        self._ledger, self._dataset = ledger, dataset

    def describe(self, raw: RawTag) -> Described:
        return describe(
            raw.samples, raw.indices, self._locator, dataset=self._dataset, columns=self._columns
        )

    def keys_alone(self, raw: RawTag) -> Described:
        """Raises ``IdentityError`` where samples have no index to tell them by."""
        if raw.indices is None:
            raise IdentityError(
                "samples without dataset index cannot be told without their content"
            )
        return keys_alone(raw.indices, self._dataset)

    def is_unwanted(self, described: Described) -> bool:
        if not self._unwanted:
            return False
        ids = described.sample_id or [None] * len(described.keys)
        return any(
            (str(key) if one is None else one) in self._unwanted
            for key, one in zip(described.keys, ids, strict=True)
        )

    def tag(self, raw: RawTag, *, sketching: bool | None = None) -> Tag:
        """Everything at once, where that does not cost the training thread: in a worker."""
        sketching = self.sketching if sketching is None else sketching
        try:
            described = self.describe(raw)
            ledger = self._worker_ledger()
            ledger.note(described)
            ledger.flush()
            return Tag(
                described.keys,
                compact(described.contents) if sketching else None,
                described.positions,
                self.is_unwanted(described),
            )
        except Exception as error:
            return Tag.of_failure(error)

    def _worker_ledger(self) -> SampleLedger:
        process = os.getpid()
        if self._worker is None or self._worker[0] != process:
            path = self._ledger.with_name(f"{self._ledger.stem}.worker-{process}.ledger")
            self._worker = (process, SampleLedger(path))
        return self._worker[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_worker": None}


def _size_of(value: Any) -> int:
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_size_of(one) for one in value.values())
    if isinstance(value, tuple | list):
        return 64 + 8 * len(value) + (len(value) * _size_of(value[0]) if value else 0)
    return 64


@dataclass
class _Fetched:
    samples: Any
    indices: list[Any]


class _IndexedDataset(Dataset):
    """A map-style dataset whose fetches remember their indices; everything else is the original."""

    def __init__(self, dataset: Any, batched: bool) -> None:
        self.__dict__.update(_dataset=dataset, _batched=batched)

    def __getitems__(self, indices: list[Any]) -> _Fetched:
        fetch = getattr(self._dataset, "__getitems__", None)
        samples = fetch(indices) if fetch else [self._dataset[index] for index in indices]
        return _Fetched(samples, list(indices))

    def __getitem__(self, index: Any) -> Any:
        sample = self._dataset[index]
        if self._batched:  # the loader collates: only __getitems__ is a fetch
            return sample
        many = isinstance(index, list | tuple) or (isinstance(index, torch.Tensor) and index.ndim)
        return _Fetched(sample, list(index) if many else [index])

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class TaggingCollate:
    """The loader's collate function, returning what it returned, and the tag by ``attach``."""

    def __init__(
        self,
        collate: Callable[[Any], Any],
        describer: Describer,
        batched: bool,
        attach: Callable[[Any, Tag | RawTag], Any],
    ) -> None:
        self._collate = collate
        self.describer = describer
        self._batched = batched
        self._attach = attach

    def __call__(self, data: Any) -> Any:
        samples, indices = data, None
        if isinstance(data, _Fetched):
            samples, indices = data.samples, data.indices
        # The tag first: a collate function may change what it is given.
        raw = self._raw(samples, indices)
        tag = raw if get_worker_info() is None else self.describer.tag(raw)
        return self._attach(self._collate(samples), tag)

    def _raw(self, samples: Any, indices: list[Any] | None) -> RawTag:
        if self._batched:
            return RawTag(list(samples), indices)
        # No automatic batching: the dataset's item is one sample, or a batch by itself.
        if indices is not None and len(indices) == 1:
            return RawTag([samples], indices)
        return RawTag(Rows(samples), indices)


def beside(batch: Any, tag: Tag | RawTag) -> tuple[Any, Tag | RawTag]:
    """The batch and its tag as a pair, through which pinning and device moves go as ever."""
    return batch, tag


class SendingRows:
    """Puts the tag beside the batch as one tensor, where nothing else gets through.

    A dispatching loader slices, joins and sends the tensors of its batches: int64 [B, 1] of keys,
    or [B, 1 + WORDS] with the sketches made by loader workers. Samples are described by the rank
    that reads; without workers it leaves them unscored, for that would be on its training thread.
    """

    def __init__(self, describer: Describer) -> None:
        self._describer = describer

    def __call__(self, batch: Any, tag: Tag | RawTag) -> tuple[Any, Tensor]:
        if isinstance(tag, RawTag):
            n = len(tag.samples)
            tag = self._describer.tag(tag, sketching=False)
            n_words = 0
        else:
            n = _n_samples(batch) if tag.failure is not None else len(tag.keys)
            n_words = WORDS if self._describer.sketching else 0
        rows = np.full((n, 1 + n_words), _UNTOLD, np.int64)
        if tag.failure is None and tag.positions is None:
            rows[:, 0] = tag.keys
            if n_words and tag.sketches is not None:
                rows[:, 1:] = tag.sketches
        return batch, torch.from_numpy(rows)


def _n_samples(batch: Any) -> int:
    """Rows of a collated batch, by its first column."""
    if isinstance(batch, Mapping):
        return max((_n_rows(values) for values in batch.values()), default=0)
    return _n_rows(batch[0]) if isinstance(batch, tuple | list) and batch else _n_rows(batch)


def tagging_copy(
    loader: Any,
    describer: Describer,
    attach: Callable[[Any, Tag | RawTag], Any] = beside,
) -> Any:
    """A copy of the loader whose batches carry their tag; samplers and generators are shared.

    A framework's loader that wraps another is copied with a tagging copy of that one inside. The
    original is untouched, and draws from shared generators exactly as it would have.
    """
    tagged = copy.copy(loader)
    if type(loader).__name__ == "DataLoaderDispatcher":  # of Accelerate
        attach = SendingRows(describer)
    for name in ("base_dataloader", "_dataloader"):  # Accelerate, Fabric
        inner = vars(loader).get(name)
        if isinstance(inner, DataLoader):
            tagged.__dict__[name] = tagging_copy(inner, describer, attach)
            return tagged
    tagged._iterator = None  # of persistent workers that were started without tags
    batched = loader.batch_sampler is not None
    if not isinstance(loader.dataset, IterableDataset):
        # A DataLoader refuses to have its dataset set; a copy that has not been iterated may.
        tagged.__dict__["dataset"] = _IndexedDataset(loader.dataset, batched)
    else:
        batched = batched or loader.batch_size is not None
    tagged.collate_fn = TaggingCollate(loader.collate_fn, describer, batched, attach)
    return tagged


class Rows(Sequence[Any]):
    """The samples of a collated batch, cut when first asked for: rows of its tensors and lists.

    A mapping of columns gives one mapping per row; a tuple or list of equally long tensors gives
    one tuple per row; anything else is cut along its first dimension. Integer tensors are copied at
    once, because a loop may go on to fill the same buffers.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = _snapshot(batch)
        self._rows: list[Any] | None = None

    def _cut(self) -> list[Any]:
        if self._rows is None:
            self._rows, self._batch = _cut(self._batch), None
        return self._rows

    def __len__(self) -> int:
        return len(self._cut())

    def __getitem__(self, position: Any) -> Any:
        return self._cut()[position]


def _snapshot(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.detach() if batch.is_floating_point() else batch.detach().clone()
    if isinstance(batch, np.ndarray):
        return batch.copy() if batch.dtype.kind in "iu" else batch
    if isinstance(batch, Mapping):
        return {name: _snapshot(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [_snapshot(value) for value in batch]
    return batch


def _cut(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        columns = {name: values for name, values in batch.items() if _n_rows(values)}
        n = min((_n_rows(values) for values in columns.values()), default=0)
        return [{name: values[row] for name, values in columns.items()} for row in range(n)]
    if (
        isinstance(batch, list)
        and batch
        and all(isinstance(one, torch.Tensor) and one.ndim > 0 for one in batch)
        and len({len(one) for one in batch}) == 1
    ):
        return [tuple(one[row] for one in batch) for row in range(len(batch[0]))]
    return list(batch) if _n_rows(batch) else [batch]


def _n_rows(values: Any) -> int:
    """Rows of a column, 0 where it is not one."""
    if isinstance(values, torch.Tensor | np.ndarray):
        return len(values) if values.ndim else 0
    return len(values) if isinstance(values, list | tuple) else 0
