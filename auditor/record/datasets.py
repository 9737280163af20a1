"""What datasets of other libraries know about a sample beyond what they return.

The libraries are told by the names of their types, and never imported here: a loop that does not
use one does not pay for it, and a process that has loaded polars must not fork loader workers.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Subset


def is_a(value: Any, module: str, name: str) -> bool:
    """Whether a class ``name`` from the package ``module`` is among the value's types."""
    return any(
        base.__name__ == name and base.__module__.split(".")[0] == module
        for base in type(value).__mro__
    )


class TableRow:
    """One row of a table of Arrow columns; values are fetched by name, one at a time."""

    def __init__(self, table: Any, number: int, is_mapped: bool) -> None:
        self._table = table
        self.number = number
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

    @classmethod
    def of(cls, dataset: Any, indices: Sequence[Any] | None) -> TableRows | None:
        """The rows at these indices of a dataset, None where it has no table."""
        if dataset is None or indices is None or not _has_table(dataset):
            return None
        return cls(dataset, indices)

    @property
    def is_one_table(self) -> bool:
        """Whether the number of a row is enough to tell it."""
        inner = self._dataset
        while type(inner) is Subset:
            inner = inner.dataset
        return type(inner) is not ConcatDataset

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> TableRow | None:
        """The row of the batch's sample at ``position``; None where that one has no table."""
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
