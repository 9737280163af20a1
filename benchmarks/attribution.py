"""Which source does the report name? Real small trainings with a planted fault, none, or another.

Three kinds of runs of the demo's model, on seeds that no threshold was chosen on:

- planted: one source begins to repeat four passages; the culprit is known;
- clean: nothing is planted;
- lr spike: the learning rate is ten times too high for 20 steps; no data is at fault.

In all of them a second source is made of repeated passages from the first step to the last. The
baseline blames the source with most samples in the two batches before the first event.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

KINDS = ("planted", "clean", "lr spike")


def one_run(kind: str, seed: int, folder: str) -> tuple[str, int, str | None, str | None, int]:
    """Train and explain one run: kind, seed, culprit, culprit of the baseline, episodes."""
    import polars as pl
    import torch

    torch.set_num_threads(1)
    from auditor.clean.mixes import MixSampler
    from auditor.demo.corpus import BATCH_SAMPLES, WEIGHTS, ShardRows, build
    from auditor.demo.story import STEPS
    from auditor.demo.training import train
    from auditor.explain.pipeline import explain
    from auditor.run import Run

    out = Path(folder) / f"{kind}-{seed}".replace(" ", "-")
    corpus = build(out / "data", seed=seed, steps=STEPS, plant=kind == "planted")
    rows = ShardRows(corpus.shards)
    sampler = MixSampler(rows.sources, WEIGHTS, seed, STEPS * BATCH_SAMPLES)
    spike = STEPS * 12 // 21 + seed % 20 if kind == "lr spike" else None
    train(rows, sampler, corpus, out / "run", steps=STEPS, seed=seed, lr_spike_step=spike)
    found = explain(Run.open(out / "run"))
    baseline = None
    if len(found.events):
        onset = int(found.events["onset_high"][0])
        near = found.composition.filter(pl.col("step").is_between(onset - 1, onset))
        totals = near.group_by("source").agg(pl.col("n_samples").sum()).sort("n_samples", "source")
        baseline = str(totals["source"][-1])
    return kind, seed, found.culprit, baseline, found.events["episode"].n_unique()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (default 5)")
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")
    arguments = parser.parse_args()
    from auditor.demo.corpus import PLANTED

    os.environ["OMP_NUM_THREADS"] = "1"
    begun = time.monotonic()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool,
    ):
        futures = [pool.submit(one_run, kind, seed, folder) for kind in KINDS for seed in seeds]
        results = [future.result() for future in futures]
    if arguments.json:
        names = ("kind", "seed", "culprit", "baseline", "episodes")
        print(json.dumps([dict(zip(names, result, strict=True)) for result in results]))
        return 0
    print(f"{'kind':10}{'seed':>6}  {'report names':14}{'baseline names':16}{'episodes':>8}")
    for kind, seed, culprit, baseline, episodes in results:
        print(f"{kind:10}{seed:>6}  {culprit or '-':14}{baseline or '-':16}{episodes:>8}")
    right = {
        kind: [
            (culprit == wanted, baseline == wanted)
            for k, _, culprit, baseline, _ in results
            if k == kind
            for wanted in [PLANTED if kind == "planted" else None]
        ]
        for kind in KINDS
    }
    for kind, pairs in right.items():
        ours, theirs = (sum(column) for column in zip(*pairs, strict=True))
        print(f"{kind}: report right in {ours} of {len(pairs)}, baseline in {theirs}")
    print(f"took {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
