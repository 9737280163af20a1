"""Audit a loop over MosaicML Streaming shards, shuffled by the library.

    python pipelines/mosaic_streaming.py [--out DIR] [--steps N] [--workers N]

Needs mosaicml-streaming. The samples carry no ids: each is recorded by its index in the dataset,
its shard file and its row there. Their ``source`` is a column here; without one, of several
streams each is a source.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from auditor import AuditedSampler, GradeMonitor, Run
from auditor.clean.mixes import MixSampler
from auditor.demo.corpus import BATCH_SAMPLES, WEIGHTS, ShardRows, build, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.show.produce import produce


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("mosaic-streaming"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    corpus = build(out / "data", seed=0, steps=steps, plant=True)
    rows = ShardRows(corpus.shards)
    mixed = MixSampler(rows.sources, WEIGHTS, seed=0, n_samples=steps * BATCH_SAMPLES)
    local = str(out / "data" / "mds")
    columns = {"text": "str", "source": "str"}
    with MDSWriter(out=local, columns=columns, size_limit=2**15) as writer:
        for index in mixed:
            writer.write({name: rows[index][name] for name in columns})
    dataset = StreamingDataset(
        local=local,
        shuffle=True,
        shuffle_seed=0,
        shuffle_algo="py1br",
        shuffle_block_size=2_000,
        batch_size=BATCH_SAMPLES,
    )
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = StreamingDataLoader(
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
