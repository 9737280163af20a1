"""One training run of the demo, audited the way a user's own loop would be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from auditor.demo.corpus import BATCH_SAMPLES, WINDOW_BYTES, Corpus, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.record.monitor import GradeMonitor
from auditor.record.sampler import AuditedSampler

EVERY: Final = 5
LEARNING_RATE: Final = 2e-3
WARMUP_STEPS: Final = 20

SPIKE_FACTOR: Final = 10.0
SPIKE_STEPS: Final = 20


@dataclass(frozen=True)
class Progress:
    """What the display shows after a step; ``alert`` is empty before the first grade."""

    step: int
    loss: float
    grade: int | None
    alert: str


def train(
    dataset: Any,
    sampler: Iterable[int],
    corpus: Corpus,
    run: Path,
    *,
    steps: int,
    seed: int,
    lr_spike_step: int | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> nn.Module:
    """Train a small GPT for ``steps`` updates on the samples that the sampler draws.

    With ``lr_spike_step`` the learning rate is ten times as high for 20 steps: an event that no
    data caused.
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig(n_positions=WINDOW_BYTES - 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: _rate(s, lr_spike_step))

    plain = DataLoader(dataset, batch_size=BATCH_SAMPLES, sampler=sampler, collate_fn=collate)
    loader = AuditedSampler(plain, run=run)
    monitor = GradeMonitor(
        model, run=run, every=EVERY, probe=corpus.probe, probe_loss=next_byte_loss
    )
    for step, batch in enumerate(loader):
        loss = next_byte_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.step(loss, optimizer=optimizer, grad_norm=grad_norm)
        optimizer.step()
        schedule.step()
        grade = monitor.grade
        progress(
            Progress(
                step,
                loss.item(),
                None if grade is None else grade.grade,
                "" if grade is None else grade.alert,
            )
        )
        if step + 1 == steps:
            break
    monitor.close()
    return model


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: Tensor) -> float:
    """Mean loss in nats per byte on int64 [N, WINDOW_BYTES]."""
    model.eval()
    return float(next_byte_loss(model, held_out))


def _rate(step: int, spike_step: int | None) -> float:
    rate = min(1.0, (step + 1) / WARMUP_STEPS)
    if spike_step is not None and spike_step <= step < spike_step + SPIKE_STEPS:
        rate *= SPIKE_FACTOR
    return rate
