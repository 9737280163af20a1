"""Train, find what harmed the model, and show by a replay that it did.

    python pipelines/replay.py [--out DIR] [--steps N] [--seeds N]

One source of the demo's corpus says the same four passages again and again for 100 steps. The
report blames it by association. The replay goes back to the checkpoint before, and trains the same
steps as they were, without the repeats, and without as many other samples. Interrupted, it goes on
where it stopped when it is called again with the same folder.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import auditor
from auditor import AuditedSampler, GradeMonitor, Run
from auditor.clean.mixes import MixSampler
from auditor.demo.corpus import BATCH_SAMPLES, PLANTED, WEIGHTS, Corpus, ShardRows, build, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.show.produce import produce

BURST_STEPS = 100
N_PASSAGES = 4
EVERY = 5
MEASURED = 20
"""In a replay only the last quarter of the steps is compared."""


class Rows(ShardRows):
    """The corpus, of which one source repeats itself in the rows from ``begin`` to ``end``."""

    def __init__(self, corpus: Corpus, begin: int, end: int) -> None:
        super().__init__(corpus.shards)
        own = [number for number, row in enumerate(self.rows) if row["source"] == PLANTED]
        passages = [self.rows[number]["text"] for number in own[-N_PASSAGES:]]
        for i, number in enumerate(own[begin:end]):
            self.rows[number] = {**self.rows[number], "text": passages[i % N_PASSAGES]}


def new_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = GPT(GPTConfig(n_positions=64))
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Any:
    """Forward, backward and clipping: what comes before the optimizer's step."""
    loss = next_byte_loss(model, batch)
    optimizer.zero_grad()
    loss.backward()
    return loss, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def record(out: Path, dataset: ShardRows, corpus: Corpus, steps: int) -> Run:
    """The run as it happened, with a checkpoint every 50 steps."""
    torch.manual_seed(0)
    model, optimizer = new_model()
    sampler = MixSampler(dataset.sources, WEIGHTS, seed=0, n_samples=steps * BATCH_SAMPLES)
    loader = DataLoader(dataset, batch_size=BATCH_SAMPLES, sampler=sampler, collate_fn=collate)
    loader = AuditedSampler(loader, run=out / "run")
    monitor = GradeMonitor(
        model, run=out / "run", every=EVERY, probe=corpus.probe, probe_loss=next_byte_loss
    )
    for step, batch in enumerate(loader):
        loss, grad_norm = update(model, optimizer, batch)
        monitor.step(loss, optimizer=optimizer, grad_norm=grad_norm)
        optimizer.step()
        if step % 50 == 49:
            path = out / f"step_{step}.pt"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            monitor.checkpoint(path)
    monitor.close()
    return Run.open(out / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("replay"))
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    corpus = build(out / "data", seed=0, steps=steps, plant=False)
    per_step = BATCH_SAMPLES * WEIGHTS[PLANTED]
    begin = steps - BURST_STEPS - 20
    dataset = Rows(corpus, round(begin * per_step), round((begin + BURST_STEPS) * per_step))
    if not (out / "run").exists():
        record(out, dataset, corpus, steps)
    run = Run.open(out / "run")
    print(produce(run).explanation.verdict)

    def train(checkpoint: str, batches: Any, seed: int) -> Iterator[dict[str, float]]:
        """Nothing is random here but the replacements, which differ from seed to seed."""
        torch.manual_seed(seed)
        model, optimizer = new_model()
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        with tempfile.TemporaryDirectory() as scratch:
            monitor = GradeMonitor(
                model,
                run=Path(scratch) / "run",
                every=MEASURED,
                probe=corpus.probe[:, :-1].clamp(min=0),
            )
            for batch in batches:
                tokens = collate([dataset[index] for index in batch.indices])
                loss, grad_norm = update(model, optimizer, tokens)
                monitor.step(loss, optimizer=optimizer, step=batch.step, grad_norm=grad_norm)
                optimizer.step()
                if batch.step % MEASURED == 0:
                    with torch.no_grad():
                        held_out = float(next_byte_loss(model, corpus.held_out))
                    yield {"step": batch.step, "probe_loss": held_out}
            monitor.close()
            for grade in monitor.grades:
                yield {"step": grade.step, "probe_ratio": grade.ratio}

    result = auditor.replay(run, train, seeds=arguments.seeds)
    print(result)
    (out / "replay.json").write_text(result.to_json())


if __name__ == "__main__":
    main()
