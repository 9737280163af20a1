"""Identity travels with the batch: from the dataset, through workers, to the training loop.

A sampler knows what was drawn, not what arrived: workers prefetch, drop, reorder. So a copy of the
loader is given a dataset that remembers the indices of each fetch, and a collate function that
puts a :class:`Tag` beside the batch it returns. The tag is taken off where the batch is consumed,
and the loop is handed the batch it would have had.
"""

from __future__ import annotations

import collections
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from auditor.errors import IdentityError
from auditor.measure.compact import WORDS, compact
from auditor.record.batches import Columns, Rows, n_rows
from auditor.record.datasets import Numbered, NumberedStream, is_streaming, origins_of
from auditor.record.identity import Described, Locator, Parts, Unlocated, describe, keys_alone
from auditor.record.lookup import Lookup
from auditor.record.samples import SampleLedger
from auditor.record.transfer import to_host


@dataclass
class Tag:
    """The samples of one batch: keys i64 [n], and what is needed to score their duplication.

    ``sketches``: i64 [n, WORDS] made in a loader worker, or None. ``parts``: as in
    :class:`Described`. ``unwanted``: a sample of the batch was to be left out. ``failure``: why the
    samples cannot be told; an exception in a worker would cost the loop its batch. ``unlocated``:
    samples that the locator failed on. ``other_rows``: rows of the batch, where they are not as
    many as its samples.
    """

    keys: np.ndarray
    sketches: np.ndarray | None = None
    parts: Parts | None = None
    unwanted: bool = False
    failure: str | None = None
    unlocated: Unlocated | None = None
    other_rows: int | None = None

    def tag(self) -> Tag:
        return self

    @classmethod
    def of_failure(cls, error: Exception) -> Tag:
        """A tag whose samples cannot be told."""
        told = isinstance(error, IdentityError)
        failure = str(error) if told else f"{type(error).__name__}: {error}"
        return cls(np.zeros(0, np.int64), failure=failure)


class RawTag:
    """The samples of one batch as the dataset returned them, to be described on another thread."""

    other_rows: int | None = None
    """As of :class:`Tag`."""

    def __init__(self, samples: Sequence[Any] | Columns, indices: Sequence[Any] | None) -> None:
        self.samples = samples
        self.indices = indices

    def without_samples(self) -> RawTag:
        """What is left to tell them by: their indices."""
        tag = RawTag((), self.indices)
        tag.other_rows = self.other_rows
        return tag

    @property
    def n_bytes(self) -> int:
        """About how much memory the samples hold, from the first of them."""
        if isinstance(self.samples, Columns):
            return self.samples.n_bytes
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
        lookup: sketches made beforehand.
        unwanted: sample ids whose batches are left out.
    """

    def __init__(
        self,
        *,
        locator: Locator | None,
        columns: Sequence[str] = (),
        sketching: bool = True,
        lookup: Lookup | None = None,
        unwanted: frozenset[str] = frozenset(),
    ) -> None:
        self._locator = locator
        self._columns = tuple(columns)
        self._unwanted = unwanted
        self.sketching = sketching
        self._lookup = lookup
        self._ledger = Path()
        self._dataset = 0
        self._read: Any = None
        self._worker: tuple[int, SampleLedger] | None = None

    def of_attempt(self, ledger: Path, number: int, dataset: Any = None) -> None:
        """Describe for this attempt from now on.

        ``ledger``: where its recorder writes descriptions; workers write beside it. ``number``: of
        the dataset in the attempt, part of its samples' keys. ``dataset``: the dataset itself, that
        may know more of a sample than it returns.
        """
        self._ledger, self._dataset, self._read = ledger, number, dataset

    def describe(self, raw: RawTag) -> Described:
        return describe(
            raw.samples,
            raw.indices,
            self._locator,
            dataset=self._dataset,
            columns=self._columns,
            table=origins_of(self._read, raw.indices),
        )

    def columns_of(self, batch: Any, n: int | None) -> Columns | None:
        """The columns of a collated batch, where they say all there is to know of its samples."""
        if self._locator is not None:  # it wants the raw samples
            return None
        keep = self.sketching or n is None
        return Columns.of(batch, n, self._columns, keep=keep)

    def keys_alone(self, raw: RawTag) -> Described:
        """Raises ``IdentityError`` where samples have no index to tell them by."""
        return keys_alone(raw.indices, self._dataset)

    def sketches(self, described: Described) -> np.ndarray:
        """Compact sketches i64 [n, WORDS], looked up where they can be, else made."""
        if self._lookup is None:
            return compact(described.contents)
        return self._lookup.sketches(described.sample_id, described.contents)

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
                self.sketches(described) if sketching else None,
                described.parts,
                self.is_unwanted(described),
                unlocated=described.unlocated,
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
        # A stateful loader looks for these without asking __getattr__, from Python 3.12 on.
        for name in ("state_dict", "load_state_dict"):
            if hasattr(dataset, name):
                self.__dict__[name] = getattr(dataset, name)

    def __getitems__(self, indices: list[Any]) -> _Fetched:
        dataset = self._dataset
        fetch = getattr(dataset, "__getitems__", None)
        samples = fetch(indices) if fetch else [dataset[index] for index in indices]
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
        elif isinstance(data, Numbered):
            samples, indices = data.sample, _indices([data])
        elif self._batched and data and isinstance(data[0], Numbered):
            samples, indices = [one.sample for one in data], _indices(data)
        if get_worker_info() is not None:
            # The tag first: a collate function may change what it is given.
            described = self.describer.tag(self._raw(samples, indices))
            return self._collated(samples, described)
        if self._batched and self._collate is default_collate:
            batch = self._collate(samples)
            columns = self.describer.columns_of(batch, len(samples))
            tag = self._raw(samples, indices) if columns is None else RawTag(columns, indices)
            return self._attach(batch, tag)
        tag = self._raw(samples, indices)
        if self._batched:  # described later, so from samples that collating cannot change
            tag = RawTag([_own(sample) for sample in samples], indices)
        return self._collated(samples, tag)

    def _collated(self, samples: Any, tag: Tag | RawTag) -> Any:
        if not self._batched or self._collate is default_collate:
            return self._attach(self._collate(samples), tag)
        n = len(samples)
        batch = self._collate(samples)
        tag.other_rows = other_rows(batch, n)
        return self._attach(batch, tag)

    def _raw(self, samples: Any, indices: list[Any] | None) -> RawTag:
        if self._batched:
            return RawTag(list(samples), indices)
        # No automatic batching: the dataset's item is one sample, or a batch by itself.
        if indices is not None and len(indices) == 1:
            return RawTag([samples], indices)
        return RawTag(Rows(samples), indices)


def _own(sample: Any) -> Any:
    return copy.copy(sample) if isinstance(sample, dict | list) else sample


def _indices(numbered: Sequence[Numbered]) -> list[Any] | None:
    """The indices of samples, None where one of them is not known."""
    indices = [one.index for one in numbered]
    return None if None in indices else indices


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
        n_words = 0
        if isinstance(tag, RawTag):
            tag = self._describer.tag(tag, sketching=False)
        elif self._describer.sketching:
            n_words = WORDS
        told = tag.failure is None and tag.parts is None
        n = _n_samples(batch) or len(tag.keys)
        rows = np.full((n, 1 + n_words), _UNTOLD, np.int64)
        if told and len(tag.keys) == n:  # else it cannot be cut where the batch is cut
            rows[:, 0] = tag.keys
            if n_words and tag.sketches is not None:
                rows[:, 1:] = tag.sketches
        return batch, torch.from_numpy(rows)


def _n_samples(batch: Any) -> int:
    """Rows of a collated batch, by its first column."""
    if isinstance(batch, Mapping):
        return max((n_rows(values) for values in batch.values()), default=0)
    return n_rows(batch[0]) if isinstance(batch, tuple | list) and batch else n_rows(batch)


def other_rows(batch: Any, n: int) -> int | None:
    """Rows of a collated batch where they are not ``n``; None where they are, or cannot be told.

    They are ``n`` where any of its columns, however deep, is so long.
    """
    # Mostly its first column is all there is to look at: this may run on the training thread.
    first = batch
    if type(batch) is dict:
        first = next(iter(batch.values()), None)
    elif type(batch) in (tuple, list) and batch:
        first = batch[0]
    if type(first) is torch.Tensor and first.ndim and first.size(0) == n:
        return None
    found: list[int] = []
    try:
        return None if _is_as_long(batch, n, found) or not found else found[0]
    except Exception:  # a batch of a class of its own
        return None


_ARRAYS: Final = (torch.Tensor, np.ndarray)
_SCALARS: Final = (str, bytes, int, float)
_COLUMNS: Final = 8
"""Members of a list that are looked into: this may run on the training thread."""


def _is_as_long(batch: Any, n: int, found: list[int]) -> bool:
    """Whether a column in here is ``n`` long; the lengths of those met go into ``found``."""
    if isinstance(batch, _ARRAYS):
        if batch.ndim:
            found.append(len(batch))
            return found[-1] == n
    elif isinstance(batch, Mapping):
        return any(_is_as_long(one, n, found) for one in batch.values())
    elif isinstance(batch, list | tuple):
        if len(batch) == n:
            return True
        first, last = (batch[0], batch[-1]) if batch else (None, None)
        if isinstance(first, _SCALARS) and isinstance(last, _SCALARS):
            found.append(len(batch))
            return False
        if isinstance(first, Mapping) or (isinstance(batch, list) and isinstance(first, list)):
            found.append(len(batch))
        return any(_is_as_long(one, n, found) for one in batch[:_COLUMNS])
    return False


def tagging_copy(
    loader: Any,
    describer: Describer,
    attach: Callable[[Any, Tag | RawTag], Any] = beside,
) -> Any:
    """A copy of the loader whose batches carry their tag; samplers and generators are shared.

    Fabric's loader, which wraps another, is copied with a tagging copy of that one inside. The
    original is untouched, and draws from shared generators exactly as it would have.
    """
    tagged = copy.copy(loader)
    inner = vars(loader).get("_dataloader")  # of Fabric
    if isinstance(inner, DataLoader):
        tagged.__dict__["_dataloader"] = paired(tagging_copy(inner, describer, attach))
        return tagged
    tagged._iterator = None  # of persistent workers that were started without tags
    batched = loader.batch_sampler is not None
    if not isinstance(loader.dataset, IterableDataset):
        # A DataLoader refuses to have its dataset set; a copy that has not been iterated may.
        tagged.__dict__["dataset"] = _IndexedDataset(loader.dataset, batched)
    else:
        batched = batched or loader.batch_size is not None
        if is_streaming(loader.dataset):
            tagged.__dict__["dataset"] = NumberedStream(loader.dataset)
    tagged.collate_fn = TaggingCollate(loader.collate_fn, describer, batched, attach)
    if has_untagged_workers(loader):
        tagged.__dict__["_initial_iter_for_state_dict"] = False
    elif _is_started(loader):
        # Its state was asked for, and what it drew for its first epoch is drawn.
        tagged._iterator = _tagging_iterator(loader._iterator, tagged)
    return tagged


def has_untagged_workers(loader: Any) -> bool:
    """Whether the next epoch's workers run already, and know of no tags.

    A stateful loader starts them when it is asked for its state; what they drew is drawn.
    """
    inner = vars(loader).get("base_dataloader", loader)
    return _is_started(inner) and bool(inner.num_workers)


def _is_started(loader: Any) -> bool:
    """Of torchdata's stateful loader, whose next epoch goes on with the iterator it has."""
    return bool(vars(loader).get("_initial_iter_for_state_dict"))


def _tagging_iterator(iterator: Any, tagged: DataLoader) -> Any:
    """A copy of an iterator without workers that fetches by the tagging loader."""
    copied = object.__new__(type(iterator))  # copy() would pickle, which iterators refuse
    copied.__dict__.update(vars(iterator))
    fetcher = copied._dataset_fetcher = copy.copy(iterator._dataset_fetcher)
    fetcher.dataset, fetcher.collate_fn = tagged.dataset, tagged.collate_fn
    return copied


def restart_workers(loader: Any) -> None:
    """Let the next iteration start workers anew; a stateful loader that has a place keeps it."""
    if _is_started(loader):
        loader.load_state_dict(loader.state_dict())
    loader._iterator = None


def paired(tagged: Any) -> Any:
    """A tagging loader whose class iterates in a way of its own, made to see batches without tags.

    Such a class counts what it yields, moves it, changes it: it would do so with a pair.
    """
    owner = next(kind for kind in type(tagged).__mro__ if "__iter__" in vars(kind))
    ours = owner.__module__.split(".")[0] in {"torch", "torchdata"}  # they look at no batch
    return tagged if ours else PairedLoader(tagged)


class PairedLoader:
    """A tagging loader of another class: its batches and their tags meet again behind it.

    Yields pairs, as :func:`beside` makes them. A batch that comes out as it went in is told by
    that; one that was changed on the way is taken for the first that has not come out.
    """

    def __init__(self, tagged: DataLoader) -> None:
        self.__dict__.update(_tagged=tagged, _between=collections.deque())
        fetch = tagged._get_iterator
        vars(tagged)["_get_iterator"] = lambda: _Untagging(fetch(), self._between)

    def __iter__(self) -> Iterator[tuple[Any, Tag | RawTag]]:
        self._between.clear()
        return map(self._pair, iter(self._tagged))

    def _pair(self, batch: Any) -> tuple[Any, Tag | RawTag]:
        between = self._between
        while any(one is batch for one, _ in between):
            one, tag = between.popleft()  # those before it were left out
            if one is batch:
                return batch, tag
        if between and _n_samples(between[0][0]) == _n_samples(batch):
            return batch, between.popleft()[1]
        return batch, Tag.of_failure(
            IdentityError(
                f"{type(self._tagged).__name__} yields other batches than its workers made",
                remedy="Wrap the loader inside it, or call AuditedSampler.record in the loop",
            )
        )

    def __len__(self) -> int:
        return len(self._tagged)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_tagged"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tagged, name, value)


class _Untagging:
    """An iterator of a tagging loader that keeps the tags back, with their batches."""

    def __init__(self, pairs: Any, between: collections.deque[tuple[Any, Any]]) -> None:
        self.__dict__.update(_pairs=pairs, _between=between)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch, tag = next(self._pairs)
        self._between.append((batch, tag))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_pairs"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._pairs, name, value)
