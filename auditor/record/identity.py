"""Which sample is which: id, source, shard, row and content of what a dataset returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from auditor.errors import IdentityError
from auditor.measure.sketch import exact_hash, exact_hash_tokens
from auditor.schema import ID_COLUMNS, MASK_COLUMN, TEXT_COLUMNS, TOKEN_COLUMNS

PREVIEW_CHARS: Final = 160


@dataclass(frozen=True, kw_only=True)
class Located:
    """Where a sample comes from; what a ``locator`` returns. A field left None takes its default.

    ``content`` is what duplication is measured on: text, bytes, or token ids [T].
    """

    sample_id: str | None = None
    source: str | None = None
    shard: str | None = None
    row: int | None = None
    content: str | bytes | np.ndarray | torch.Tensor | None = None
    n_tokens: int | None = None

    def __post_init__(self) -> None:
        """Names become text and numbers integers, whatever scalars they came as."""
        for name in ("sample_id", "source", "shard"):
            object.__setattr__(self, name, _text(getattr(self, name)))
        for name in ("row", "n_tokens"):
            object.__setattr__(self, name, _integer(getattr(self, name)))
        object.__setattr__(self, "content", _content(self.content))


Locator = Callable[[Any, Any], Located]
"""Called with a sample's dataset index (None for iterable datasets) and the raw sample."""


@dataclass(frozen=True)
class Described:
    """The samples of one batch: keys int64 [B], the rest lists of length B.

    ``by_index``: the keys are indices of a dataset, else hashes. ``has_samples``: False where only
    the keys are known.
    """

    keys: np.ndarray
    located: list[Located]
    by_index: bool
    has_samples: bool = True


def describe(
    samples: Sequence[Any], indices: Sequence[Any] | None, locator: Locator | None
) -> Described:
    """Locate the samples of a batch by the locator where given, then by their columns.

    The key of a map-style sample is its index; else the hash of its id, else of its content.

    Raises:
        IdentityError: a sample has neither index, nor id, nor content.
    """
    located = []
    for position, sample in enumerate(samples):
        found = _from_columns(sample)
        if locator is not None:
            given = locator(None if indices is None else indices[position], sample)
            found = replace(found, **{k: v for k, v in vars(given).items() if v is not None})
        located.append(found)
    numbers = None if indices is None else [_integer(index) for index in indices]
    by_index = numbers is not None and None not in numbers
    if by_index:
        keys = np.asarray(numbers, dtype=np.int64)
    elif indices is not None:  # a mapping: its keys are ids
        located = [
            one if one.sample_id is not None else replace(one, sample_id=str(index))
            for one, index in zip(located, indices, strict=True)
        ]
        keys = np.asarray([_hashed_key(one) for one in located], dtype=np.int64)
    else:
        keys = np.asarray([_hashed_key(one) for one in located], dtype=np.int64)
    named = [
        one if one.sample_id is not None else replace(one, sample_id=str(key))
        for one, key in zip(located, keys, strict=True)
    ]
    has_samples = not all(sample is None for sample in samples)
    return Described(keys, named, by_index, has_samples)


def _from_columns(sample: Any) -> Located:
    if isinstance(sample, Mapping):
        meta = sample.get("meta")
        meta = meta if isinstance(meta, Mapping) else {}

        def column(*names: str) -> Any:
            for name in names:
                for holder in (sample, meta):
                    if holder.get(name) is not None:
                        return holder[name]
            return None

        content = _content(column(*TEXT_COLUMNS, *TOKEN_COLUMNS))
        mask = sample.get(MASK_COLUMN)
        if mask is not None and isinstance(content, np.ndarray):
            kept = np.asarray(mask).astype(bool)
            if kept.shape == content.shape:
                content = content[kept]  # padding is no content
        return Located(
            sample_id=column(*ID_COLUMNS),
            source=column("source"),
            shard=column("shard", "__url__"),
            row=column("row"),
            content=content,
        )
    if isinstance(sample, tuple | list) and sample:  # (input, target) pairs
        return Located(content=_content(sample[0]))
    return Located(content=_content(sample))


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _text(value: Any) -> str | None:
    return None if value is None else str(_scalar(value))


def _integer(value: Any) -> int | None:
    """The value as an integer, None where it is none: a column named ``row`` may hold anything."""
    value = _scalar(value)
    return int(value) if isinstance(value, int | np.integer) else None


def _content(value: Any) -> str | bytes | np.ndarray | None:
    if value is None or isinstance(value, str | bytes):
        return value
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            return None
        value = value.detach().cpu().numpy()
    if isinstance(value, list) and value and isinstance(value[0], int):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.ndim == 1:
        return value
    return None


def _hashed_key(one: Located) -> int:
    if one.sample_id is not None:
        return exact_hash(f"{one.shard or ''}\0{one.sample_id}".encode())
    if isinstance(one.content, str):
        return exact_hash(one.content.encode("utf-8", "surrogatepass"))
    if isinstance(one.content, bytes):
        return exact_hash(one.content)
    if isinstance(one.content, np.ndarray):
        return exact_hash_tokens(one.content)
    raise IdentityError(
        "a sample has no dataset index, no id column and no content to tell it by",
        remedy=f"Give the samples one of the columns {', '.join(ID_COLUMNS)}, "
        "or pass locator= to AuditedSampler",
    )


def n_tokens_of(one: Located) -> int | None:
    """Length of a sample: as located, else token ids, bytes or characters of its content."""
    if one.n_tokens is not None:
        return one.n_tokens
    return None if one.content is None else len(one.content)


def preview_of(one: Located) -> str | None:
    """The first characters of a sample's content; of token ids their numbers."""
    content = one.content
    if content is None:
        return None
    if isinstance(content, str):
        return content[:PREVIEW_CHARS]
    if isinstance(content, bytes):
        return content[:PREVIEW_CHARS].decode("utf-8", "replace")
    return " ".join(str(int(token)) for token in content[: PREVIEW_CHARS // 4])
