"""Audit a plain PyTorch loop, report on it, and clean its data.

    python pipelines/plain_pytorch.py [--out DIR] [--steps N] [--workers N]

The loop is an ordinary one; the three lines that audit it are marked. Corpus and model are the
demo's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from auditor import AuditedSampler, GradeMonitor, Run
from auditor.clean.from_run import dedupe_run
from auditor.clean.mixes import MixSampler
from auditor.demo.corpus import BATCH_SAMPLES, WEIGHTS, ShardRows, build, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.show.produce import produce


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("plain-pytorch"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    corpus = build(out / "data", seed=0, steps=steps, plant=True)
    dataset = ShardRows(corpus.shards)
    sampler = MixSampler(dataset.sources, WEIGHTS, seed=0, n_samples=steps * BATCH_SAMPLES)
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(
        dataset,
        batch_size=BATCH_SAMPLES,
        sampler=sampler,
        collate_fn=collate,
        num_workers=arguments.workers,
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

    run = Run.open(out / "run")
    report = produce(run)
    print(report.explanation.verdict)
    print(f"page: {report.html}")
    manifest = dedupe_run(run, out / "cleaned")
    print(f"{manifest.counts['rows_in']} rows in, {manifest.counts['rows_out']} out")


if __name__ == "__main__":
    main()
