"""Where to look inside a model: its transformer blocks, found by structure, not by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Site:
    """A block of the residual stream: its number from 0, module path and module."""

    layer: int
    path: str
    module: nn.Module


def eager(model: nn.Module) -> nn.Module:
    """The module inside wrappers of ``torch.compile`` and data parallelism, where hooks fire."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in {"DistributedDataParallel", "DataParallel"}:
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_compiled(model: nn.Module) -> bool:
    """Whether calls of the model go through ``torch.compile``, where hooks do not fire."""
    while True:
        if getattr(model, "_orig_mod", None) is not None:
            return True
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def find_blocks(model: nn.Module) -> Sequence[Site]:
    """The transformer blocks in order: the ModuleList that holds most of the parameters.

    Candidates are ``ModuleList`` and ``Sequential`` whose children are all of one class and have
    children of their own; among those the one with the most parameters wins, then with the most
    children, then the outermost.
    Empty when the model has none.
    """
    best: tuple[tuple[int, int], str, nn.Module] | None = None
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) == 0:
            continue
        children = list(module.children())
        if len({type(child) for child in children}) != 1 or not any(
            True for _ in children[0].children()
        ):
            continue
        n_parameters = sum(parameter.numel() for parameter in module.parameters())
        size = (n_parameters, len(children))
        if best is None or size > best[0]:
            best = (size, path, module)
    if best is None:
        return []
    _, path, module = best
    return [
        Site(layer, f"{path}.{name}", child)
        for layer, (name, child) in enumerate(module.named_children())
    ]
