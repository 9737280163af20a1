"""The trainings of ``attribution.py``: one small GPT, real text, a fault whose cause is known.

Each training is recorded as a user's would be, by ``AuditedSampler`` and ``GradeMonitor`` with the
loss of every sample, into a run directory. A training of one seed draws the same rows with and
without a fault, so that what the fault moved is seen by comparing the two. In every training one
source, the decoy, is made of repeated passages from the first step to the last.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from auditor import AuditedSampler, GradeMonitor
from auditor.demo.corpus import BATCH_SAMPLES, WINDOW_BYTES, encode, text_of, windows_of
from auditor.demo.model import GPT, GPTConfig, next_byte_loss

VERSION: Final = 1
"""Of the recorded trainings: raised when one would come out differently."""

STEPS: Final = 420
EVERY: Final = 5
ONSETS: Final = (200, 260)
BURST_STEPS: Final = 60
LEARNING_RATE: Final = 2e-3
WARMUP_STEPS: Final = 20
SHARES: Final = (0.4, 0.3, 0.2, 0.1)
"""Of the sources in the mix. The culprit has the first, the decoy the second."""

PASSAGES: Final = 4
DECOY_PASSAGES: Final = 300
EPOCH_ROWS: Final = 1600
PROBE_ROWS: Final = 8
"""Held out of each source for the monitor."""

PACKAGED: Final = ("novels", "speeches", "peps", "statutes")
HELD_OUT: Final = ("wiki", "code", "qa_math", "shakespeare", "qa_med", "gutenberg")
"""Sources of ``../shared/data/A_text`` that no threshold was chosen on."""

DATA_FAULTS: Final[Mapping[str, str]] = {
    "duplicate burst": "the culprit's rows come from 4 passages, for 60 steps",
    "n-gram runs": "the culprit's rows repeat 3 of their bytes, until the end",
    "bad source": "a new source takes 40% of the rows: templates with a few bytes of their own",
    "boilerplate": "the culprit's rows begin with the same 48 bytes, until the end",
    "source shift": "the culprit goes from 40% to 95% of the rows",
    "noise": "the culprit's rows are random characters, for 60 steps",
    "correlated shuffle": "blocks of 40 steps of one source, the culprit first",
    "poisoned samples": "two rows of each batch, the culprit's, are one character, for 60 steps",
}
OTHERS: Final[Mapping[str, str]] = {
    "constant": "no fault: the learning rate stays; the paired run of the faults",
    "lr spike": "learning rate x10 for 20 steps",
    "lr decay": "learning rate decays to a tenth, half a cosine",
    "NaN": "the loss of one step is not a number; its update is skipped",
    "warm-up": "the warm-up takes 150 steps",
    "batch size": "batches of 8 instead of 16 from some step on",
    "restart": "stopped and resumed with another seed of the shuffle",
    "epochs": "1,600 rows again and again, 100 steps an epoch",
    "switch": "benign: the two smallest sources swap their shares with the largest",
}
NEW_SOURCE: Final = "scraped"


@dataclass(frozen=True)
class Truth:
    """What was done to a training. ``culprit`` is None where no data is at fault."""

    kind: str
    seed: int
    onset: int
    culprit: str | None
    decoy: str
    planted_steps: list[int]


def folder_of(runs: Path, kind: str, seed: int, is_held_out: bool) -> Path:
    corpus = "held-out" if is_held_out else "packaged"
    return runs / f"v{VERSION}" / corpus / f"{kind.replace(' ', '-')}-{seed}"


def load_truth(folder: Path) -> Truth:
    """Raises ``OSError`` where the training has not been recorded."""
    return Truth(**json.loads((folder / "truth.json").read_text(encoding="utf-8")))


def record(runs: Path, kind: str, seed: int, corpus: Path | None) -> Path:
    """Train once, and keep the run; a training that is there already is not repeated.

    ``corpus`` is the folder of the held-out sources; None takes the packaged ones.
    """
    folder = folder_of(runs, kind, seed, corpus is not None)
    if (folder / "truth.json").exists():
        return folder
    torch.set_num_threads(1)
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    truth = _train(part / "run", kind, seed, corpus)
    (part / "truth.json").write_text(json.dumps(asdict(truth)), encoding="utf-8")
    part.replace(folder)
    return folder


# -- rows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Corpus:
    """Rows by source, the culprit first and the decoy second; ``probe`` is int64 [N, W]."""

    rows: Mapping[str, list[str]]
    probe: Tensor

    @property
    def sources(self) -> list[str]:
        return list(self.rows)


def _corpus(seed: int, folder: Path | None) -> _Corpus:
    draws = np.random.default_rng([seed, 1])
    names = draws.permutation(PACKAGED if folder is None else HELD_OUT)[: len(SHARES)]
    rows, probe = {}, []
    for place, name in enumerate(names.tolist()):
        windows = windows_of(_passages(name, folder))
        order = np.random.default_rng([seed, 2, place]).permutation(len(windows))
        shuffled = [windows[n] for n in order[:8000]]
        probe += [encode(text) for text in shuffled[:PROBE_ROWS]]
        rows[name] = shuffled[PROBE_ROWS:]
    decoy = list(rows)[1]
    rows[decoy] = rows[decoy][:DECOY_PASSAGES]
    return _Corpus(rows, torch.stack(probe))


def _passages(name: str, folder: Path | None) -> list[bytes]:
    if folder is None:
        return text_of(name).encode().split(b"\n")
    texts = pl.concat([pl.read_parquet(path) for path in sorted(folder.glob(f"{name}-*.parquet"))])
    return [str(text).encode() for text in texts["text"]]


def _rows(kind: str, corpus: _Corpus, seed: int, onset: int) -> tuple[list[list[Any]], list[int]]:
    """Rows of each step, and the steps that hold planted ones."""
    draws, fault = np.random.default_rng([seed, 3]), np.random.default_rng([seed, 4])
    restarted = np.random.default_rng([seed, 5])
    sources = corpus.sources
    culprit = sources[0]
    passages = [corpus.rows[culprit][-1 - n] for n in range(PASSAGES)]
    header = corpus.rows[culprit][-1 - PASSAGES].encode()[:48].decode("utf-8", "ignore")
    taken = dict.fromkeys(sources, 0)
    batches, planted = [], []
    for step in range(STEPS):
        names = [*sources, NEW_SOURCE] if kind == "bad source" else sources
        rng = restarted if kind == "restart" and step >= onset else draws
        size = BATCH_SAMPLES // 2 if kind == "batch size" and step >= onset else BATCH_SAMPLES
        batch, is_planted = [], _is_active(kind, step, onset)
        for place, n in enumerate(rng.choice(len(names), size, p=_mix(kind, step, onset))):
            source = names[n]
            if source == NEW_SOURCE:
                text = f"{header[:40]} no. {int(fault.integers(1000)):03d}"
                batch.append(_row(source, f"{step}-{place}", text))
                continue
            pool = corpus.rows[source]
            n_rows = len(pool)
            if kind == "epochs":
                n_rows = min(n_rows, round(EPOCH_ROWS * SHARES[sources.index(source)]))
            number = taken[source] % n_rows
            taken[source] += 1
            row = _row(source, str(number), pool[number])
            if is_planted and kind == "poisoned samples" and place < 2:
                letter = "x~#0"[int(fault.integers(4))]
                row = _row(culprit, f"poison-{letter}-{step}-{place}", letter * WINDOW_BYTES)
            elif is_planted and source == culprit:
                row = _faulty(kind, row, passages, header, fault)
            batch.append(row)
        batches.append(batch)
        if is_planted:
            planted.append(step)
    return batches, planted


def _row(source: str, name: str, text: str) -> dict[str, Any]:
    return {"id": f"{source}-{name}", "text": text, "source": source, "shard": f"{source}.jsonl"}


def _is_active(kind: str, step: int, onset: int) -> bool:
    if kind not in DATA_FAULTS or step < onset:
        return False
    lasts = kind not in ("duplicate burst", "noise", "poisoned samples")
    return lasts or step < onset + BURST_STEPS


def _mix(kind: str, step: int, onset: int) -> Sequence[float]:
    if kind == "bad source":
        return [*(0.6 * one for one in SHARES), 0.4] if step >= onset else [*SHARES, 0.0]
    if step < onset:
        return SHARES
    if kind == "source shift":
        return (0.95, 0.03, 0.01, 0.01)
    if kind == "correlated shuffle":
        block = (0, 2, 1, 3)[(step - onset) // 40 % 4]
        return [float(n == block) for n in range(4)]
    if kind == "switch":
        return (0.1, 0.3, 0.3, 0.3)
    return SHARES


def _faulty(
    kind: str, row: dict[str, Any], passages: list[str], header: str, fault: np.random.Generator
) -> dict[str, Any]:
    """A row of the culprit as the fault makes it; of faults of the mix, as it was."""
    text = row["text"]
    if kind == "duplicate burst":
        n = int(fault.integers(len(passages)))
        return _row(row["source"], f"passage-{n}", passages[n])
    if kind == "n-gram runs":
        start = int(fault.integers(max(1, len(text) - 3)))
        text = (text[start : start + 3] * WINDOW_BYTES)[:WINDOW_BYTES]
    elif kind == "boilerplate":
        text = header + text[len(header) :]
    elif kind == "noise":
        text = "".join(map(chr, fault.integers(33, 127, WINDOW_BYTES)))
    return {**row, "text": text}


class _Rows(Dataset):
    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


# -- training --------------------------------------------------------------------------------


def _train(run: Path, kind: str, seed: int, corpus_folder: Path | None) -> Truth:
    corpus = _corpus(seed, corpus_folder)
    onset = int(np.random.default_rng([seed, 6]).integers(ONSETS[0], ONSETS[1] + 1))
    batches, planted = _rows(kind, corpus, seed, onset)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(n_positions=WINDOW_BYTES - 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    ends = [0, onset, STEPS] if kind == "restart" else [0, STEPS]
    for begin, end in itertools.pairwise(ends):
        monitor = GradeMonitor(
            model, run=run, every=EVERY, probe=corpus.probe, probe_loss=next_byte_loss
        )
        loader = AuditedSampler(_loader(batches[begin:end]), run=run, start_step=begin)
        for step, batch in enumerate(loader, start=begin):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * _rate(kind, step, onset)
            rows = F.cross_entropy(
                model(batch[:, :-1].clamp_min(0)).transpose(1, 2),
                batch[:, 1:],
                ignore_index=-1,
                reduction="none",
            )
            n_tokens = (batch[:, 1:] >= 0).sum(1)
            loss = rows.sum() / n_tokens.sum()
            is_lost = kind == "NaN" and step == onset
            optimizer.zero_grad()
            (loss * math.nan if is_lost else loss).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            monitor.step(
                loss * math.nan if is_lost else loss,
                optimizer=optimizer,
                grad_norm=norm,
                sample_loss=(rows.sum(1) / n_tokens.clamp_min(1)).detach(),
            )
            if not is_lost:
                optimizer.step()
        monitor.close()
    culprit = NEW_SOURCE if kind == "bad source" else corpus.sources[0]
    return Truth(
        kind,
        seed,
        onset,
        culprit if kind in DATA_FAULTS else None,
        corpus.sources[1],
        planted,
    )


def _loader(batches: Sequence[Sequence[dict[str, Any]]]) -> DataLoader:
    rows = [row for batch in batches for row in batch]
    ends = np.cumsum([len(batch) for batch in batches]).tolist()
    places = [list(range(end - len(batch), end)) for batch, end in zip(batches, ends, strict=True)]
    return DataLoader(_Rows(rows), batch_sampler=places, collate_fn=_collate)


def _collate(rows: Sequence[Mapping[str, Any]]) -> Tensor:
    return torch.stack([encode(row["text"]) for row in rows])


def _rate(kind: str, step: int, onset: int) -> float:
    warmup = 150 if kind == "warm-up" else WARMUP_STEPS
    rate = min(1.0, (step + 1) / warmup)
    if kind == "lr decay":
        return rate * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
    if kind == "lr spike" and onset <= step < onset + 20:
        return rate * 10.0
    return rate
