"""One rank of a distributed training, run as a program by the tests of several ranks.

    python ranks.py RUN LOG RANK WORLD_SIZE [--die-at STEP] [--undivided]

Writes what the rank received, one JSON line per step, to LOG.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from pathlib import Path

import torch
from documents import Documents
from torch.utils.data import DataLoader, DistributedSampler

from auditor import AuditedSampler, GradeMonitor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--undivided", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{arguments.log.parent / 'meeting-point'}",
        rank=arguments.rank,
        world_size=arguments.world_size,
    )
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(1000, 16),
        torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False),
    )
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-9)
    dataset = Documents(71)  # not a multiple of ranks and batches: the sampler pads
    sampler = None if arguments.undivided else DistributedSampler(dataset, shuffle=True, seed=3)
    loader = AuditedSampler(
        DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2), run=arguments.run
    )
    monitor = GradeMonitor(parallel, run=arguments.run, every=3)
    step = 0
    with arguments.log.open("w") as log:
        for epoch in range(2):
            if sampler is not None:
                loader.sampler.set_epoch(epoch)
            for batch in loader:
                optimizer.zero_grad()
                loss = parallel(batch["input_ids"]).square().mean()
                loss.backward()
                monitor.step(loss, optimizer=optimizer)
                optimizer.step()
                log.write(json.dumps({"step": step, "ids": batch["id"]}) + "\n")
                log.flush()
                if step == arguments.die_at:
                    loader.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                step += 1
    monitor.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
