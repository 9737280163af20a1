"""A small dataset, the record of it, and a model to train: what the recording tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    get_worker_info,
)

from auditor import Run

N = 70


class Documents(Dataset):
    """Rows with tokens, an id and a source; every seventh row repeats row 0."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        seed = 0 if index % 7 == 0 else index
        tokens = torch.randint(0, 1000, (48,), generator=torch.Generator().manual_seed(seed))
        return {
            "input_ids": tokens,
            "id": f"doc-{index}",
            "source": "ab"[index % 2],
            "index": index,
        }


class Stream(IterableDataset):
    """An iterable dataset that shards itself over workers."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        documents = Documents(self.n)
        return (documents[i] for i in range(start, self.n, step))


def exposures(run: Path) -> pl.DataFrame:
    return Run.open(run).scan("exposures", view="all").collect()


def received(batch: dict[str, Any]) -> list[str]:
    """The independent log: what the loop itself saw in the batch."""
    return list(batch["id"])


def tiny_transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(1000, 16),
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    )
    return model, torch.randint(0, 1000, (4, 48))
