"""The trainings of ``detection.py``: one small GPT, real text, a fault from some step on, or none.

A training of one seed draws the same batches with and without a fault, so that the two can be
compared step by step. Each is recorded by a live ``GradeMonitor``; what detectors may look at is
kept as one JSON file per training.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor import GradeMonitor, Run
from auditor.demo.corpus import BATCH_SAMPLES, WINDOW_BYTES, encode, text_of
from auditor.demo.model import GPT, Attention, GPTConfig, next_byte_loss
from auditor.record.qk_norm import QKNorm

VERSION: Final = 1
"""Of the recorded files: raised when a training would come out differently."""

STEPS: Final = 420
EVERY: Final = 5
ONSETS: Final = (200, 260)
LEARNING_RATE: Final = 2e-3
WARMUP_STEPS: Final = 20
WEIGHTS: Final = {"novels": 0.4, "speeches": 0.3, "peps": 0.2, "statutes": 0.1}

FAULTS: Final[Mapping[str, str]] = {
    "lr ramp": "learning rate doubles every 20 steps until the end",
    "lr ramp, QK norm": "the same, with normalised queries and keys",
    "lr jump": "learning rate x10 for 20 steps; no precursor",
    "burst": "60% of the rows from 4 passages for 60 steps",
    "poisoning": "the same share growing from 0 to 60% over 150 steps",
    "duplicates": "60% of the rows from 4 passages until the end",
    "overflow": "a residual stream stored as float16, scaled x2 every 2 steps; no precursor",
    "dead heads": "queries and keys of block 0 grow to x30 each over 100 steps",
}
NO_PRECURSOR: Final = ("lr jump", "overflow")
CLEAN: Final[Mapping[str, str]] = {
    "constant": "learning rate constant after the warm-up; also the paired run of the faults",
    "cosine": "learning rate decays to a tenth, half a cosine",
    "epochs": "1,600 rows again and again, 100 steps an epoch",
    "switch": "novels from 70% to 10% of the rows, speeches from 10% to 70%",
}
PAIRED: Final = dict.fromkeys(FAULTS, "constant") | {"lr ramp, QK norm": "constant, QK norm"}

REPEATED_SHARE: Final = 0.6
REPEATED_PASSAGES: Final = 4
EPOCH_ROWS: Final = 1600
SWITCHED: Final = (
    {"novels": 0.7, "speeches": 0.1, "peps": 0.1, "statutes": 0.1},
    {"novels": 0.1, "speeches": 0.7, "peps": 0.1, "statutes": 0.1},
)
HELD_OUT: Final = 6
"""Windows per source that decide about harm; eight more per source are the monitor's probe."""
HELD_OUT_FROM: Final = min(ONSETS) - EVERY

KEPT: Final = {
    "token_rank", "sample_rank", "value_rank", "entropy", "entropy_mean", "max_logit", "probe_loss",
    "memorisation", "heads_fallen", "non_finite",
}  # fmt: skip
"""Signals that alerts are made of."""


@dataclass(frozen=True)
class Training:
    """A recorded training. ``held_out``: loss by step, every 5 steps from step 195 on.

    ``rows``: by sampled step, rows as the monitor had them; ``alerts``: step, level, signal, live.
    """

    kind: str
    seed: int
    onset: int
    loss: np.ndarray
    grad_norm: np.ndarray
    held_out: Mapping[int, float]
    rows: Mapping[int, list[dict[str, Any]]]
    alerts: list[tuple[int, str, str]]


def path_of(folder: Path, kind: str, seed: int, steps: int, every: int) -> Path:
    name = f"{kind}-{seed}".replace(", ", "-").replace(" ", "-")
    return folder / f"v{VERSION}-{steps}-every{every}" / f"{name}.json"


def load(path: Path) -> Training:
    """Raises ``OSError`` where the training has not been recorded."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    names = kept["columns"]
    return Training(
        kept["kind"],
        kept["seed"],
        kept["onset"],
        np.asarray(kept["loss"], np.float64),
        np.asarray(kept["grad_norm"], np.float64),
        {int(step): value for step, value in kept["held_out"].items()},
        {
            int(step): [dict(zip(names, row, strict=True)) for row in rows]
            for step, rows in kept["rows"].items()
        },
        [(step, level, signal) for step, level, signal in kept["alerts"]],
    )


def record(folder: Path, kind: str, seed: int, steps: int, every: int) -> Path:
    """Train once and keep the record; a training that is there already is not repeated."""
    path = path_of(folder, kind, seed, steps, every)
    if path.exists():
        return path
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as run:
        kept = _train(Path(run), kind, seed, steps, every)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(kept), encoding="utf-8")  # NaN and Infinity as Python reads them
    part.replace(path)
    return path


def onset_of(seed: int, steps: int) -> int:
    """The step from which a seed's faults act; earlier in a training too short for it."""
    low, high = ONSETS
    return min(int(np.random.default_rng([seed, 1]).integers(low, high + 1)), steps - 60)


def _train(run: Path, kind: str, seed: int, steps: int, every: int) -> dict[str, Any]:
    text = _text(seed)
    onset = onset_of(seed, steps)
    batches = _batches(kind, text, seed, steps, onset)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(n_positions=WINDOW_BYTES - 1))
    if kind.endswith("QK norm"):
        for block in model.blocks:
            block.attention = _NormalisedAttention(block.attention, model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    gain = torch.ones(())
    if kind == "overflow":
        model.blocks[0].register_forward_hook(lambda _, __, x: (x * gain).half().float() / gain)
    monitor = GradeMonitor(
        model, run=run / "run", every=every, probe=text.probe, probe_loss=next_byte_loss
    )
    held_out = {}
    for step, batch in enumerate(batches):
        rate = LEARNING_RATE * _rate(kind, step, steps, onset)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if kind == "overflow" and step >= onset:
            gain.fill_(2.0 ** min(100, 1 + (step - onset) // 2))
        loss = next_byte_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.step(loss, optimizer=optimizer, grad_norm=norm)
        if step % EVERY == 0 and step >= min(HELD_OUT_FROM, onset - EVERY):
            with torch.no_grad():  # of the same weights as the probe
                held_out[step] = float(next_byte_loss(model, text.held_out))
        optimizer.step()
        if kind == "dead heads" and onset <= step < onset + 100:
            _grow(model.blocks[0].attention.qkv, 30.0 ** (1 / 100))
    monitor.flush()
    monitor.close()
    alerts = [(alert.step, alert.level, alert.signal) for alert in monitor.alerts]
    return {"kind": kind, "seed": seed, "onset": onset, "held_out": held_out, "alerts": alerts} | (
        _recorded(run / "run")
    )


def _recorded(run: Path) -> dict[str, Any]:
    signals = Run.open(run).scan("signals").collect()
    steps = signals.filter(pl.col("kind") == "step")
    series = {
        name: steps.filter(pl.col("signal") == name).sort("step")["value"].fill_null(math.nan)
        for name in ("loss", "grad_norm")
    }
    columns = ("kind", "layer", "head", "variant", "signal", "value")
    sampled = signals.filter(
        (pl.col("kind") != "step")
        & pl.col("signal").is_in(KEPT)
        & ((pl.col("signal") != "token_rank") | pl.col("variant").is_in(["raw", "column"]))
    ).with_columns(pl.col("value").fill_null(math.nan))
    rows = {
        int(str(step)): frame.select(columns).rows()
        for (step,), frame in sampled.group_by("step", maintain_order=True)
    }
    return {
        **{name: values.to_list() for name, values in series.items()},
        "columns": columns,
        "rows": rows,
    }


def _rate(kind: str, step: int, steps: int, onset: int) -> float:
    rate = min(1.0, (step + 1) / WARMUP_STEPS)
    if kind == "cosine":
        return rate * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    if kind.startswith("lr ramp") and step >= onset:
        return 2.0 ** ((step - onset) / 20)
    if kind == "lr jump" and onset <= step < onset + 20:
        return 10.0
    return rate


def _share(kind: str, step: int, onset: int) -> float:
    """Share of the rows that repeat the same passages."""
    since = step - onset
    if since < 0 or (kind == "burst" and since >= 60):
        return 0.0
    if kind == "poisoning":
        return REPEATED_SHARE * min(1.0, since / 150)
    return REPEATED_SHARE if kind in ("burst", "duplicates") else 0.0


@dataclass(frozen=True)
class _Text:
    rows: Mapping[str, list[Tensor]]
    repeated: list[Tensor]
    held_out: Tensor
    probe: Tensor


def _text(seed: int) -> _Text:
    """Windows of each source in an order of the seed; held out, probe and training are disjoint."""
    rows, held_out, probe = {}, [], []
    for number, source in enumerate(WEIGHTS):
        windows = list(
            dict.fromkeys(
                passage[start : start + WINDOW_BYTES]
                for passage in text_of(source).encode().split(b"\n")
                for start in range(0, len(passage) - WINDOW_BYTES + 1, WINDOW_BYTES)
            )
        )
        order = np.random.default_rng([seed, 2, number]).permutation(len(windows))
        encoded = [encode(windows[n].decode("utf-8", "ignore")) for n in order[:8000]]
        held_out += encoded[:HELD_OUT]
        probe += encoded[HELD_OUT : HELD_OUT + 8]
        rows[source] = encoded[HELD_OUT + 8 :]
    repeated = [rows["novels"].pop() for _ in range(REPEATED_PASSAGES)]
    return _Text(rows, repeated, torch.stack(held_out), torch.stack(probe))


def _batches(kind: str, text: _Text, seed: int, steps: int, onset: int) -> list[Tensor]:
    """One int64 [BATCH_SAMPLES, WINDOW_BYTES] per step; repeated rows take the place of others."""
    draws, repeats = np.random.default_rng([seed, 3]), np.random.default_rng([seed, 4])
    sources = list(WEIGHTS)
    taken = dict.fromkeys(sources, 0)
    batches = []
    for step in range(steps):
        weights = SWITCHED[step >= onset] if kind == "switch" else WEIGHTS
        share = _share(kind, step, onset)
        rows = []
        for n in draws.choice(len(sources), BATCH_SAMPLES, p=[weights[s] for s in sources]):
            source = sources[n]
            pool = text.rows[source]
            size = round(EPOCH_ROWS * WEIGHTS[source]) if kind == "epochs" else len(pool)
            row = pool[taken[source] % size]
            taken[source] += 1
            if repeats.random() < share:
                row = text.repeated[repeats.integers(REPEATED_PASSAGES)]
            rows.append(row)
        batches.append(torch.stack(rows))
    return batches


class _NormalisedAttention(Attention):
    """The model's attention with QK norm; the weights are those it replaces."""

    def __init__(self, plain: Attention, config: GPTConfig) -> None:
        super().__init__(config)
        self.qkv, self.out = plain.qkv, plain.out
        self.qk_norm = QKNorm(config.width // config.n_heads)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, D // self.n_heads).permute(2, 0, 3, 1, 4)
        q, k = self.qk_norm(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


@torch.no_grad()
def _grow(qkv: nn.Linear, factor: float) -> None:
    """Queries and keys, the first two thirds of the rows."""
    n = qkv.out_features * 2 // 3
    qkv.weight[:n] *= factor
    qkv.bias[:n] *= factor
