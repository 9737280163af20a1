"""One rank of a training with sharded parameters, run as a program by the tests of several ranks.

    python sharded.py RUN LOG RANK WORLD_SIZE [--monitor] [--fault]

Every forward runs collectives. With ``--fault`` rank 1 alone becomes suspicious, and fails in its
hooks and in its probe. Writes losses and final weights to LOG.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from auditor import GradeMonitor
from auditor.demo.model import GPT, GPTConfig, next_byte_loss

STEPS = 120


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("--monitor", action="store_true")
    parser.add_argument("--fault", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{arguments.log.parent / 'meeting-point'}",
        rank=arguments.rank,
        world_size=arguments.world_size,
    )
    mesh = torch.distributed.init_device_mesh("cpu", (arguments.world_size,))
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=32, width=32, n_heads=2))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    faulty = arguments.fault and arguments.rank == 1
    generator = torch.Generator().manual_seed(9)
    held_out = torch.randint(0, 256, (4, 33), generator=generator)
    probes = iter(range(1000))

    def probe() -> Any:
        if next(probes) == 1 and faulty:
            raise RuntimeError("the probe of rank 1")
        return held_out

    monitor = None
    if arguments.monitor:
        monitor = GradeMonitor(
            model, run=arguments.run, probe=probe, probe_loss=next_byte_loss, every=60, budget=1.0
        )
        if faulty:
            monitor._schedule.suspect(0)
    losses = []
    generator = torch.Generator().manual_seed(arguments.rank)
    for step in range(STEPS):
        if monitor is not None and faulty and step == 60:
            monitor._live._captured = "broken"  # type: ignore[assignment]
        loss = next_byte_loss(model, torch.randint(0, 256, (4, 33), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        if monitor is not None:
            monitor.step(loss, optimizer=optimizer)
        optimizer.step()
        losses.append(loss.item())
    weights = [parameter.full_tensor().flatten()[:5].tolist() for parameter in model.parameters()]
    failures = {}
    if monitor is not None:
        monitor.close()
        failures = dict(monitor._recorder.failures)
    found = {"losses": losses, "weights": weights, "failures": failures}
    arguments.log.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
