"""The samples of a batch that is collated already: as columns, where it has them, or cut into rows.

Columns are the better way: a batch is then a few tensors and lists instead of objects per sample,
which the garbage collector would have to visit while they wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from auditor.schema import ID_COLUMNS, MASK_COLUMN, SHARD_COLUMNS, TEXT_COLUMNS, TOKEN_COLUMNS


class Columns:
    """Those columns of a collated batch that tell its samples, each [n] or [n, T].

    ``content``: texts, or token ids; ``mask``; ``sample_id``, ``source``, ``shard``, ``row``: lists
    or tensors; ``further``: columns kept on request. None where the batch has no such column.
    ``width``: T of token ids, also where they were not kept.
    """

    def __init__(
        self, n: int, width: int | None, found: Mapping[str, Any], further: Mapping[str, Any]
    ) -> None:
        self.n = n
        self.width = width
        self.content = found.get("content")
        self.mask = found.get("mask")
        self.sample_id = found.get("sample_id")
        self.source = found.get("source")
        self.shard = found.get("shard")
        self.row = found.get("row")
        self.further = further

    @classmethod
    def of(cls, batch: Any, n: int | None, further: Sequence[str], *, keep: bool) -> Columns | None:
        """The columns of a batch of ``n`` samples (None: as its content has), None if it has none.

        ``keep``: the content is wanted, not its lengths alone. Token ids are copied then, because a
        loop may go on to change them.
        """
        if isinstance(batch, Mapping):
            if "meta" in batch:  # its own columns tell samples too
                return None
            found = {
                "content": _first(batch, *TEXT_COLUMNS, *TOKEN_COLUMNS),
                "mask": batch.get(MASK_COLUMN),
                "sample_id": _first(batch, *ID_COLUMNS),
                "source": _first(batch, "source"),
                "shard": _first(batch, *SHARD_COLUMNS),
                "row": _first(batch, "row"),
            }
        else:
            first = batch[0] if isinstance(batch, tuple | list) and batch else batch
            if not isinstance(first, torch.Tensor):  # texts, or samples of their own
                return None
            found = {"content": first}
        content = found["content"]
        if isinstance(content, np.ndarray):
            if content.dtype.kind not in "iu":
                return None
            content = found["content"] = torch.from_numpy(content)
        if isinstance(content, torch.Tensor) and content.ndim != 2:
            return None
        if isinstance(content, list) and any(isinstance(one, torch.Tensor) for one in content):
            return None  # lists of token ids are collated the other way round: T tensors [n]
        if n is None:
            n = n_rows(content)
        kept = {name: value for name, value in found.items() if value is not None}
        more = {name: _first(batch, name) for name in further}
        if not n or not all(n_rows(v) == n for v in (*kept.values(), *more.values())):
            return None
        width = None
        if isinstance(content, torch.Tensor):
            del kept["content"]
            if not content.is_floating_point():
                width = content.shape[1]
                if keep:
                    kept["content"] = content.detach().clone()
        return cls(n, width, kept, more)

    def __len__(self) -> int:
        return self.n

    @property
    def n_bytes(self) -> int:
        """About how much memory they hold."""
        content = self.content
        if isinstance(content, torch.Tensor):
            return int(content.nbytes)
        return self.n * (256 + (len(content[0]) if isinstance(content, list) else 0))


def _first(batch: Mapping[Any, Any], *names: str) -> Any:
    """The first of the columns that the batch has, None where it has none."""
    return next((batch[name] for name in names if name in batch), None)


class Rows(Sequence[Any]):
    """The samples of a collated batch, cut when first asked for: rows of its tensors and lists.

    A mapping of columns gives one mapping per row; a tuple of equally long columns, or a list of
    them that has a tensor or an array, gives one tuple per row; anything else is cut along its
    first dimension. Integer tensors are copied at once, because a loop may go on to fill the same
    buffers.
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
        values = [_snapshot(value) for value in batch]
        return tuple(values) if isinstance(batch, tuple) else values
    return batch


def _cut(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        columns = {name: values for name, values in batch.items() if n_rows(values)}
        n = min((n_rows(values) for values in columns.values()), default=0)
        return [{name: values[row] for name, values in columns.items()} for row in range(n)]
    if isinstance(batch, tuple | list) and batch and _are_columns(batch):
        return list(zip(*batch, strict=True))
    return list(batch) if n_rows(batch) else [batch]


def _are_columns(values: Sequence[Any]) -> bool:
    """Whether these are columns of one batch, rather than its samples."""
    lengths = {n_rows(one) for one in values}
    if len(lengths) != 1 or 0 in lengths:
        return False
    return isinstance(values, tuple) or any(
        isinstance(one, torch.Tensor | np.ndarray) for one in values
    )


def n_rows(values: Any) -> int:
    """Rows of a column, 0 where it is not one."""
    if isinstance(values, torch.Tensor | np.ndarray):
        return len(values) if values.ndim else 0
    return len(values) if isinstance(values, list | tuple) else 0
