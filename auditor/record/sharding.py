"""Models whose parameters are divided among ranks: their forwards run collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are shards, as ``fully_shard`` and tensor parallelism make them."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    wrapped = any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules())
    return wrapped or any(_is_distributed(parameter) for parameter in model.parameters())


def _is_distributed(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # DTensor, without importing it


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, put together where it is a shard; a collective then. Detached."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def reshard(model: nn.Module) -> None:
    """Free the whole parameters of modules that ``fully_shard`` divided; else nothing."""
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            module.reshard()  # type: ignore[operator]


def agreement(model: nn.Module) -> Callable[[list[bool]], list[bool]]:
    """A collective: element by element, whether it holds on any rank."""
    parameter = next(model.parameters())

    def agree(holds: list[bool]) -> list[bool]:
        flags = torch.tensor(holds, dtype=torch.int32, device=parameter.device)
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]

    return agree
