"""Which sample is which: id, source, shard, row and content of what a dataset returned."""

from __future__ import annotations

import array
import contextlib
import functools
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from auditor.errors import IdentityError
from auditor.ledger import NULL
from auditor.measure.sketch import exact_hash, exact_hash_tokens
from auditor.record.batches import Columns
from auditor.record.datasets import Origin, Origins
from auditor.schema import (
    ID_COLUMNS,
    KEY_SHIFT,
    MASK_COLUMN,
    SHARD_COLUMNS,
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
)

PREVIEW_CHARS: Final = 160
PREVIEW_TOKENS: Final = 24
_ERROR_CHARS: Final = 500


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


Locator = Callable[[Any, Any], Located | Sequence[Located]]
"""Called with a sample's dataset index (None for iterable datasets) and the raw sample.

Returns where it comes from; for a row that packs several documents, a list, one for each. Where it
raises, or returns something else, the sample is told by its index and its columns.
"""


@dataclass(frozen=True)
class Parts:
    """Where the samples of a batch lie whose rows pack several of them.

    ``positions`` i32 [n]: the row of the batch; ``n_tokens`` i64 [n]: tokens of the sample in that
    row, ``ledger.NULL`` where unknown, which are not always all it has.
    """

    positions: np.ndarray
    n_tokens: np.ndarray


@dataclass(frozen=True)
class Unlocated:
    """Samples that the locator did not locate: how many, and what happened at the first."""

    n: int
    first: str


@dataclass(frozen=True)
class Described:
    """The samples of one batch, column by column, each of length n.

    ``keys`` i64: a dataset index with the dataset's number, else a hash. ``contents``: texts,
    bytes, arrays of token ids, None; or one i64 array [n, T]. ``parts``: where rows pack several
    samples; None: one sample a row, in order. ``unlocated``: samples that the locator failed on. A
    column that no sample has is None.
    """

    keys: np.ndarray
    contents: Sequence[Any] | np.ndarray
    sample_id: Sequence[str | None] | None = None
    source: Sequence[str | None] | None = None
    shard: Sequence[str | None] | None = None
    row: Sequence[int | None] | None = None
    n_tokens: Sequence[int | None] | np.ndarray | None = None
    columns: Sequence[str | None] | None = None
    parts: Parts | None = None
    unlocated: Unlocated | None = None


def describe(
    samples: Sequence[Any] | Columns,
    indices: Sequence[Any] | None,
    locator: Locator | None,
    *,
    dataset: int = 0,
    columns: Sequence[str] = (),
    table: Origins | None = None,
) -> Described:
    """Locate the samples of a batch by the locator where given, then by their columns.

    A sample that the locator fails on is told by its columns. The key of a map-style sample is its
    index; else the hash of its id, else of its content. ``columns`` names further columns to
    keep, as JSON. ``table`` knows the columns that the samples do not show; it is asked for samples
    as they are written, once each.

    Raises:
        IdentityError: a sample has neither index, nor id, nor content.
    """
    further: list[str | None] | None = None
    if isinstance(samples, Columns):
        found = _of_columns(samples)
        if columns:
            values = [_listed(samples.further[name]) for name in columns]
            further = [
                _json(dict(zip(columns, row, strict=True))) for row in zip(*values, strict=True)
            ]
        return _with_keys(_from_table(found, table), indices, dataset, further)
    if columns:
        further = [
            _further(sample, columns, None if table is None else table[position])
            for position, sample in enumerate(samples)
        ]
    if locator is not None or not _is_uniform(samples):
        return _one_by_one(samples, indices, locator, dataset, further, table)
    return _with_keys(_from_table(_by_column(samples), table), indices, dataset, further)


class _Lazy(Sequence[Any]):
    """A column whose values are looked up when they are asked for."""

    def __init__(self, n: int, value: Callable[[int], Any]) -> None:
        self._n, self._value = n, value

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, position: Any) -> Any:
        if not 0 <= position < self._n:
            raise IndexError(position)
        return self._value(position)


def _from_table(found: Described, table: Origins | None) -> Described:
    """The columns that the samples do not show, from the table that they were read from."""
    if table is None:
        return found
    n = len(table)
    names = [
        name for name in ("sample_id", "source", "shard", "row") if getattr(found, name) is None
    ]
    # A shard's rows are not the table's.
    own_rows = found.shard is None

    located = functools.cache(lambda position: _of_row(table, position, own_rows))

    def lookup(name: str) -> Callable[[int], Any]:
        return lambda position: getattr(located(int(position)), name)

    hidden: dict[str, Any] = {name: _Lazy(n, lookup(name)) for name in names}
    return replace(found, **hidden)


def _of_row(table: Origins, position: int, own_rows: bool) -> Located:
    """What the table says about a sample; where it names neither id nor shard, its row does."""
    row = table[position]
    if row is None:
        return Located()
    sample_id, number = _first_of(row, ID_COLUMNS), _first_of(row, ("row",))
    shard = _first_of(row, SHARD_COLUMNS)
    if table.is_one_table:
        if number is None and shard is None and own_rows:
            number, shard = row.number, row.shard
        if sample_id is None and row.is_mapped:
            sample_id = row.number
    return Located(sample_id=sample_id, source=_first_of(row, ("source",)), shard=shard, row=number)


def _with_keys(
    found: Described,
    indices: Sequence[Any] | None,
    dataset: int,
    further: Sequence[str | None] | None,
) -> Described:
    keys = _index_keys(indices, dataset)
    sample_id = found.sample_id
    if keys is None:
        if sample_id is None and indices is not None:  # a mapping: its keys are ids
            sample_id = [str(index) for index in indices]
        keys = _hashed_keys(len(found.contents), sample_id, found.shard, found.contents)
    return replace(found, keys=keys, sample_id=sample_id, columns=further)


def _of_columns(batch: Columns) -> Described:
    """A collated batch; keys are left to the caller."""
    contents: Any = [None] * batch.n
    n_tokens: Any = None if batch.width is None else np.full(batch.n, batch.width, np.int64)
    if batch.content is not None:
        contents = batch.content
        if isinstance(contents, torch.Tensor):
            contents = contents.cpu().numpy()
        if batch.mask is not None:
            contents = _without_padding(contents, list(np.asarray(batch.mask)))
        n_tokens = _lengths(contents)
    elif batch.mask is not None and batch.width is not None:
        n_tokens = np.asarray(batch.mask).astype(bool).sum(axis=-1)
    rows = _listed(batch.row)
    return Described(
        np.zeros(0, np.int64),
        contents,
        sample_id=_texts(_listed(batch.sample_id)),
        source=_texts(_listed(batch.source)),
        shard=_texts(_listed(batch.shard)),
        row=None if rows is None else [_integer(row) for row in rows],
        n_tokens=n_tokens,
    )


def _listed(column: Any) -> list[Any] | None:
    if column is None:
        return None
    return column.tolist() if isinstance(column, torch.Tensor | np.ndarray) else list(column)


def keys_alone(indices: Sequence[Any] | None, dataset: int) -> Described:
    """What is known of samples without their content: raises ``IdentityError`` without indices."""
    keys = _index_keys(indices, dataset)
    if keys is None:
        raise IdentityError("samples without dataset index cannot be told without their content")
    return Described(keys, [None] * len(keys))


def _index_keys(indices: Sequence[Any] | None, dataset: int) -> np.ndarray | None:
    if indices is None:
        return None
    try:
        numbers = array.array("q", indices)
    except TypeError:
        integers = [_integer(index) for index in indices]
        if None in integers:
            return None
        numbers = array.array("q", integers)
    return np.frombuffer(numbers, np.int64) + (np.int64(dataset) << KEY_SHIFT)


def _is_uniform(samples: Sequence[Any]) -> bool:
    return len(set(map(type, samples))) == 1


def _by_column(samples: Sequence[Any]) -> Described:
    """Samples of one type; keys are left to the caller."""
    nothing = np.zeros(0, np.int64)
    first = samples[0]
    if isinstance(first, Mapping):
        names = set().union(*samples)
        content = _column(samples, names, *TEXT_COLUMNS, *TOKEN_COLUMNS)
        contents = _contents(content or [None] * len(samples))
        if MASK_COLUMN in names:
            masks = [sample.get(MASK_COLUMN) for sample in samples]
            contents = _without_padding(contents, masks)
        shard = _column(samples, names, *SHARD_COLUMNS)
        rows = _column(samples, names, "row")
        return Described(
            nothing,
            contents,
            sample_id=_texts(_column(samples, names, *ID_COLUMNS)),
            source=_texts(_column(samples, names, "source")),
            shard=_texts(shard),
            row=None if rows is None else [_integer(row) for row in rows],
            n_tokens=_lengths(contents),
        )
    if isinstance(first, tuple | list):  # (input, target) pairs
        contents = _contents([sample[0] if len(sample) else None for sample in samples])
    else:
        contents = _contents(samples)
    return Described(nothing, contents, n_tokens=_lengths(contents))


def _column(samples: Sequence[Any], present: set[Any], *names: str) -> list[Any] | None:
    """Per sample the first of the columns that it has, itself or in its ``meta``."""
    here = [name for name in names if name in present]
    if here:
        values = [sample.get(here[0]) for sample in samples]
        if not any(value is None for value in values):
            return values
    if not here and "meta" not in present:
        return None
    values = [_first_of(sample, names) for sample in samples]
    return None if all(value is None for value in values) else values


def _first_of(sample: Mapping[Any, Any] | Origin, names: Sequence[str]) -> Any:
    meta = sample.get("meta")
    holders = (sample, meta) if isinstance(meta, Mapping) else (sample,)
    for name in names:
        for holder in holders:
            value = holder.get(name)
            if value is not None:
                return value
    return None


def _contents(values: Sequence[Any]) -> Sequence[Any] | np.ndarray:
    """Contents in the forms that sketches take; equally long token samples as one array."""
    first = values[0]
    if isinstance(first, torch.Tensor) and first.ndim == 1 and not first.is_floating_point():
        with contextlib.suppress(TypeError, RuntimeError):  # of other kinds, or lengths
            together = torch.stack(list(values))
            if not together.is_floating_point():
                return together.cpu().numpy()
    return [_content(value) for value in values]


def _without_padding(contents: Any, masks: Sequence[Any]) -> Any:
    """Padding is no content: token samples without the positions that their mask leaves out."""
    kept: list[Any] = []
    padded = False
    for content, mask in zip(contents, masks, strict=True):
        if mask is not None and isinstance(content, np.ndarray):
            mask = np.asarray(mask).astype(bool)
            if mask.shape == content.shape and not mask.all():
                content, padded = content[mask], True
        kept.append(content)
    return kept if padded else contents


def _lengths(contents: Any) -> Sequence[int | None] | np.ndarray | None:
    """Token ids, bytes or characters of each content; None where no content is known."""
    if isinstance(contents, np.ndarray):
        return np.full(len(contents), contents.shape[1], np.int64)
    if all(content is None for content in contents):
        return None
    return [None if content is None else len(content) for content in contents]


def _texts(values: list[Any] | None) -> list[str | None] | None:
    if values is None:
        return None
    return values if set(map(type, values)) == {str} else [_text(value) for value in values]


def _hashed_keys(
    n: int, ids: Sequence[str | None] | None, shards: Sequence[str | None] | None, contents: Any
) -> np.ndarray:
    none: list[None] = [None] * n
    return np.asarray(
        [_hashed_key(*one) for one in zip(ids or none, shards or none, contents, strict=True)],
        dtype=np.int64,
    )


def _one_by_one(
    samples: Sequence[Any],
    indices: Sequence[Any] | None,
    locator: Locator | None,
    dataset: int,
    further: Sequence[str | None] | None,
    table: Origins | None,
) -> Described:
    by_index = _index_keys(indices, dataset)
    keys, located, positions = [], [], []
    any_packed = False
    n_unlocated, first_error = 0, ""
    for position, sample in enumerate(samples):
        found = _from_columns(sample)
        if table is not None:
            hidden = _of_row(table, position, found.shard is None)
            found = replace(hidden, **{k: v for k, v in vars(found).items() if v is not None})
        given: Any = None
        if locator is not None:
            index = None if indices is None else indices[position]
            try:
                given = _checked(locator(index, sample))
            except Exception as error:
                n_unlocated += 1
                first_error = first_error or _told(index, error)
        packed = isinstance(given, Sequence)
        any_packed = any_packed or packed
        for part in given if packed else (given,):
            one = found
            if part is not None:
                kept = Located() if packed else found  # the row's content is not its documents'
                one = replace(kept, **{k: v for k, v in vars(part).items() if v is not None})
            if by_index is not None and not packed:
                keys.append(int(by_index[position]))
            else:
                if indices is not None and not packed and one.sample_id is None:
                    one = replace(one, sample_id=str(indices[position]))
                keys.append(_hashed_key(one.sample_id, one.shard, one.content))
            located.append(one)
            positions.append(position)
    n_tokens = [n_tokens_of(one) for one in located]
    parts = None
    if any_packed:
        known = [NULL if n is None else n for n in n_tokens]
        parts = Parts(np.asarray(positions, np.int32), np.asarray(known, np.int64))
    return Described(
        np.asarray(keys, dtype=np.int64),
        [one.content for one in located],
        sample_id=[one.sample_id for one in located],
        source=[one.source for one in located],
        shard=[one.shard for one in located],
        row=[one.row for one in located],
        n_tokens=n_tokens,
        columns=None if further is None else [further[position] for position in positions],
        parts=parts,
        unlocated=Unlocated(n_unlocated, first_error) if n_unlocated else None,
    )


def _checked(given: Any) -> Located | Sequence[Located]:
    """What a locator returned, where it is what a locator has to return."""
    parts = given if isinstance(given, Sequence) else [given]
    if all(isinstance(part, Located) for part in parts):
        located: Located | Sequence[Located] = given
        return located
    raise TypeError(f"it returned {reprlib.repr(given)}, which is neither Located nor a list of it")


def _told(index: Any, error: Exception) -> str:
    what = str(error) if isinstance(error, IdentityError) else repr(error)
    return f"sample {reprlib.repr(index)}: {what[:_ERROR_CHARS]}"


def _further(sample: Any, names: Sequence[str], row: Origin | None) -> str | None:
    """The named columns of a sample as JSON; what JSON cannot hold, as text."""
    if not isinstance(sample, Mapping):
        return None
    values = {name: _plain(_first_of(sample, (name,))) for name in names}
    if row is not None:
        hidden = [name for name, value in values.items() if value is None]
        values.update((name, _first_of(row, (name,))) for name in hidden)
    return _json(values)


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    value = _scalar(value)
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


def _from_columns(sample: Any) -> Located:
    if sample is None:
        return Located()
    found = _by_column([sample])

    def only(values: Any) -> Any:
        return None if values is None else values[0]

    return Located(
        sample_id=only(found.sample_id),
        source=only(found.source),
        shard=only(found.shard),
        row=only(found.row),
        content=found.contents[0],
    )


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


def _hashed_key(sample_id: str | None, shard: str | None, content: Any) -> int:
    if sample_id is not None:
        return exact_hash(f"{shard or ''}\0{sample_id}".encode())
    if isinstance(content, str):
        return exact_hash(content.encode("utf-8", "surrogatepass"))
    if isinstance(content, bytes):
        return exact_hash(content)
    if isinstance(content, np.ndarray):
        return exact_hash_tokens(content)
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


def preview_of(content: Any) -> str | None:
    """The first characters of a content; of token ids their numbers."""
    if content is None:
        return None
    if isinstance(content, str):
        return content[:PREVIEW_CHARS]
    if isinstance(content, bytes):
        return content[:PREVIEW_CHARS].decode("utf-8", "replace")
    return " ".join(map(str, content[:PREVIEW_TOKENS].tolist()))
