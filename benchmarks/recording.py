"""What recording adds to training, interleaved with the bare loop.

Loader: batches of token samples in memory, taken one after the other, bare and audited in turn: the
worst case, for nothing else uses the cores. *Training thread*: what taking a batch off the loader
costs there beyond the bare loader, and of that the ledger: noting the batch, apart from the tag
that the loader made. With a step of 20 ms the rest of the recording hides beside it or does not.
Recorder: text scored per second by one background core; memory over a million batches.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from auditor import AuditedSampler
from auditor.demo.corpus import WEIGHTS, text_of
from auditor.measure.compact import compact

STEP_S = 0.02


class Timed:
    """Iterates a loader; microseconds the training thread spent in each ``next``."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.taken: list[float] = []
        self._a = torch.randn(256, 256)

    def run(self, loader: Any) -> None:
        batches = iter(loader)
        while True:
            begun = time.perf_counter()
            if next(batches, None) is None:
                return
            self.taken.append((time.perf_counter() - begun) * 1e6)
            while time.perf_counter() - begun < self.step_s:
                self._a @ self._a

    def __str__(self) -> str:
        return f"{np.median(self.taken):6.0f} (p99 {np.percentile(self.taken, 99):6.0f})"


def loader_cost(
    batch_size: int, duplication: bool, workers: int, step_s: float, rounds: int, folder: Path
) -> None:
    """Microseconds per batch on the training thread, bare and audited in turn."""
    n_batches = 100
    data = TensorDataset(torch.randint(0, 50_000, (batch_size * n_batches, 128)))
    bare, audited, noted = Timed(step_s), Timed(step_s), []
    size = 0

    def loader() -> DataLoader:
        return DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=workers)

    for turn in range(rounds):
        bare.run(loader())
        run = folder / f"{batch_size}-{duplication}-{workers}-{step_s}-{turn}"
        wrapped = AuditedSampler(loader(), run=run, duplication=duplication)
        note = wrapped._note_delivered

        def timed(*args: Any, note: Any = note) -> None:
            begun = time.perf_counter()
            note(*args)
            noted.append((time.perf_counter() - begun) * 1e6)

        wrapped._note_delivered = timed  # type: ignore[method-assign]
        audited.run(wrapped)
        wrapped.close()
        size += sum(file.stat().st_size for file in run.glob("exposures/**/*.ledger"))
    what = "scores" if duplication else "ids"
    extra = np.median(audited.taken) / np.median(bare.taken) - 1
    print(
        f"batch {batch_size:>4}, {workers} workers, {what:6}, step {step_s * 1e3:2.0f} ms: "
        f"bare {bare} us, audited {audited} us, {extra:+4.0%}; "
        f"ledger {np.median(noted):3.0f} (p99 {np.percentile(noted, 99):4.0f}) us; "
        f"{size / (rounds * n_batches * batch_size):.2f} bytes a sample"
    )


def bytes_per_sample(folder: Path) -> None:
    """On disk, with indices out of a billion, every seventh sample a repeat of a recent one."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 10**9, (200, 256), generator=generator)
    tokens = torch.randint(0, 50_000, (200, 256, 64), generator=generator)
    tokens[1:, ::7] = tokens[:-1, ::7]
    for duplication in (False, True):
        run = folder / f"bytes-{duplication}"
        audited = AuditedSampler(run=run, duplication=duplication)
        for number, (ids, batch) in enumerate(zip(indices, tokens, strict=True)):
            audited.record(ids, batch)
            if number % 50 == 49:
                audited.flush()  # nothing may go unscored here
        audited.close()
        sizes = {
            table: sum(f.stat().st_size for f in run.glob(f"{table}/**/*.ledger")) / indices.numel()
            for table in ("exposures", "samples")
        }
        print(
            f"{'ids and scores' if duplication else 'ids'} of a billion samples: "
            f"{sizes['exposures']:.2f} bytes an exposure, {sizes['samples']:.2f} once a sample"
        )


def scoring_rate() -> None:
    """Megabytes of real text that one core sketches and scores per second."""
    whole = "".join(text_of(source) for source in WEIGHTS)
    texts = [whole[begin : begin + 2000] for begin in range(0, len(whole), 2000)]
    n_bytes = sum(len(text.encode()) for text in texts)
    compact(texts[:4])
    rates = []
    for _ in range(5):
        begun = time.thread_time()
        compact(texts)
        rates.append(n_bytes / 1e6 / (time.thread_time() - begun))
    print(f"sketches: {statistics.median(rates):.0f} MB of text a second and core")


def flat_memory(n_batches: int, folder: Path) -> None:
    """Resident memory of a long run of small batches."""

    def batches() -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(0, 50_000, (8, 32), generator=generator)

    audited = AuditedSampler(batches(), run=folder / "long")
    for number, _ in enumerate(audited, start=1):
        if number % (n_batches // 5) == 0:
            kilobytes = int(Path("/proc/self/statm").read_text().split()[1]) * 4
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(
                f"{number:>9} batches: {kilobytes / 1024:.0f} MB resident, peak {peak / 1024:.0f}"
            )
        if number == n_batches:
            break
    unscored = audited._open().counts["unscored_samples"]
    audited.close()
    print(f"{unscored / (8 * n_batches):.1%} of samples left unscored at full speed")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=1_000_000, help="of the long run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for batch_size in (32, 256, 1024):
            for duplication in (False, True):
                for workers, step_s in ((0, 0.0), (0, STEP_S), (2, STEP_S)):
                    loader_cost(batch_size, duplication, workers, step_s, arguments.rounds, folder)
        bytes_per_sample(folder)
        scoring_rate()
        flat_memory(arguments.batches, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
