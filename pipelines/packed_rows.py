"""Audit a loop over rows that pack several documents, and find out which documents they were.

    python pipelines/packed_rows.py [--out DIR] [--steps N] [--workers N]

A row is documents one after the other, cut where the row is full. The packing knows which they
were; a locator hands that on, one entry per document.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from auditor import AuditedSampler, GradeMonitor, Located, Run
from auditor.clean.mixes import MixSampler
from auditor.demo.corpus import WEIGHTS, ShardRows, build
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.show.produce import produce

B, T = 8, 257


class PackedRows(Dataset):
    """Rows int64 [T] of bytes, and which document each stretch of a row is from."""

    def __init__(self, documents: list[dict[str, Any]]) -> None:
        stream = bytearray()
        self.stretches: list[list[tuple[dict[str, Any], int, int]]] = [[]]
        for one in documents:
            text = one["text"].encode() + b"\n"
            while text:
                begin = len(stream) % T
                piece, text = text[: T - begin], text[T - begin :]
                stream += piece
                self.stretches[-1].append((one, begin, begin + len(piece)))
                if len(stream) % T == 0:
                    self.stretches.append([])
        self.n = len(stream) // T
        self.tokens = torch.frombuffer(stream, dtype=torch.uint8)[: self.n * T].view(self.n, T)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index].long()

    def locate(self, index: int, row: Tensor) -> list[Located]:
        return [
            Located(
                sample_id=one["id"],
                source=one["source"],
                shard=one["shard"],
                row=one["row"],
                content=row[begin:end],
            )
            for one, begin, end in self.stretches[index]
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("packed-rows"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    corpus = build(out / "data", seed=0, steps=2 * steps, plant=True)
    documents = ShardRows(corpus.shards)
    mixed = MixSampler(documents.sources, WEIGHTS, seed=0, n_samples=steps * B * T // 64)
    dataset = PackedRows([documents[index] for index in mixed])
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(
        dataset, batch_size=B, sampler=range(steps * B), num_workers=arguments.workers
    )

    loader = AuditedSampler(loader, run=out / "run", locator=dataset.locate)  # 1
    monitor = GradeMonitor(  # 2
        model, run=out / "run", every=5, probe=corpus.probe, probe_loss=next_byte_loss
    )
    for batch in loader:
        loss = next_byte_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.step(loss, optimizer=optimizer, grad_norm=grad_norm)  # 3
        optimizer.step()
    monitor.close()

    report = produce(Run.open(out / "run"))
    print(report.explanation.verdict)
    print(f"page: {report.html}")


if __name__ == "__main__":
    main()
