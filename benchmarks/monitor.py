"""What the monitor costs, and its ranks against ``torch.linalg.svdvals`` of the same sites.

Steps of a model of 23M parameters are timed in turn: without the monitor, with it but not sampled,
and sampled (live and probe, all layers). The work beside the training thread is paid for by the
steps that it runs beside: sampled steps are charged with whatever their period took beyond the
ordinary ones. Ranks: real activations of models that were trained a little on real text, all
positions by ``svdvals`` in float32, against 512 positions by the monitor's own function; errors
against a float64 SVD of all positions.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from auditor import GradeMonitor
from auditor.demo.corpus import WEIGHTS, text_of
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.measure.spectrum import rank_ratio, rank_ratio_of_values, spectrum, variant_of
from auditor.record.capture import N_ROWS

PERIOD = 12
"""Steps between samples in the timed loop; the cost at every=200 is computed from it."""


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
        begun = time.perf_counter()
        loss = next_byte_loss(self.model, self.batch)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if monitor is not None:
            monitor.step(loss, optimizer=self.optimizer, grad_norm=norm)
        self.optimizer.step()
        return time.perf_counter() - begun


def step_cost(rounds: int, folder: Path) -> None:
    config = GPTConfig(width=512, n_heads=8, n_blocks=7, n_positions=128, n_vocabulary=1024)
    loop = Loop(config, batch_size=8)
    n_parameters = sum(parameter.numel() for parameter in loop.model.parameters())
    monitor = GradeMonitor(
        loop.model, run=folder / "run", every=PERIOD, budget=0.0,
        probe=real_windows(8, config.n_positions + 1, seed=2), probe_loss=next_byte_loss,
    )  # fmt: skip
    bare, monitored, sampled = [], [], []
    for _ in range(3):
        loop.step(None)
    for _ in range(rounds):
        monitor._live.disarm()
        bare += [loop.step(None) for _ in range(PERIOD)]
        monitor._live.arm()
        period = [loop.step(monitor) for _ in range(PERIOD)]
        sampled.append(period[0])
        monitored.append(period[1:])
        monitor.flush()
    monitor.close()
    ordinary = float(np.median(bare))
    late = float(np.median([step for period in monitored for step in period[PERIOD // 2 :]]))
    beside = float(np.median([sum(period) - len(period) * ordinary for period in monitored]))
    own = float(np.median(sampled)) - ordinary
    whole = own + max(0.0, beside)
    print(
        f"{n_parameters / 1e6:.0f}M parameters, {len(monitor.sites)} blocks, step "
        f"{ordinary * 1e3:.0f} ms\n"
        f"unsampled step: {late / ordinary - 1:+.1%} (of medians, noise included)\n"
        f"sampled step: {(own + ordinary) / ordinary:.2f} ordinary steps on the training thread, "
        f"{(whole + ordinary) / ordinary:.2f} with the analysis beside the steps that follow\n"
        f"at every=200: {whole / (200 * ordinary):.2%} of the time"
    )


def timed(work: object, n: int) -> float:
    assert callable(work)
    work()
    spent = []
    for _ in range(n):
        begun = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begun)
    return float(np.median(spent))


def rank_cost(width: int, n_blocks: int, steps: int, batch_size: int) -> None:
    """Time and error of the rank ratios of every block, at a width."""
    loop = Loop(
        GPTConfig(width=width, n_heads=width // 64, n_blocks=n_blocks, n_positions=256), batch_size
    )
    for _ in range(steps):
        loop.step(None)
    errors: dict[str, list[float]] = {}
    exact_s, own_s, n_positions = [], [], 0
    outputs: list[torch.Tensor] = []
    for block in loop.model.blocks:
        block.register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
    for seed in (3, 4):
        outputs.clear()
        with torch.no_grad():
            loop.model(real_windows(4096 // 256, 256, seed))
        for output in outputs:
            rows = output.flatten(0, 1)
            n_positions = len(rows)
            sample = rows[torch.arange(N_ROWS) * len(rows) // N_ROWS].numpy()
            exact_s.append(timed(lambda rows=rows: torch.linalg.svdvals(rows), 1))
            own_s.append(timed(lambda sample=sample: spectrum(sample).ratio(), 3))
            for variant in ("raw", "centred", "column"):
                matrix = torch.from_numpy(variant_of(rows.numpy(), variant))
                gram = matrix.T @ matrix  # exact enough in float64, and there is time for it
                values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0).numpy()
                exact = rank_ratio_of_values(
                    values, shape=tuple(matrix.shape), centred=variant == "centred"
                )
                error = abs(rank_ratio(sample, variant) - exact)
                errors.setdefault(variant, []).append(error)
    ratio = np.median(exact_s) / np.median(own_s)
    told = "; ".join(
        f"{variant} {np.median(found):.4f} (at most {max(found):.4f})"
        for variant, found in errors.items()
    )
    print(
        f"[{n_positions}, {width}]: svdvals {np.median(exact_s) * 1e3:.0f} ms, ours "
        f"{np.median(own_s) * 1e3:.1f} ms: {ratio:.0f} times cheaper; error of the ratio: {told}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        step_cost(arguments.rounds, Path(folder))
    rank_cost(768, n_blocks=4, steps=40, batch_size=4)
    rank_cost(2048, n_blocks=2, steps=12, batch_size=2)


if __name__ == "__main__":
    main()
