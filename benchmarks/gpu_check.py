"""On a GPU: no synchronisation on unsampled steps, overhead, and grades that equal the CPU's.

Under 8 minutes on one device. Without a GPU it says so and does nothing.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from auditor import AuditedSampler, GradeMonitor
from auditor.demo.model import GPT, GPTConfig, next_byte_loss

EVERY = 50
TOLERANCE = 0.01
"""Difference of a ratio between the devices, in float32."""


def train(
    model: GPT, batches: torch.Tensor, run: Path | None, *, strict: bool = False
) -> tuple[GradeMonitor | None, float]:
    """Train on the batches; seconds for the whole of them. ``strict``: unsampled steps must not
    synchronise, by ``torch.cuda.set_sync_debug_mode``."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    monitor = sampler = None
    if run is not None:
        sampler = AuditedSampler(run=run, optimizer=optimizer, duplication=False)
        monitor = GradeMonitor(
            model, run=run, every=EVERY, budget=0.0,
            probe=batches[0][:8].to(device), probe_loss=next_byte_loss,
        )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for step, batch in enumerate(batches):
        ids = batch.to(device, non_blocking=True)
        if sampler is not None:
            sampler.record(range(step * len(batch), (step + 1) * len(batch)))
        loss = next_byte_loss(model, ids)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        checked = strict and step % EVERY not in (0, EVERY - 1)
        if checked:
            torch.cuda.set_sync_debug_mode("error")
        if monitor is not None:
            monitor.step(loss, optimizer=optimizer, grad_norm=norm)
        if checked:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    spent = time.perf_counter() - begun
    if monitor is not None:
        monitor.close()
        if monitor._recorder.failures:
            print(f"failures: {dict(monitor._recorder.failures)}")
    return monitor, spent


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: not run")
        return 0
    print(torch.cuda.get_device_name(), torch.__version__)
    config = GPTConfig(width=1024, n_heads=16, n_blocks=12, n_positions=512)
    torch.manual_seed(0)
    model = GPT(config)
    batches = torch.randint(0, 256, (400, 16, 513)).pin_memory()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few = batches[:2]
        ratios = {}
        for device in ("cpu", "cuda"):
            monitor, _ = train(copy.deepcopy(model).to(device), few[:, :4], folder / device)
            assert monitor is not None
            ratios[device] = [grade.ratio for grade in monitor.grades]
        difference = float(np.abs(np.subtract(ratios["cpu"], ratios["cuda"])).max())
        print(f"graded ratio, CPU against GPU: {difference:.4f} apart (at most {TOLERANCE})")
        on_gpu = model.to("cuda")
        train(copy.deepcopy(on_gpu), batches[:20], None)  # warm
        train(copy.deepcopy(on_gpu), batches[:120], folder / "strict", strict=True)
        print("unsampled steps: no synchronisation")
        spent: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(3):
            for monitored in (False, True):
                run = folder / f"turn-{turn}" if monitored else None
                spent[monitored].append(train(copy.deepcopy(on_gpu), batches, run)[1])
        bare, audited = (float(np.median(spent[key])) for key in (False, True))
        extra = audited - bare
        samples = len(batches) / EVERY
        step_s = bare / len(batches)
        print(
            f"step {step_s * 1e3:.1f} ms; monitored {audited / bare - 1:+.2%} at every={EVERY}: "
            f"{extra / samples / step_s:.1f} steps a sample, {extra / samples / step_s / 200:.2%} "
            "at every=200"
        )
        peak = torch.cuda.max_memory_allocated() / 2**20
        print(f"peak memory {peak:.0f} MiB")
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
