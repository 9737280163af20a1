"""Which sample is which: id, source, shard, row and content of what a dataset returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from auditor.errors import IdentityError
from auditor.measure.sketch import exact_hash, exact_hash_tokens

ID_COLUMNS: Final = ("sample_id", "id", "__key__")
TEXT_COLUMNS: Final = ("text", "content")
TOKEN_COLUMNS: Final = ("input_ids", "tokens")
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


Locator = Callable[[int | None, Any], Located]
"""Called with a sample's dataset index (None for iterable datasets) and the raw sample."""


@dataclass(frozen=True)
class Described:
    """The samples of one batch: keys int64 [B], the rest lists of length B."""

    keys: np.ndarray
    located: list[Located]


def describe(
    samples: Sequence[Any], indices: Sequence[int] | None, locator: Locator | None
) -> Described:
    """Locate the samples of a batch by the locator where given, then by their columns.

    The key of a map-style sample is its index; else the hash of its id, else of its content.

    Raises:
        IdentityError: a sample has neither index, nor id, nor content.
    """
    located = []
    for position, sample in enumerate(samples):
        index = None if indices is None else int(indices[position])
        found = _from_columns(sample)
        if locator is not None:
            given = locator(index, sample)
            found = replace(found, **{k: v for k, v in vars(given).items() if v is not None})
        located.append(found)
    if indices is not None:
        keys = np.asarray([int(i) for i in indices], dtype=np.int64)
    else:
        keys = np.asarray([_hashed_key(one) for one in located], dtype=np.int64)
    named = [
        one if one.sample_id is not None else replace(one, sample_id=str(key))
        for one, key in zip(located, keys, strict=True)
    ]
    return Described(keys, named)


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

        identity = column(*ID_COLUMNS)
        shard = column("shard", "__url__")
        row = column("row")
        content = column(*TEXT_COLUMNS, *TOKEN_COLUMNS)
        mask = sample.get("attention_mask")
        return Located(
            sample_id=None if identity is None else str(identity),
            source=_text(column("source")),
            shard=_text(shard),
            row=None if row is None else int(row),
            content=_content(content),
            n_tokens=None if mask is None else int(np.asarray(mask).sum()),
        )
    if isinstance(sample, tuple | list) and sample:  # (input, target) pairs
        return Located(content=_content(sample[0]))
    return Located(content=_content(sample))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _content(value: Any) -> str | bytes | np.ndarray | None:
    if value is None or isinstance(value, str | bytes):
        return value
    if isinstance(value, torch.Tensor):
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
