"""Which rank ratio makes a grade? Candidates on real small trainings, healthy and not.

The lowest block's token rank of the probe (k = 20), in six forms: raw, centred, each with rows
normalised, and with columns divided by their root mean square (raw and centred); each for the model
as it is and with three outlying dimensions added to its activations, as large models have them. A
form can be graded on an absolute scale only if both stay at S5 or better after the warm-up.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from auditor.clean.mixes import MixSampler
from auditor.demo import training
from auditor.demo.corpus import BATCH_SAMPLES, WEIGHTS, ShardRows, build
from auditor.demo.story import STEPS
from auditor.measure.spectrum import rank_ratio
from auditor.record.capture import capturing
from auditor.record.sites import find_blocks

SHOWN = (20, 60, 100, 140, 180, 220, 240, 260, 280, 300, 340, 380, 415)


def forms(rows: np.ndarray) -> dict[str, float]:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return {
        "raw": rank_ratio(rows, "raw"),
        "centred": rank_ratio(rows, "centred"),
        "rows normalised": rank_ratio(unit, "raw"),
        "rows normalised, centred": rank_ratio(unit, "centred"),
        "column": rank_ratio(rows, "column"),
        "column, centred": rank_ratio(rows - rows.mean(axis=0), "column"),
    }


def outlying(rows: np.ndarray) -> np.ndarray:
    """A dimension that is large everywhere, one that varies widely, one large at one position."""
    changed = rows.copy()
    scale = np.sqrt((rows**2).mean())
    changed[:, 3] += 40 * scale
    changed[:, 7] *= 30
    changed[::64, 11] += 100 * scale
    return changed


def one_run(kind: str, seed: int, folder: Path) -> dict[str, dict[int, float]]:
    corpus = build(folder / "data", seed=seed, steps=STEPS, plant=kind == "planted")
    rows = ShardRows(corpus.shards)
    sampler = MixSampler(rows.sources, WEIGHTS, seed, STEPS * BATCH_SAMPLES)
    table: dict[str, dict[int, float]] = {}
    step_now = iter(range(STEPS))
    original = training.next_byte_loss

    def measured(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """The training loss, looking at the probe first on the steps that are shown."""
        if model.training and next(step_now) in SHOWN:
            step = SHOWN[len(next(iter(table.values()), {}))]
            sites = find_blocks(model)
            with torch.no_grad(), capturing(sites, _fail) as captured:
                original(model.eval(), corpus.probe)
            model.train()
            blocks = [captured.positions[site.layer].numpy() for site in sites]
            for prefix, change in (("", lambda x: x), ("outliers: ", outlying)):
                values = [forms(change(block)) for block in blocks]
                for name in values[0]:
                    lowest = min(value[name] for value in values)
                    table.setdefault(prefix + name, {})[step] = lowest
        return original(model, batch)

    training.next_byte_loss = measured
    try:
        spike = 240 if kind == "lr spike" else None
        training.train(
            rows, sampler, corpus, folder / "run", steps=STEPS, seed=seed, lr_spike_step=spike
        )
    finally:
        training.next_byte_loss = original
    return table


def _fail(place: str, error: Exception) -> None:
    raise RuntimeError(place) from error


def main() -> int:
    torch.set_num_threads(1)
    for kind in ("clean", "planted", "lr spike"):
        with tempfile.TemporaryDirectory() as folder:
            table = one_run(kind, 50, Path(folder))
        print(f"\n{kind:36}" + " ".join(f"{step:>4}" for step in SHOWN))
        for name, values in table.items():
            print(f"{name:36}" + " ".join(f"{values[step]:4.2f}" for step in SHOWN))
    return 0


if __name__ == "__main__":
    sys.exit(main())
