"""Audit a loop that trains on random windows of one token file, as nanoGPT does.

    python pipelines/memmap_windows.py [--out DIR] [--steps N]

There is no loader to wrap: the loop says which windows it took. An index of the file's documents
turns each window into the documents in it, and how many of their tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from auditor import AuditedSampler, DocumentIndex, GradeMonitor, Run
from auditor.demo.corpus import ShardRows, build
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.show.produce import produce

EOT = 0
B, T = 16, 65


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("memmap-windows"))
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    corpus = build(out / "data", seed=0, steps=steps, plant=True)
    file = out / "data" / "train.bin"
    with file.open("wb") as output:
        for row in ShardRows(corpus.shards).rows:
            output.write(row["text"].encode() + bytes([EOT]))
    tokens = np.memmap(file, dtype=np.uint8, mode="r")
    documents = DocumentIndex.from_eot(tokens, eot=EOT, window=T, source="web", shard=file.name)
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    sampler = AuditedSampler(run=out / "run", optimizer=optimizer, locator=documents.locator)  # 1
    monitor = GradeMonitor(  # 2
        model, run=out / "run", every=5, probe=corpus.probe, probe_loss=next_byte_loss
    )
    for _ in range(steps):
        starts = torch.randint(len(tokens) - T + 1, (B,))
        batch = torch.stack([torch.from_numpy(tokens[i : i + T].astype(np.int64)) for i in starts])
        sampler.record(starts, batch)  # 3
        loss = next_byte_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.step(loss, optimizer=optimizer, grad_norm=grad_norm)  # 4
        optimizer.step()
    monitor.close()

    run = Run.open(out / "run")
    report = produce(run)
    seen = run.scan("exposures").collect()["sample_id"].n_unique()
    print(f"{seen} of {len(documents)} documents were seen")
    print(report.explanation.verdict)
    print(f"page: {report.html}")


if __name__ == "__main__":
    main()
