"""Audit a loop over streamed Hugging Face datasets, mixed and shuffled on the way.

    python pipelines/hf_datasets_streaming.py [--out DIR] [--steps N] [--workers N]

The sources are JSON Lines files, read as streams, drawn by weight, and shuffled in a buffer. Every
row has an ``id`` and a ``source``: those tell it, wherever the buffer sent it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import torch
from torch.utils.data import DataLoader

from auditor import AuditedSampler, GradeMonitor, Run
from auditor.demo.corpus import BATCH_SAMPLES, WEIGHTS, build, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.show.produce import produce


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("hf-datasets-streaming"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    corpus = build(out / "data", seed=0, steps=steps, plant=True)
    streams = [
        datasets.load_dataset("json", data_files=str(shard), split="train", streaming=True)
        for shard in corpus.shards
    ]
    dataset = datasets.interleave_datasets(
        streams, probabilities=list(WEIGHTS.values()), seed=0, stopping_strategy="all_exhausted"
    )
    dataset = dataset.shuffle(seed=0, buffer_size=200).take(steps * BATCH_SAMPLES)
    dataset.shards = corpus.shards  # so that `auditor dedupe` finds them
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(
        dataset, batch_size=BATCH_SAMPLES, collate_fn=collate, num_workers=arguments.workers
    )

    loader = AuditedSampler(loader, run=out / "run")  # 1
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
