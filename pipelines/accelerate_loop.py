"""Audit a loop under Hugging Face Accelerate: wrap the loader that it has prepared.

    python pipelines/accelerate_loop.py [--out DIR] [--steps N] [--accumulate N]
    torchrun --nproc-per-node 2 pipelines/accelerate_loop.py    # two ranks on CPUs
    accelerate launch pipelines/accelerate_loop.py              # as `accelerate config` says

Corpus and model are the demo's; the three lines that audit the loop are marked. Every rank writes
its own part of the run.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from auditor import AuditedSampler, GradeMonitor
from auditor.demo.corpus import BATCH_SAMPLES, ShardRows, build, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("accelerate-loop"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--accumulate", type=int, default=1)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=arguments.accumulate)
    with accelerator.main_process_first():
        corpus = build(out / "data", seed=0, steps=steps, plant=True)
    set_seed(0)
    model = GPT(GPTConfig(n_positions=64))
    loader = DataLoader(
        ShardRows(corpus.shards), batch_size=BATCH_SAMPLES, shuffle=True, collate_fn=collate
    )
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=2e-3), loader
    )

    loader = AuditedSampler(loader, run=out / "run", optimizer=optimizer)  # 1
    monitor = GradeMonitor(  # 2
        model, run=out / "run", every=5, probe=corpus.probe, probe_loss=next_byte_loss
    )
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for batch in itertools.islice(epochs, steps * arguments.accumulate):
        with accelerator.accumulate(model):
            loss = next_byte_loss(model, batch)
            accelerator.backward(loss)
            grad_norm = None
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            monitor.step(loss, optimizer=optimizer, grad_norm=grad_norm)  # 3
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    if accelerator.is_main_process:
        print(f"auditor report {out / 'run'}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
