"""A look at a model before it is trained: what a monitor would find, and what it would see."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from auditor.record.live import call_on, looking
from auditor.record.signals import parts_of
from auditor.record.sites import describe, eager, find_blocks, named_blocks


def inspect(target: str, sites: Sequence[str] | None = None) -> str:
    """The table of :meth:`GradeMonitor.describe` for ``module:factory``.

    The factory returns a model, or a model and a batch that it is called on: ``**`` of a mapping,
    ``*`` of a tuple.

    Raises:
        ValueError: the target cannot be imported, is no factory of a model, fails on its batch, or
            has no transformer blocks.
    """
    made = make(target)
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{target} returned a {type(model).__name__}; expected a model, or (model, batch)"
        )
    model = eager(model)
    found = find_blocks(model) if sites is None else named_blocks(model, sites)
    if not found:
        raise ValueError(
            f"no transformer blocks found in {type(model).__name__}; name them by --site"
        )
    if batch is None:
        return describe(model, found, {}, {})
    failures: list[str] = []

    def failed(place: str, error: Exception) -> None:
        failures.append(f"{place}: {error}")

    try:
        with looking(model, found, failed) as captured:
            call_on(model, batch)
    except Exception as error:
        raise ValueError(
            f"the model failed on its batch: {type(error).__name__}: {error}"
        ) from error
    table = describe(model, found, parts_of(captured), captured.uses)
    return "\n".join([table, *dict.fromkeys(failures)])


def make(target: str) -> Any:
    """What the function ``module:factory`` returns; ValueError where it cannot be called."""
    module, separator, name = target.partition(":")
    if not separator or not name:
        raise ValueError(f"expected module:factory, got {target!r}")
    try:
        factory = importlib.import_module(module)
        for part in name.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {target}: {error}") from error
    if not callable(factory):
        raise ValueError(f"{target} is a {type(factory).__name__}, not a function")
    try:
        return factory()
    except Exception as error:
        raise ValueError(f"{target}() failed: {type(error).__name__}: {error}") from error
