"""A training to be killed at any moment and begun again, run as a program by the tests.

    python killed.py RUN CHECKPOINT N_STEPS

Says what it received, one JSON line per step, on standard output.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from documents import Documents
from torch.utils.data import DataLoader

from auditor import AuditedSampler

BATCH, EVERY = 4, 7


def main(run: str, checkpoint: str, n_steps: int) -> None:
    saved = Path(checkpoint)
    first = json.loads(saved.read_text())["step"] if saved.exists() else 0
    order = torch.randperm(n_steps * BATCH, generator=torch.Generator().manual_seed(0)).tolist()
    model = torch.nn.Linear(48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = AuditedSampler(
        DataLoader(
            Documents(n_steps * BATCH),
            batch_size=BATCH,
            sampler=order[first * BATCH :],
            num_workers=2,
            prefetch_factor=4,
        ),
        run=run,
        optimizer=optimizer,
        start_step=first,
    )
    for step, batch in enumerate(loader, start=first):
        model(batch["input_ids"].float()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step, "ids": batch["id"]}), flush=True)
        if step % EVERY == EVERY - 1:
            loader.flush()  # what a checkpoint stands on must be on disk before it
            saved.with_suffix(".new").write_text(json.dumps({"step": step + 1}))
            saved.with_suffix(".new").rename(saved)
        time.sleep(0.005)
    loader.close()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
