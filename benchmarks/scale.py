"""Time and memory of ``auditor report`` for runs of growing length, up to 200,000 steps.

Runs are written through the recorder's own ledgers: 8 ranks, 512 samples a step together, scored,
out of a million described samples of six sources; a monitor on every rank with a model of 12 blocks
of 12 heads, sampled every 200 steps; losses and gradient norms of every step. Nothing is trained:
signals are numbers that stay what they were until a burst of duplicates from one source, a quarter
before the end, after which input diversity and then the ranks fall. The report has to name it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from auditor.attempt import open_attempt
from auditor.ledger import Frame, LedgerWriter
from auditor.record.duplication import Scores
from auditor.record.exposures import FLUSH_BATCHES, ExposureBuffer
from auditor.record.identity import Described
from auditor.record.samples import SampleLedger

RANKS, BATCH, EVERY = 8, 64, 200
N_SAMPLES: Final = 1_000_000
SOURCES: Final = ("web", "code", "books", "papers", "forums", "wiki")
SHARES: Final = (0.5, 0.2, 0.1, 0.1, 0.06, 0.04)
CULPRIT: Final = SOURCES.index("forums")
LAYERS, HEADS = 12, 12
BURST_STEPS: Final = 60
SCALARS_STEPS: Final = 100
TOKEN_RANKS: Final = [("token_rank", variant) for variant in ("raw", "centred", "column")]
OF_BLOCK: Final = [
    (signal, "raw") for signal in ("token_rank_full", "effective_rank", "spectral_gap", "max_abs")
]
OF_ATTENTION: Final = [
    (signal, None) for signal in ("entropy_mean", "entropy_min", "entropy_normalised", "max_logit")
]


def write_run(path: Path, n_steps: int) -> None:
    source_of = np.random.default_rng(0).choice(len(SOURCES), N_SAMPLES, p=SHARES)
    onset = n_steps * 3 // 4 // EVERY * EVERY - BURST_STEPS // 2
    repeated = np.flatnonzero(source_of == CULPRIT)[:4]
    for rank in range(RANKS):
        attempt = open_attempt(path, rank=rank, world_size=RANKS)
        rng = np.random.default_rng(1 + rank)
        write_samples(SampleLedger(attempt.ledger("samples")), source_of, n_steps, rank)
        exposures = LedgerWriter(attempt.ledger("exposures"))
        buffer = ExposureBuffer()
        for first in range(0, n_steps, FLUSH_BATCHES):
            steps = np.arange(first, min(first + FLUSH_BATCHES, n_steps))
            keys = np.stack([drawn(rank, step) for step in steps.tolist()])
            in_burst = (steps >= onset) & (steps < onset + BURST_STEPS)
            bad = in_burst[:, None] & (rng.random(keys.shape) < 0.5)
            keys = np.where(bad, rng.choice(repeated, keys.shape), keys)
            scored = scores(rng, keys.reshape(-1), bad.reshape(-1))
            for number, step in enumerate(steps.tolist()):
                rows = slice(number * BATCH, (number + 1) * BATCH)
                part = {name: values[rows] for name, values in scored.items()}
                buffer.add_batch(step, "delivered", keys[number], None)
                buffer.add_step(step, "trained", [step])
                buffer.add_scores(step, Scores(**part))
            for frame in buffer.take():
                exposures.append(frame)
        exposures.close()
        signals = LedgerWriter(attempt.ledger("signals"))
        for frame in signal_frames(rng, n_steps, onset):
            signals.append(frame)
        signals.close()
        attempt.close(complete=True)


def drawn(rank: int, step: int) -> np.ndarray:
    """Keys i64 [BATCH]: every epoch in another order, ranks apart from each other."""
    first = (step * RANKS + rank) * BATCH
    epoch, place = divmod(first, N_SAMPLES)
    # An affine walk visits every sample once an epoch.
    return (np.arange(place, place + BATCH) * 612_371 + 7_919 * (epoch + 1)) % N_SAMPLES


def write_samples(ledger: SampleLedger, source_of: np.ndarray, n_steps: int, rank: int) -> None:
    for step in range(min(n_steps, 4 * N_SAMPLES // BATCH)):
        keys = drawn(rank, step)
        ledger.note(
            Described(
                keys,
                [None] * BATCH,
                sample_id=[f"doc-{key}" for key in keys],
                source=[SOURCES[source] for source in source_of[keys]],
                shard=[f"part-{key % 64:03d}.jsonl.zst" for key in keys],
                n_tokens=[1024] * BATCH,
            )
        )
        if step % 256 == 255:
            ledger.flush()
    ledger.flush()
    ledger.close()


def scores(rng: np.random.Generator, keys: np.ndarray, bad: np.ndarray) -> dict[str, np.ndarray]:
    n = len(keys)
    near = bad | (rng.random(n) < 0.02)
    return {
        "n_equal_batch": np.where(near, 128, rng.integers(0, 4, n)),
        "n_equal_window": rng.integers(0, 4, n),
        "dup_of": np.where(near, keys, -1),
        "dup_run": near.astype(np.int32),
        "repetition": np.where(rng.random(n) < 0.1, rng.random(n), 0).astype(np.float32),
        "known": np.ones(n, np.bool_),
    }


def signal_frames(rng: np.random.Generator, n_steps: int, onset: int) -> Iterator[Frame]:
    for start in range(0, n_steps, SCALARS_STEPS):
        steps = np.arange(start, min(start + SCALARS_STEPS, n_steps))
        columns = {
            "step": steps,
            "loss": (2 + 8 / (1 + steps / 50) + rng.normal(0, 0.02, len(steps))).astype(np.float32),
            "grad_norm": rng.gamma(50, 0.02, len(steps)).astype(np.float32),
            "lr": np.full(len(steps), 3e-4, np.float32),
        }
        yield Frame("scalars", {}, columns)
        if start % EVERY == 0:
            yield sampled(rng, start, onset)


def sampled(rng: np.random.Generator, step: int, onset: int) -> Frame:
    """The rows of one sampled step: signals of every block and head, live and on the probe."""
    rows: list[tuple[str, str, str | None, int, int, float]] = []
    age = step - onset
    input_fell = 0.3 if 0 <= age < 3 * EVERY else 0.0
    model_fell = 0.3 if EVERY <= age < 6 * EVERY else 0.0
    for kind in ("live", "probe"):
        fell = input_fell if kind == "live" else 0.0
        rows.append((kind, "sample_rank", "centred", -1, -1, 0.85 - fell))
        for layer in range(LAYERS):
            values = {
                **dict.fromkeys(TOKEN_RANKS, 0.8 - model_fell),
                **dict.fromkeys(OF_BLOCK, 1.0),
                **dict.fromkeys(OF_ATTENTION, 2.0),
            }
            rows += [(kind, *name, layer, -1, value) for name, value in values.items()]
            rows.append((kind, "value_rank", "centred", layer, -1, 0.8))
            rows += [(kind, "entropy", None, layer, head, 2.0) for head in range(HEADS)]
    rows.append(("probe", "probe_loss", None, -1, -1, 2.0 + 8 / (1 + step / 50)))
    kinds, signals, variants, layers, heads, values = zip(*rows, strict=True)
    noise = rng.normal(0, 0.005, len(rows))
    return Frame(
        "signals",
        {"step": step},
        {
            "layer": np.asarray(layers),
            "head": np.asarray([head if head >= 0 else -(2**31) for head in heads]),
            "n_rows": np.full(len(rows), 512),
            "value": np.asarray(values) * (1 + noise),
        },
        {
            "kind": list(kinds),
            "signal": list(signals),
            "variant": list(variants),
            "site": [f"blocks.{layer}" if layer >= 0 else "embedding" for layer in layers],
        },
    )


def report(path: Path) -> dict[str, Any]:
    """Seconds, megabytes and what was found, of the command in a process of its own."""
    begin = time.perf_counter()
    script = (
        "import json, resource, sys\n"
        "from auditor.cli import main\n"
        "try:\n"
        "    main(['report', sys.argv[1], '--json'])\n"
        "finally:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    return {
        "seconds": time.perf_counter() - begin,
        "megabytes": int(done.stderr.split()[-1]) / 1024,
        "verdict": found["verdict"],
        "page": (path / "derived" / "report.html").stat().st_size / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[2_000, 20_000, 200_000], help="lengths of runs"
    )
    parser.add_argument("--keep", type=Path, help="folder for the runs, which are not made again")
    options = parser.parse_args()
    show = Console(width=120)
    table = Table(title="auditor report, from nothing derived and once more", title_justify="left")
    for column in ("steps", "exposures", "ledgers MB", "s", "again s", "peak MB", "page MB"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as scratch:
        for n_steps in options.steps:
            path = (options.keep or Path(scratch)) / f"steps-{n_steps}"
            if not path.exists():
                write_run(path, n_steps)
            derived = path / "derived"
            if derived.exists():
                subprocess.run(["rm", "-r", str(derived)], check=True)
            size = sum(file.stat().st_size for file in path.rglob("*.ledger")) / 1e6
            first, again = report(path), report(path)
            table.add_row(
                f"{n_steps:,}",
                f"{n_steps * RANKS * BATCH:,}",
                f"{size:.0f}",
                f"{first['seconds']:.1f}",
                f"{again['seconds']:.1f}",
                f"{first['megabytes']:.0f}",
                f"{first['page']:.1f}",
            )
            show.print(f"{n_steps:,} steps: {first['verdict']}")
    show.print(table)


if __name__ == "__main__":
    main()
