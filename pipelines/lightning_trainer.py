"""Audit a training under Lightning's Trainer, with one line.

    python pipelines/lightning_trainer.py [--out DIR] [--steps N] [--devices N]

Corpus and model are the demo's; the callback is the only line that is ours.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from auditor.demo.corpus import BATCH_SAMPLES, ShardRows, build, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.record.frameworks.lightning import AuditCallback


class Training(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(GPTConfig(n_positions=64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return next_byte_loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("lightning-trainer"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    corpus = build(out / "data", seed=0, steps=steps, plant=True)
    loader = DataLoader(
        ShardRows(corpus.shards), batch_size=BATCH_SAMPLES, shuffle=True, collate_fn=collate
    )
    audit = AuditCallback(
        run=out / "run",
        every=5,
        probe=corpus.probe,
        probe_loss=lambda module, probe: next_byte_loss(module.model, probe),
    )
    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[audit],
    )
    trainer.fit(Training(), loader)
    if trainer.is_global_zero:
        print(f"auditor report {out / 'run'}")


if __name__ == "__main__":
    main()
