"""What recording and monitoring add to a training step, interleaved with the bare loop.

The recorder writes on its own thread; on two cores that thread competes with training, so the cost
is measured as whole epochs, audited and bare in turn, as well as on the training thread alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from auditor import AuditedSampler, GradeMonitor
from auditor.demo.model import GPT, GPTConfig, next_byte_loss


def loader_cost(batch_size: int, n_batches: int, rounds: int, folder: Path) -> None:
    """Microseconds per batch to iterate a loader over tensors in memory, bare and audited.

    With nothing to train the recorder's thread has no idle core to hide in: the worst case.
    """
    data = TensorDataset(torch.randint(0, 50_000, (batch_size * n_batches, 128)))
    bare: list[tuple[float, float]] = []
    audited: list[tuple[float, float]] = []
    for turn in range(rounds):
        plain = DataLoader(data, batch_size=batch_size)
        wrapped = AuditedSampler(
            DataLoader(data, batch_size=batch_size), run=folder / f"{batch_size}-{turn}"
        )
        for loader, times in ((plain, bare), (wrapped, audited)):
            begun = time.perf_counter(), time.thread_time()
            for _ in loader:
                pass
            ended = time.perf_counter(), time.thread_time()
            times.append(
                tuple((b - a) / n_batches * 1e6 for a, b in zip(begun, ended, strict=True))
            )
        wrapped.close()
    wall_bare, own_bare = (statistics.median(column) for column in zip(*bare, strict=True))
    wall, own = (statistics.median(column) for column in zip(*audited, strict=True))
    size = sum(f.stat().st_size for f in folder.glob(f"{batch_size}-0/exposures/**/*.ledger"))
    per_sample = size / (batch_size * n_batches)
    print(
        f"batch {batch_size:>4}: bare {wall_bare:5.0f} us, audited {wall:5.0f} us a batch; "
        f"CPU of the training thread {own_bare:5.0f} and {own:5.0f} us; "
        f"{per_sample:.1f} bytes a sample with scores"
    )


def monitor_cost(every: int, n_steps: int, rounds: int, folder: Path) -> None:
    """Seconds per epoch of a 7M-parameter model, bare and monitored."""
    config = GPTConfig(width=256, n_heads=8, n_blocks=8, n_positions=128)
    data = torch.randint(0, 256, (n_steps, 8, 129))
    probe = torch.randint(0, 256, (8, 129))
    totals: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds):
        for monitored in (False, True):
            torch.manual_seed(0)
            model = GPT(config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            monitor = None
            if monitored:
                run = folder / f"monitor-{every}-{turn}"
                monitor = GradeMonitor(
                    model, run=run, every=every, probe=probe, probe_loss=next_byte_loss
                )
            begun = time.perf_counter()
            for batch in data:
                optimizer.zero_grad()
                loss = next_byte_loss(model, batch)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if monitor is not None:
                    monitor.step(loss, optimizer=optimizer, grad_norm=norm)
                optimizer.step()
            if monitor is not None:
                monitor.flush()
            totals[monitored].append(time.perf_counter() - begun)
            if monitor is not None:
                monitor.close()
    bare, monitored_s = (statistics.median(totals[key]) for key in (False, True))
    extra = (monitored_s - bare) / bare
    n_samples = -(-n_steps // every)
    steps = (monitored_s - bare) / n_samples / (bare / n_steps)
    print(
        f"every {every:>3}: bare {bare:.2f} s, monitored {monitored_s:.2f} s: {extra:+.1%}; "
        f"a sampled step costs {steps:.1f} ordinary steps more, so {steps / 200:.2%} at every=200"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for batch_size in (32, 256, 1024):
            loader_cost(batch_size, 100, arguments.rounds, Path(folder))
        monitor_cost(10, 40, arguments.rounds, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
