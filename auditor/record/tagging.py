"""Identity travels beside the batch: from the dataset, through workers, to the training loop.

A sampler knows what was drawn, not what arrived: workers prefetch, drop, reorder. So a copy of the
loader is given a dataset that remembers the indices of each fetch and a collate function that
returns the batch together with them; the loop is handed the batch it would have had.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from auditor.record.identity import Described, Locator, describe


class Tag:
    """The samples of one batch, described when first asked, or when leaving a loader worker.

    In the training process describing is thus left to the recorder's thread; from a worker only
    the description travels, not the raw samples.
    """

    def __init__(
        self, samples: Sequence[Any], indices: Sequence[int] | None, locator: Locator | None
    ) -> None:
        self._raw: tuple[Any, ...] | None = (samples, indices, locator)
        self._described: Described | None = None

    def describe(self) -> Described:
        if self._described is None:
            assert self._raw is not None
            self._described = describe(*self._raw)
            self._raw = None
        return self._described

    def __getstate__(self) -> dict[str, Any]:
        return {"_raw": None, "_described": self.describe()}


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
    indices: list[int]


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
        indices = list(index) if isinstance(index, list | tuple | torch.Tensor) else [index]
        return _Fetched(sample, [int(one) for one in indices])

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
        if self._batched:
            tagged: Sequence[Any] = samples
        else:  # no automatic batching: the dataset's item is the batch
            n_samples = 1 if indices is None else len(indices)
            tagged = [samples] if n_samples == 1 else rows_of(samples, n_samples)
        # Copied, because a collate function may change the list it is given.
        tag = Tag(list(tagged), indices, self._locator)
        return TaggedBatch(self._collate(samples), tag)


def tagging_copy(loader: DataLoader, locator: Locator | None) -> DataLoader:
    """A copy of the loader that yields :class:`TaggedBatch`; samplers and generators are shared.

    The original is untouched, and draws from shared generators exactly as it would have.
    """
    tagged = copy.copy(loader)
    batched = loader.batch_sampler is not None
    if not isinstance(loader.dataset, IterableDataset):
        # A DataLoader refuses to have its dataset set; a copy that has not been iterated may.
        tagged.__dict__["dataset"] = _IndexedDataset(loader.dataset, batched)
    else:
        batched = batched or loader.batch_size is not None
    tagged.collate_fn = _TaggingCollate(loader.collate_fn, locator, batched)
    return tagged


def rows_of(batch: Any, n_rows: int | None = None) -> list[Any]:
    """The samples of a collated batch: rows of its tensors, entries of its lists.

    A mapping of columns gives one mapping per row; a tuple or list of equally long tensors gives
    one tuple per row; anything else is cut along its first dimension.
    """
    if isinstance(batch, dict):
        columns = {
            name: values
            for name, values in batch.items()
            if hasattr(values, "__len__") and not isinstance(values, str | bytes | dict)
        }
        n = n_rows or min((len(values) for values in columns.values()), default=0)
        return [
            {name: values[row] for name, values in columns.items() if len(values) >= n}
            for row in range(n)
        ]
    if (
        isinstance(batch, tuple | list)
        and batch
        and all(isinstance(one, torch.Tensor) and one.ndim > 0 for one in batch)
        and len({len(one) for one in batch}) == 1
    ):
        return [tuple(one[row] for one in batch) for row in range(len(batch[0]))]
    return list(_iterate(batch))


def _iterate(batch: Any) -> Iterator[Any]:
    return iter(batch) if hasattr(batch, "__iter__") else iter([batch])
