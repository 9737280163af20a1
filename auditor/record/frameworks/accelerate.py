"""Loaders that Hugging Face Accelerate prepared, told by their attributes: it is not imported.

A prepared loader wraps a ``DataLoader`` and has state of its own: the epoch, whether the end is
reached (``Accelerator.accumulate`` steps there), what ``save_state`` writes. All of it stays in the
one object that the ``Accelerator`` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from auditor.record.tagging import Describer, SendingRows, beside, tagging_copy


def is_prepared(loader: Any) -> bool:
    """Whether Accelerate's ``prepare`` returned it."""
    return isinstance(getattr(loader, "__dict__", {}).get("base_dataloader"), DataLoader)


def tagging_view(loader: Any, describer: Describer) -> Any:
    """The prepared loader as it is, but for the ``DataLoader`` inside, which tags its batches.

    A view and no copy: what ``set_epoch``, ``load_state`` or an iteration change in one, they have
    changed in the other.
    """
    inner = loader.base_dataloader
    dispatching = _is_dispatching(loader)
    tagged = tagging_copy(inner, describer, SendingRows(describer) if dispatching else beside)
    if hasattr(inner, "load_state_dict"):
        own = {name: vars(tagged)[name] for name in ("dataset", "collate_fn", "_iterator")}
        tagged = _view(inner, **own)
    if not dispatching:
        return _view(loader, base_dataloader=tagged)
    return _view(loader, base_dataloader=tagged, slice_fn=_SlicingPairs(loader.slice_fn))


def divides_twice(loader: Any) -> bool:
    """Whether the data of a rank, which a ``DistributedSampler`` chose, is divided once more."""
    samplers = list(_samplers(loader.base_dataloader))
    divided = _is_dispatching(loader) or any(
        type(one).__name__ == "BatchSamplerShard" and one.num_processes > 1 for one in samplers
    )
    return divided and any(
        isinstance(one, DistributedSampler) and one.num_replicas > 1 for one in samplers
    )


def _is_dispatching(loader: Any) -> bool:
    return type(loader).__name__ == "DataLoaderDispatcher"


def _samplers(holder: Any) -> Iterator[Any]:
    """The samplers and batch samplers of a loader, and those inside them."""
    for name in ("batch_sampler", "sampler"):
        inner = getattr(holder, name, None)
        if inner is not None:
            yield inner
            yield from _samplers(inner)


class _SlicingPairs:
    """A dispatching loader's ``slice_fn``, which knows its batches, where they come with rows."""

    def __init__(self, slice_fn: Callable[..., Any]) -> None:
        self._slice_fn = slice_fn

    def __call__(self, pair: tuple[Any, Tensor], part: slice, **ranks: Any) -> tuple[Any, Tensor]:
        batch, rows = pair
        return self._slice_fn(batch, part, **ranks), rows[part]


def _view(of: Any, **own: Any) -> Any:
    """An object of the same attributes, shared, except for some of its own."""

    def attribute(name: str) -> property:
        def read(view: Any) -> Any:
            return own[name]

        def write(view: Any, value: Any) -> None:
            own[name] = value

        return property(read, write)

    kind = type(of)
    view: Any = object.__new__(
        type(kind.__name__, (kind,), {name: attribute(name) for name in own})
    )
    object.__setattr__(view, "__dict__", vars(of))
    return view
