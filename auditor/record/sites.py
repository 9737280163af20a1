"""Where to look inside a model: its transformer blocks, found by structure, not by name."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

from torch import nn


@dataclass(frozen=True)
class Site:
    """A block of the residual stream: its number from 0, module path and module.

    ``batch_first``: whether its activations are [B, T, D]; else [T, B, D]. ``follows``: whether its
    input is what the block before it put out (of the first, the embedding).
    """

    layer: int
    path: str
    module: nn.Module
    batch_first: bool = True
    follows: bool = True


def eager(model: nn.Module) -> nn.Module:
    """The module inside wrappers of ``torch.compile`` and data parallelism, where hooks fire."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in {"DistributedDataParallel", "DataParallel"}:
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def compiled_entry(model: nn.Module) -> nn.Module | None:
    """Where calls of a model enter code that ``torch.compile`` made; None for an eager model.

    The wrapper that ``torch.compile(model)`` returned, the module that ``model.compile()`` compiled
    in place, or the model itself where only parts of it are compiled: their hooks do not fire.
    """
    while True:
        if getattr(model, "_orig_mod", None) is not None:
            return model
        if getattr(model, "_compiled_call_impl", None) is not None:
            return model
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    parts = model.modules()
    return model if any(_is_compiled(part) for part in parts) else None


def anything_compiled() -> bool:
    """Whether ``torch.compile`` was called in this process; it leaves its backends behind."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(dynamo, "cached_backends", {})
    return any(backend is not None for backend in backends.values())  # None: of a stance


def _is_compiled(module: nn.Module) -> bool:
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or getattr(module, "_orig_mod", None) is not None
    )


STACK_SHARE: Final = 0.5
"""A further list of blocks counts when it has this share of the parameters of the largest."""


def find_blocks(model: nn.Module) -> Sequence[Site]:
    """The transformer blocks in order: the lists of blocks that hold most of the parameters.

    Candidates are ``ModuleList`` and ``Sequential`` whose children are all of one class and have
    children of their own. The one with the most parameters wins, then with the most children, then
    the outermost; an encoder and a decoder beside it are both taken. Empty when there is none.
    """
    candidates: list[tuple[int, int, str, nn.Module]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) == 0:
            continue
        children = list(module.children())
        if len({type(child) for child in children}) != 1 or not any(
            True for _ in children[0].children()
        ):
            continue
        n_parameters = sum(parameter.numel() for parameter in module.parameters())
        candidates.append((n_parameters, len(children), path, module))
    largest = max((one[0] for one in candidates), default=0)
    chosen: list[tuple[str, nn.Module]] = []
    for size, _, path, module in sorted(candidates, key=lambda one: one[:2], reverse=True):
        apart = not any(_is_inside(path, other) or _is_inside(other, path) for other, _ in chosen)
        if apart and size >= STACK_SHARE * largest:
            chosen.append((path, module))
    order = [path for _, _, path, _ in candidates]  # as the model has them
    found: list[Site] = []
    for path, module in sorted(chosen, key=lambda one: order.index(one[0])):
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            site = _site(len(found), where, child)
            follows = not found or child is not next(module.children())
            found.append(replace(site, follows=follows))
    return found


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")


def named_blocks(model: nn.Module, sites: Sequence[str | nn.Module]) -> Sequence[Site]:
    """The blocks that were named, by module path, by pattern (``layers.*``), or as modules.

    Raises:
        ValueError: the model has no such module.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found: list[Site] = []
    for wanted in sites:
        if isinstance(wanted, nn.Module):
            if id(wanted) not in paths:
                raise ValueError(f"sites: a {type(wanted).__name__} is no part of the model")
            matching = [(paths[id(wanted)], wanted)]
        else:
            matching = [
                (path, module)
                for path, module in model.named_modules()
                if path and _matches(path, wanted)
            ]
            if not matching:
                raise ValueError(f"sites: the model has no module {wanted!r}")
        found += [_site(len(found) + n, *one) for n, one in enumerate(matching)]
    return found


def describe(
    model: nn.Module,
    sites: Sequence[Site],
    seen: Mapping[int, Collection[str]],
    uses: Mapping[int, int],
) -> str:
    """A table of the blocks and what was seen of each, and what that leaves out.

    ``seen``: by layer, names of :class:`~auditor.record.capture.Captured`; empty before the first
    forward. ``uses``: by layer, how often a forward uses it.
    """
    lines = [f"{type(model).__name__}: {len(sites)} {'block' if len(sites) == 1 else 'blocks'}"]
    width = max([len(site.path) for site in sites], default=0)
    for site in sites:
        own = seen.get(site.layer, ())
        found = [name for part, name in _PARTS.items() if part in own]
        missing = [name for part, name in _PARTS.items() if part not in own]
        what = ", ".join(found) or "not seen"
        if found and missing:
            what += f"; not seen: {', '.join(missing)}"
        if (n := uses.get(site.layer, 1)) > 1:
            what += f"; used {n} times in a forward, the first is seen"
        told = what if seen else "no forward seen yet"
        lines.append(f"{site.layer:>4}  {site.path:<{width}}  {type(site.module).__name__}  {told}")
    if seen and not any("attention" in parts for parts in seen.values()):
        lines.append(
            "Attention was not seen: it is where it goes through scaled_dot_product_attention, "
            "nn.MultiheadAttention, flex_attention or a softmax over [B, H, T, T]."
        )
    return "\n".join(lines)


_PARTS = {"positions": "output", "attention": "attention", "values": "values"}


def _matches(path: str, pattern: str) -> bool:
    """A star stands for one part of the path."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        fnmatchcase(part, one) for part, one in zip(parts, wanted, strict=True)
    )


def _site(layer: int, path: str, module: nn.Module) -> Site:
    attention = getattr(getattr(module, "_orig_mod", module), "self_attn", None)
    return Site(layer, path, module, getattr(attention, "batch_first", True) is not False)
