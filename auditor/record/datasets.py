"""What datasets of other libraries know about a sample beyond what they return.

The libraries are told by the names of their types, and never imported here: a loop that does not
use one does not pay for it, and a process that has loaded polars must not fork loader workers.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import ConcatDataset, IterableDataset, Subset


def is_a(value: Any, module: str, name: str) -> bool:
    """Whether a class ``name`` from the package ``module`` is among the value's types."""
    return any(
        base.__name__ == name and base.__module__.split(".")[0] == module
        for base in type(value).__mro__
    )


class Origin(Protocol):
    """Where a sample was read from."""

    @property
    def number(self) -> int:
        """Its row in the shard, or in the table of a dataset that has no shards."""

    @property
    def shard(self) -> str | None: ...

    @property
    def is_mapped(self) -> bool:
        """Whether its index is a position only, and ``number`` is what tells it."""

    def get(self, name: str) -> Any:
        """The value of a column that the sample may not show, None where there is none."""


class Origins(Protocol):
    """Where the samples of a batch were read from, looked up when asked for."""

    @property
    def is_one_table(self) -> bool:
        """Whether shard and number of a row are enough to tell it."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> Origin | None:
        """Of the batch's sample at ``position``; None where it is not known."""


def origins_of(dataset: Any, indices: Sequence[Any] | None) -> Origins | None:
    """What a dataset knows about the samples at these indices, None where it knows no more."""
    if dataset is None or indices is None:
        return None
    if is_streaming(dataset):
        return ShardRows(dataset, indices)
    return TableRows(dataset, indices) if _has_table(dataset) else None


class TableRow:
    """One row of a table of Arrow columns; values are fetched by name, one at a time."""

    def __init__(self, table: Any, number: int, is_mapped: bool) -> None:
        self._table = table
        self.number = number
        self.shard: str | None = None
        self.is_mapped = is_mapped

    def get(self, name: str) -> Any:
        """The value of a column, None where there is no such column."""
        if name not in self._table.column_names:
            return None
        return self._table.column(name)[self.number].as_py()


class TableRows:
    """The table rows behind a batch of a Hugging Face ``Dataset``, looked up when asked for.

    An index into such a dataset is a position after ``shuffle``, ``filter`` or ``select``: the
    table's row is in its ``_indices``. And ``set_format`` or ``set_transform`` hide columns that
    the table has all the same. A contiguous ``select`` cuts the table itself, whose rows count from
    there. A dataset may lie in a ``Subset`` or a ``ConcatDataset``.
    """

    def __init__(self, dataset: Any, indices: Sequence[Any]) -> None:
        self._dataset = dataset
        self._indices = indices

    @property
    def is_one_table(self) -> bool:
        inner = self._dataset
        while type(inner) is Subset:
            inner = inner.dataset
        return type(inner) is not ConcatDataset

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> TableRow | None:
        dataset: Any = self._dataset
        index = int(self._indices[position])
        while not _is_table(dataset):
            if index < 0:
                index += len(dataset)
            if type(dataset) is Subset:
                index, dataset = int(dataset.indices[index]), dataset.dataset
            elif type(dataset) is ConcatDataset:
                place = bisect.bisect_right(dataset.cumulative_sizes, index)
                index -= dataset.cumulative_sizes[place - 1] if place else 0
                dataset = dataset.datasets[place]
            else:
                return None
        if index < 0:
            index += len(dataset)
        mapping = dataset._indices
        if mapping is None:
            return TableRow(dataset.data, index, is_mapped=False)
        return TableRow(dataset.data, mapping.column(0)[index].as_py(), is_mapped=True)


def _is_table(dataset: Any) -> bool:
    return is_a(dataset, "datasets", "Dataset") and hasattr(dataset, "_indices")


def _has_table(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _has_table(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return any(_has_table(one) for one in dataset.datasets)
    return _is_table(dataset)


def shards_of(dataset: Any) -> list[str]:
    """The data files that a dataset names as its ``shards``, or a ``StreamingDataset`` reads."""
    shards = getattr(dataset, "shards", None)
    if not isinstance(shards, list | tuple):
        return []
    if is_streaming(dataset):
        return [_file_of(shard) for shard in shards]
    return [os.fspath(one) for one in shards if isinstance(one, str | os.PathLike)]


def _file_of(shard: Any) -> str:
    file, _ = shard.file_pairs[0]
    return str(Path(shard.dirname, shard.split or "", file.basename))


def is_streaming(dataset: Any) -> bool:
    """Whether it is a ``StreamingDataset`` of MosaicML, or one of a class derived from it."""
    return is_a(dataset, "streaming", "StreamingDataset")


@dataclass(frozen=True)
class ShardRow:
    """A sample of a shard file; of several streams, each is a source."""

    number: int
    shard: str
    source: str | None
    is_mapped: bool = False

    def get(self, name: str) -> Any:
        return self.source if name == "source" else None


class ShardRows:
    """The shards that the samples of a MosaicML ``StreamingDataset`` lie in, by their index."""

    is_one_table = True

    def __init__(self, dataset: Any, indices: Sequence[Any]) -> None:
        self._dataset = dataset
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> ShardRow:
        dataset = self._dataset
        number, row = dataset.spanner[int(self._indices[position])]
        source = None
        if len(dataset.streams) > 1:
            stream = dataset.streams[dataset.stream_per_shard[number]]
            source = str(stream.remote or stream.local)
        return ShardRow(int(row), _file_of(dataset.shards[number]), source)


@dataclass(frozen=True)
class Numbered:
    """A sample of an iterable dataset, and the index it was read by; None where that is unclear."""

    sample: Any
    index: int | None


class NumberedStream(IterableDataset):
    """A MosaicML ``StreamingDataset`` whose samples bring their index; all else is the original.

    Its ``__iter__`` maps ``self.__getitem__`` over the indices of this worker. That method is
    looked up once, with the first sample, and what stands in for it then is gone at once: a loop
    that reads samples by index meets the original. A subclass that makes one sample of several
    says nothing about their indices, and none is claimed.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __iter__(self) -> Iterator[Numbered]:
        dataset = self._dataset
        read: list[int] = []
        original = dataset.__getitem__

        def reading(index: Any) -> Any:
            read.append(index)
            return original(index)

        vars(dataset)["__getitem__"] = reading
        try:
            samples = iter(dataset)
            sample = next(samples, _END)
        finally:
            vars(dataset).pop("__getitem__", None)
        while sample is not _END:
            yield Numbered(sample, int(read[0]) if len(read) == 1 else None)
            read.clear()
            sample = next(samples, _END)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The original's: loaders of the library ask for it before they keep its state."""
        return type(self.__dict__["_dataset"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> Any:
        return NumberedStream, (self._dataset,)


_END = object()
