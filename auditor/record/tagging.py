"""Identity travels beside the batch: from the dataset, through workers, to the training loop.

A sampler knows what was drawn, not what arrived: workers prefetch, drop, reorder. So a copy of the
loader is given a dataset that remembers the indices of each fetch and a collate function that
returns the batch together with them; the loop is handed the batch it would have had.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from auditor.errors import IdentityError
from auditor.record.identity import Described, Located, Locator, describe


class Tag:
    """The samples of one batch, described when first asked, or when leaving a loader worker.

    In the training process describing is thus left to the recorder's thread; from a worker only
    the description travels, not the raw samples. Where describing fails in a worker, the failure
    travels instead and is raised by :meth:`describe`: an exception while a worker pickles its batch
    would hang the loader.
    """

    def __init__(
        self, samples: Sequence[Any], indices: Sequence[Any] | None, locator: Locator | None
    ) -> None:
        self._raw: tuple[Any, ...] | None = (samples, indices, locator)
        self._described: Described | None = None
        self._failure: str | None = None

    @classmethod
    def of_failure(cls, error: Exception) -> Tag:
        """A tag whose samples cannot be told; :meth:`describe` says why."""
        tag = cls([], None, None)
        tag._failure = f"{type(error).__name__}: {error}"
        return tag

    def describe(self) -> Described:
        """Locate the samples; raises ``IdentityError`` where that failed in a worker."""
        if self._failure is not None:
            raise IdentityError(self._failure)
        if self._described is None:
            assert self._raw is not None
            self._described = describe(*self._raw)
            self._raw = None
        return self._described

    @property
    def n_bytes(self) -> int:
        """About how much memory the samples hold, from the first of them."""
        samples = (
            self._described.located if self._described is not None else (self._raw or ((),))[0]
        )
        return len(samples) * _size_of(samples[0]) if len(samples) else 0

    def without_samples(self) -> Tag:
        """The keys alone, where the samples have dataset indices."""
        indices = None if self._raw is None else self._raw[1]
        if indices is None:
            raise IdentityError(
                "samples without dataset index cannot be told without their content"
            )
        return Tag([None] * len(indices), indices, None)

    def __getstate__(self) -> dict[str, Any]:
        try:
            self.describe()
        except Exception as error:
            return self.__dict__ | Tag.of_failure(error).__dict__ | {"_raw": None}
        return self.__dict__


def _size_of(value: Any) -> int:
    if isinstance(value, Located):
        return 256 + _size_of(value.content)
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
class TaggedBatch:
    """A batch and its tag on the way to the loop."""

    batch: Any
    tag: Tag

    def pin_memory(self) -> TaggedBatch:
        return TaggedBatch(pin_memory(self.batch), self.tag)


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


class _TaggingCollate:
    """The loader's collate function, returning what it returned and the tag."""

    def __init__(
        self, collate: Callable[[Any], Any], locator: Locator | None, batched: bool
    ) -> None:
        self._collate = collate
        self._locator = locator
        self._batched = batched

    def __call__(self, data: Any) -> TaggedBatch:
        samples, indices = data, None
        if isinstance(data, _Fetched):
            samples, indices = data.samples, data.indices
        tag = self._tag(samples, indices)  # first: a collate function may change what it is given
        return TaggedBatch(self._collate(samples), tag)

    def _tag(self, samples: Any, indices: list[Any] | None) -> Tag:
        try:
            if self._batched:
                return Tag(list(samples), indices, self._locator)
            # No automatic batching: the dataset's item is one sample, or a batch by itself.
            if indices is not None and len(indices) == 1:
                return Tag([samples], indices, self._locator)
            return Tag(Rows(samples), indices, self._locator)
        except Exception as error:
            return Tag.of_failure(error)


def tagging_copy(loader: DataLoader, locator: Locator | None) -> DataLoader:
    """A copy of the loader that yields :class:`TaggedBatch`; samplers and generators are shared.

    The original is untouched, and draws from shared generators exactly as it would have.
    """
    tagged = copy.copy(loader)
    tagged._iterator = None  # of persistent workers that were started without tags
    batched = loader.batch_sampler is not None
    if not isinstance(loader.dataset, IterableDataset):
        # A DataLoader refuses to have its dataset set; a copy that has not been iterated may.
        tagged.__dict__["dataset"] = _IndexedDataset(loader.dataset, batched)
    else:
        batched = batched or loader.batch_size is not None
    tagged.collate_fn = _TaggingCollate(loader.collate_fn, locator, batched)
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
