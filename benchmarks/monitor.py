"""What the monitor costs, and its ranks against ``torch.linalg.svdvals`` of the same sites.

Steps of a model of 23M parameters are measured in turn: without the monitor, with it but not
sampled, and sampled (live and probe, all layers). CPU time of the training thread, and of the whole
process until the sample is analysed; the best of the rounds, each beside its own baseline.

Ranks: real activations of models that were trained on real text, for a few steps and for more. All
positions by ``svdvals`` in float32 on one thread, against 512 positions by the monitor's own
functions; errors against all positions in float64.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from auditor import GradeMonitor
from auditor.demo.corpus import WEIGHTS, text_of
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.measure.spectrum import (
    VARIANTS,
    Forms,
    rank_ratio,
    rank_ratio_of_values,
    singular_values_of_gram,
    variant_of,
)
from auditor.record.capture import N_ROWS, sampled_rows

PERIOD = 12
"""Steps between samples in the timed loop; the cost at every=200 is computed from it."""

N_POSITIONS = (4096, 8192)
T = 256


def real_windows(n: int, length: int, seed: int) -> torch.Tensor:
    """Windows int64 [n, length] of the demo's real text."""
    text = "".join(text_of(source) for source in WEIGHTS).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(
        0, len(data) - length, (n,), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([data[start : start + length] for start in starts])


class Loop:
    """A training loop whose steps are timed one by one."""

    def __init__(self, config: GPTConfig, batch_size: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.batch = real_windows(batch_size, config.n_positions + 1, seed=1)

    def step(self, monitor: GradeMonitor | None) -> float:
        """CPU seconds that the step took on this thread."""
        begun = time.thread_time()
        loss = next_byte_loss(self.model, self.batch)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if monitor is not None:
            monitor.step(loss, optimizer=self.optimizer, grad_norm=norm)
        self.optimizer.step()
        return time.thread_time() - begun


def step_cost(rounds: int, folder: Path) -> None:
    config = GPTConfig(width=512, n_heads=8, n_blocks=7, n_positions=128, n_vocabulary=1024)
    loop = Loop(config, batch_size=8)
    n_parameters = sum(parameter.numel() for parameter in loop.model.parameters())
    monitor = GradeMonitor(
        loop.model, run=folder / "run", every=PERIOD, budget=0.0,
        probe=real_windows(8, config.n_positions + 1, seed=2), probe_loss=next_byte_loss,
    )  # fmt: skip
    monitor._live.disarm()
    for _ in range(3):
        loop.step(None)
    unsampled, sampled, whole, ordinary_s = [], [], [], []
    for _ in range(rounds):
        monitor._live.disarm()
        ordinary = min(loop.step(None) for _ in range(PERIOD))
        monitor._live.arm()
        begun, thread_begun = time.process_time(), time.thread_time()
        first = loop.step(monitor)
        monitor.flush()
        beside = time.process_time() - begun - (time.thread_time() - thread_begun)
        rest = min(loop.step(monitor) for _ in range(PERIOD - 1))
        ordinary_s.append(ordinary)
        unsampled.append(rest / ordinary)
        sampled.append(first / ordinary)
        whole.append((first + beside) / ordinary)
    monitor.close()
    cost = min(whole)
    print(
        f"{n_parameters / 1e6:.0f}M parameters, {len(monitor.sites)} blocks, step "
        f"{min(ordinary_s) * 1e3:.0f} ms of CPU\n"
        f"unsampled step: {np.median(unsampled) - 1:+.1%} (noise included)\n"
        f"sampled step: {min(sampled):.2f} ordinary steps on the training thread, "
        f"{cost:.2f} with the analysis beside it\n"
        f"at every=200: {(cost - 1) / 200:.2%} of the time"
    )


def timed(work: Callable[[], object], n: int) -> float:
    """CPU seconds on this thread, the best of n."""
    spent = []
    for _ in range(n):
        begun = time.thread_time()
        work()
        spent.append(time.thread_time() - begun)
    return min(spent)


def all_ranks(sample: np.ndarray) -> None:
    """What a block costs: the three ratios, and the whole spectrum of one form."""
    forms = Forms(sample)
    forms.spectrum("raw")
    forms.ratio("centred"), forms.ratio("column")


def exact_ratio(rows: np.ndarray, variant: str) -> float:
    """Of all rows, in float64."""
    matrix = variant_of(rows, variant)
    values = singular_values_of_gram(matrix.T @ matrix)
    centred = variant == "centred"
    return rank_ratio_of_values(values, shape=(len(rows), rows.shape[1]), centred=centred)


def rank_cost(width: int, n_blocks: int, steps: Sequence[int], batch_size: int) -> None:
    """Time and error of the rank ratios of every block, at a width and after so many steps."""
    config = GPTConfig(width=width, n_heads=width // 64, n_blocks=n_blocks, n_positions=T)
    loop = Loop(config, batch_size)
    outputs: list[torch.Tensor] = []
    n_done = 0
    for n_steps in steps:
        while n_done < n_steps:
            loop.batch = real_windows(batch_size, T + 1, seed=1000 + n_done)
            loop.step(None)
            n_done += 1
        hooks = [
            block.register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
            for block in loop.model.blocks
        ]
        for n_positions in N_POSITIONS:
            errors: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            outputs.clear()
            with torch.no_grad():
                loop.model(real_windows(n_positions // T, T, seed=3))
            exact_s = one_s = all_s = math.inf
            for number, output in enumerate(outputs):
                rows = output.flatten(0, 1)
                sample = sampled_rows(rows, N_ROWS).numpy()
                if number == 0:  # decomposing them all takes a long time
                    exact_s = timed(lambda rows=rows: torch.linalg.svdvals(rows), 1)
                one_s = min(one_s, timed(lambda sample=sample: rank_ratio(sample), 5))
                all_s = min(all_s, timed(lambda sample=sample: all_ranks(sample), 5))
                for variant, found in errors.items():
                    exact = exact_ratio(rows.numpy(), variant)
                    found.append(abs(rank_ratio(sample, variant) - exact))
            told = "; ".join(
                f"{variant} {np.median(found):.4f} (at most {max(found):.4f})"
                for variant, found in errors.items()
            )
            print(
                f"[{n_positions}, {width}] after {n_steps} steps: svdvals {exact_s * 1e3:.0f} ms, "
                f"one ratio {one_s * 1e3:.1f} ms: {exact_s / one_s:.0f} times cheaper; all ranks "
                f"of a block {all_s * 1e3:.1f} ms; error of the ratio: {told}",
                flush=True,
            )
        for hook in hooks:
            hook.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100, help="of the longer trainings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        step_cost(arguments.rounds, Path(folder))
    rank_cost(768, n_blocks=4, steps=(40, arguments.steps), batch_size=2)
    rank_cost(2048, n_blocks=2, steps=(12, arguments.steps), batch_size=1)


if __name__ == "__main__":
    main()
