"""The demo's corpus: four sources of real text as shards, with repeated content planted in one.

The planted fault is one that happens: from some row on, a source's shard holds the same few
passages again and again, as when a crawler is caught in a loop. Its share of the mix never
changes, so only what was consumed gives it away. A second source, the decoy, is made of repeated
passages from the first row to the last: as many repeats, none of them news.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import zstandard
from torch import Tensor
from torch.utils.data import Dataset

from auditor.clean.shards import find_shards

WINDOW_BYTES: Final = 65
"""Bytes in a sample: 64 to read and 64 to predict."""

BATCH_SAMPLES: Final = 16

PLANTED: Final = "novels"
DECOY: Final = "speeches"
WEIGHTS: Final[Mapping[str, float]] = {
    "novels": 0.56,
    "speeches": 0.34,
    "peps": 0.05,
    "statutes": 0.05,
}

PLANTED_PASSAGES: Final = 4
DECOY_PASSAGES: Final = 300
HELD_OUT_SAMPLES: Final = 64
"""Held out of each source; the probe is the first eighth of them."""


@dataclass(frozen=True)
class Corpus:
    """Shards on disk and text held out of them.

    ``held_out`` is int64 [N, WINDOW_BYTES], evenly from all sources; ``probe`` a part of it.
    ``onset_step`` is about where the planted repeats begin at the demo's batch size, None without.
    """

    folder: Path
    shards: list[Path]
    held_out: Tensor
    probe: Tensor
    onset_step: int | None


def build(folder: Path, *, seed: int, steps: int, plant: bool) -> Corpus:
    """Write the sources as ``folder/<source>.jsonl.zst``, one window of text per row."""
    folder.mkdir(parents=True, exist_ok=True)
    # At 200 of 420 steps; earlier there would be no history after the warm-up.
    onset_step = max(160, steps * 10 // 21)
    held_out: list[str] = []
    shards = []
    for number, source in enumerate(WEIGHTS):
        rng = np.random.default_rng([seed, number])
        windows = windows_of(text_of(source).encode().split(b"\n"))
        windows = [windows[i] for i in rng.permutation(len(windows))]
        held_out += windows[:HELD_OUT_SAMPLES]
        rows = windows[HELD_OUT_SAMPLES:]
        n_consumed = round(WEIGHTS[source] * steps * BATCH_SAMPLES * 1.1)
        if source == DECOY:
            rows = _repeated(rows[:DECOY_PASSAGES], n_consumed, rng)
        if source == PLANTED and plant:
            n_clean = round(WEIGHTS[source] * onset_step * BATCH_SAMPLES)
            loop = _repeated(rows[-PLANTED_PASSAGES:], n_consumed - n_clean, rng)
            rows = rows[:n_clean] + loop
        shards.append(_write(folder / f"{source}.jsonl.zst", source, rows))
    tokens = torch.stack([encode(text) for text in held_out])
    every = HELD_OUT_SAMPLES // 8
    return Corpus(folder, shards, tokens, tokens[::every], onset_step if plant else None)


def encode(text: str) -> Tensor:
    """UTF-8 bytes int64 [WINDOW_BYTES], padded with -1."""
    data = text.encode()[:WINDOW_BYTES]
    ids = torch.full((WINDOW_BYTES,), -1, dtype=torch.int64)
    ids[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return ids


def collate(samples: Sequence[Mapping[str, Any]]) -> Tensor:
    """Rows with a ``text`` to int64 [B, WINDOW_BYTES]."""
    return torch.stack([encode(sample["text"]) for sample in samples])


class ShardRows(Dataset):
    """All rows of some shards in memory: dicts of text, id, source, shard and row.

    ``shards`` tells the recorder which files were read, so that they can be cleaned later.
    """

    def __init__(self, shards: Sequence[Path]) -> None:
        self.shards = list(shards)
        self.rows = [
            {
                "text": str(row.content),
                "id": row.sample_id,
                "source": row.source,
                "shard": Path(shard.path).name,
                "row": number,
            }
            for shard in find_shards([str(path) for path in shards]).shards
            for number, row in enumerate(shard.rows())
        ]

    @property
    def sources(self) -> list[str]:
        return [str(row["source"]) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def text_of(source: str) -> str:
    """A packaged source, one passage a line."""
    packed = resources.files("auditor.demo").joinpath("data", f"{source}.txt.zst").read_bytes()
    return zstandard.ZstdDecompressor().decompress(packed).decode()


def windows_of(passages: Iterable[bytes]) -> list[str]:
    """Distinct whole windows of UTF-8 passages, cut where characters end."""
    windows = []
    for passage in passages:
        for start in range(0, len(passage) - WINDOW_BYTES + 1, WINDOW_BYTES):
            cut = passage[start : start + WINDOW_BYTES].decode("utf-8", "ignore")
            windows.append(cut)
    # Statutes repeat their formulas; what is held out must not occur in training.
    return list(dict.fromkeys(windows))


def _repeated(passages: Sequence[str], n_rows: int, rng: np.random.Generator) -> list[str]:
    """The passages over and over, each round in a new order."""
    rows: list[str] = []
    while len(rows) < n_rows:
        rows += [passages[i] for i in rng.permutation(len(passages))]
    return rows[:n_rows]


def _write(path: Path, source: str, rows: Sequence[str]) -> Path:
    buffer = io.BytesIO()
    for number, text in enumerate(rows):
        row = {"id": f"{source}-{number:05d}", "text": text, "source": source}
        buffer.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    path.write_bytes(zstandard.ZstdCompressor(level=6).compress(buffer.getvalue()))
    return path
