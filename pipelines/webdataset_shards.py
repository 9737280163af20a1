"""Audit a loop over WebDataset shards, shuffled, batched and loaded by a WebLoader.

    python pipelines/webdataset_shards.py [--out DIR] [--steps N] [--workers N]

Needs webdataset. A sample is its shard and its key (``__url__``, ``__key__``): keep both in the
dict until it is batched, and its text under ``text``. A tuple that has lost the key is told by its
content alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import webdataset as wds

from auditor import AuditedSampler, GradeMonitor, Run
from auditor.clean.mixes import MixSampler
from auditor.demo.corpus import BATCH_SAMPLES, WEIGHTS, ShardRows, build, encode
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.show.produce import produce

SHARDS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("webdataset-shards"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    corpus = build(out / "data", seed=0, steps=steps, plant=True)
    rows = ShardRows(corpus.shards)
    mixed = list(MixSampler(rows.sources, WEIGHTS, seed=0, n_samples=steps * BATCH_SAMPLES))
    urls = []
    for shard in range(SHARDS):
        urls.append(str(out / "data" / f"part-{shard:03}.tar"))
        with wds.TarWriter(urls[-1]) as writer:
            n = len(mixed) // SHARDS + 1
            for key, index in enumerate(mixed[shard * n : (shard + 1) * n]):
                row = rows[index]
                writer.write(
                    {"__key__": f"{key:06}", "txt": row["text"], "source.txt": row["source"]}
                )
    dataset = (
        wds.WebDataset(urls, shardshuffle=False)
        .shuffle(200, seed=0)
        .decode()
        .rename(text="txt", source="source.txt")
        .batched(BATCH_SAMPLES, partial=False)
    )
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=arguments.workers)
    loader = loader.repeat(2).with_epoch(steps)

    loader = AuditedSampler(loader, run=out / "run")  # 1
    monitor = GradeMonitor(  # 2
        model, run=out / "run", every=5, probe=corpus.probe, probe_loss=next_byte_loss
    )
    for batch in loader:
        loss = next_byte_loss(model, torch.stack([encode(text) for text in batch["text"]]))
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
