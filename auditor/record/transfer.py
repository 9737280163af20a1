"""Tensors on their way from the device to the recorder's thread, without making training wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.record.capture import Captured


def to_host(tensor: Tensor) -> Callable[[], np.ndarray]:
    """Start copying to the host; the result waits for the copy, on the recorder's thread."""
    if tensor.device.type != "cuda":
        host = tensor.cpu()
        return host.numpy
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> np.ndarray:
        done.synchronize()
        return pinned.numpy()

    return wait


class _Deferred(dict[int, Any]):
    """Arrays by layer, each fetched from the device when it is read."""

    def items(self) -> Any:
        return [(layer, fetch()) for layer, fetch in super().items()]


def fetched(captured: Captured) -> dict[str, Any]:
    """The captured tensors on their way to the host, in numpy when read."""

    def fetch_all(tensors: Mapping[int, Tensor]) -> _Deferred:
        return _Deferred({layer: to_host(tensor) for layer, tensor in tensors.items()})

    return {
        "positions": fetch_all(captured.positions),
        "places": dict(captured.places),
        "samples": fetch_all(captured.samples),
        "values": fetch_all(captured.values),
        "attention": fetch_all(captured.attention),
        "uses": dict(captured.uses),
    }
