"""A real training to be watched, killed and begun again, run as a program by the tests.

    python watched.py RUN CORPUS N_STEPS

Says the number of each step it made, one a line, on standard output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from auditor.clean.mixes import MixSampler
from auditor.demo.corpus import WEIGHTS, ShardRows, build
from auditor.demo.training import train


def main(run: str, corpus_folder: str, n_steps: int) -> None:
    torch.set_num_threads(1)
    corpus = build(Path(corpus_folder), seed=0, steps=n_steps, plant=True)
    rows = ShardRows(corpus.shards)
    train(
        rows,
        MixSampler(rows.sources, WEIGHTS, 0, n_steps * 16),
        corpus,
        Path(run),
        steps=n_steps,
        seed=0,
        progress=lambda progress: print(progress.step, flush=True),
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
