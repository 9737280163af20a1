"""Audit a loop under Lightning Fabric: wrap the loader that Fabric has set up.

    python pipelines/fabric_loop.py [--out DIR] [--steps N] [--devices N]

Corpus and model are the demo's; the three lines that audit it are marked.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from auditor import AuditedSampler, GradeMonitor
from auditor.demo.corpus import BATCH_SAMPLES, ShardRows, build, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("fabric-loop"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    fabric = Fabric(accelerator="cpu", devices=arguments.devices)
    fabric.launch()
    with fabric.rank_zero_first():
        corpus = build(out / "data", seed=0, steps=steps, plant=True)
    fabric.seed_everything(0)
    model = GPT(GPTConfig(n_positions=64))
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    loader = DataLoader(
        ShardRows(corpus.shards), batch_size=BATCH_SAMPLES, shuffle=True, collate_fn=collate
    )
    loader = fabric.setup_dataloaders(loader)

    loader = AuditedSampler(loader, run=out / "run")  # 1
    monitor = GradeMonitor(  # 2
        model, run=out / "run", every=5, probe=corpus.probe, probe_loss=next_byte_loss
    )
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for batch in itertools.islice(epochs, steps):
        loss = next_byte_loss(wrapped, batch)
        fabric.backward(loss)
        grad_norm = fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        monitor.step(loss, optimizer=optimizer, grad_norm=grad_norm)  # 3
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    if fabric.is_global_zero:
        print(f"auditor report {out / 'run'}")


if __name__ == "__main__":
    main()
