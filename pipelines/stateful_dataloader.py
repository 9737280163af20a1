"""Audit a loop over torchdata's StatefulDataLoader that is stopped halfway and resumed.

    python pipelines/stateful_dataloader.py [--out DIR] [--steps N] [--workers N]

Needs torchdata. The loader's state is asked for, and loaded, through the audited loader; what
workers had fetched ahead is neither in the state nor in the record.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from auditor import AuditedSampler, GradeMonitor, Run
from auditor.clean.mixes import MixSampler
from auditor.demo.corpus import BATCH_SAMPLES, WEIGHTS, ShardRows, build, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.show.produce import produce


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("stateful-dataloader"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    corpus = build(out / "data", seed=0, steps=steps, plant=True)
    dataset = ShardRows(corpus.shards)
    order = list(MixSampler(dataset.sources, WEIGHTS, seed=0, n_samples=steps * BATCH_SAMPLES))
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train(state: dict[str, Any] | None, n_steps: int) -> dict[str, Any]:
        """As one process does it: load the state, train, return the state to be saved."""
        loader = StatefulDataLoader(
            dataset,
            batch_size=BATCH_SAMPLES,
            sampler=order,
            collate_fn=collate,
            num_workers=arguments.workers,
        )
        loader = AuditedSampler(loader, run=out / "run")  # 1
        monitor = GradeMonitor(  # 2
            model, run=out / "run", every=5, probe=corpus.probe, probe_loss=next_byte_loss
        )
        if state is not None:
            loader.load_state_dict(state)
        for batch in itertools.islice(loader, n_steps):
            loss = next_byte_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            monitor.step(loss, optimizer=optimizer, grad_norm=grad_norm)  # 3
            optimizer.step()
        state = loader.state_dict()
        monitor.close()
        return state

    state = train(None, steps // 2)
    train(state, steps - steps // 2)

    report = produce(Run.open(out / "run"))
    print(report.explanation.verdict)
    print(f"page: {report.html}")


if __name__ == "__main__":
    main()
