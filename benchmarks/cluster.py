"""What deduplicating many rows costs: bytes, memory of workers and driver, CPU time of each stage.

    python benchmarks/cluster.py [--rows 100000 200000 400000] [--folder FOLDER]

Stages run one task after the other in a worker process, so that what is measured is theirs alone;
on a cluster the same functions run side by side. Rows are made up: 80 words with Zipf-like
frequencies; a fifth of them repeat an earlier row but for one word. Needs about 2.5 kB of disk per
row.

Memory is that which no file stands behind, looked at every 5 ms, less what the process held after a
small run had loaded and compiled everything (Linux only). Of a stage it is that of the median task.
Extrapolations are straight lines through the smallest and the largest size.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pickle
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from auditor.clean.compare import PairTask
from auditor.clean.config import DedupeConfig
from auditor.clean.dedupe import dedupe

ROWS_OF_SHARD, N_WORDS = 25_000, 80
STAGES = ("scan_shard", "pair_bands", "hash_rows", "write_shard")


@dataclass
class Cost:
    """Of one task: CPU seconds, and bytes."""

    seconds: float
    memory: int
    returned: int
    read: int


class Watch(threading.Thread):
    """Looks at the memory of this process every 5 ms; bytes over those at the start, at most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        # What was freed before would be used again unseen.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._start_bytes = held_bytes()
        self.memory = 0

    def run(self) -> None:
        while not self._over.wait(0.005):
            self.memory = max(self.memory, held_bytes() - self._start_bytes)

    def stop(self) -> None:
        self._over.set()
        self.join()


def held_bytes() -> int:
    """Memory of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def measured(stage: Callable[[Any], Any], task: Any) -> tuple[Any, Cost]:
    if isinstance(task, PairTask):
        forget(task.signatures)
    watch = Watch()
    watch.start()
    before = read_bytes()
    start = time.thread_time()
    result = stage(task)
    seconds = time.thread_time() - start
    read = read_bytes() - before
    watch.stop()
    return result, Cost(seconds, watch.memory, len(pickle.dumps(result)), read)


def forget(path: Path) -> None:
    """Have the system drop the pages of a file, as on a node that has not read it yet."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes() -> int:
    """Bytes that this process has had read from storage."""
    return int(Path("/proc/self/io").read_text().split("\nread_bytes:")[1].split()[0])


@dataclass
class OneWorker:
    """An engine of one process that measures every task, by the name of its stage."""

    pool: ProcessPoolExecutor
    costs: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))

    def map(
        self, stage: Callable[[Any], Any], tasks: Sequence[Any], done: Callable[[int], None]
    ) -> list[Any]:
        results = []
        for number, task in enumerate(tasks):
            result, cost = self.pool.submit(measured, stage, task).result()
            results.append(result)
            self.costs[getattr(stage, "__name__", "")].append(cost)
            done(number)
        return results

    def close(self) -> None:
        self.pool.shutdown()


def write_corpus(folder: Path, n_rows: int) -> int:
    """Shards of JSON Lines; returns their bytes."""
    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    vocabulary = np.array(
        ["".join(generator.choice(letters, generator.integers(2, 10))) for _ in range(50_000)]
    )
    words = np.minimum(generator.zipf(1.2, (n_rows, N_WORDS)), len(vocabulary)) - 1
    for row in np.flatnonzero(generator.random(n_rows) < 0.2).tolist():
        if row:
            words[row] = words[generator.integers(row)]
            words[row, generator.integers(N_WORDS)] = generator.integers(len(vocabulary))
    folder.mkdir()
    for low in range(0, n_rows, ROWS_OF_SHARD):
        with (folder / f"{low:09}.jsonl").open("w") as file:
            for row in words[low : low + ROWS_OF_SHARD]:
                file.write(json.dumps({"text": " ".join(vocabulary[row])}) + "\n")
    return sum(path.stat().st_size for path in folder.iterdir())


def measure(folder: Path, n_rows: int) -> dict[str, Any]:
    """One run, in this process as its driver."""
    folder.mkdir()
    size = write_corpus(folder / "in", n_rows)
    write_corpus(folder / "small", 1000)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(drive, folder, n_rows, size).result()


def drive(folder: Path, n_rows: int, size: int) -> dict[str, Any]:
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    dedupe([folder / "small"], folder / "warm", engine=OneWorker(pool))
    engine = OneWorker(pool)
    work = folder / "out" / ".incomplete"
    disk: dict[str, int] = {}

    def look(stage: str, done: int, total: int) -> None:
        if stage == "write" and not disk:
            for name in ("scan", "hashes"):
                disk[name] = sum(path.stat().st_size for path in (work / name).iterdir())

    watch = Watch()
    watch.start()
    start = time.thread_time()
    manifest = dedupe([folder / "in"], folder / "out", engine=engine, progress=look)
    seconds = time.thread_time() - start
    watch.stop()
    engine.close()
    return {
        "rows": n_rows,
        "text": size,
        "near": manifest.counts["near"],
        "costs": dict(engine.costs),
        "driver": Cost(seconds, watch.memory, 0, 0),
        "disk": disk,
    }


def show(found: dict[str, Any]) -> None:
    n = found["rows"]
    print(f"\n{n} rows, {found['text'] / n:.0f} B each, {found['near'] / n:.3f} near-duplicates")
    print("                    tasks   CPU us/row    peak MB   B/row   returned B/row")
    for stage in STAGES:
        costs = found["costs"].get(stage, [])
        if costs:
            memory = statistics.median(cost.memory for cost in costs)
            print(
                f"  {stage:16} {len(costs):6} {sum(c.seconds for c in costs) / n * 1e6:12.1f} "
                f"{memory / 1e6:10.1f} {memory / n:7.1f} {sum(c.returned for c in costs) / n:12.1f}"
            )
    driver = found["driver"]
    print(
        f"  {'driver':16} {'':6} {driver.seconds / n * 1e6:12.1f} "
        f"{driver.memory / 1e6:10.1f} {driver.memory / n:7.1f}"
    )
    disk = found["disk"]
    print(f"  work folder, B/row: scan {disk['scan'] / n:.0f}, hashes {disk['hashes'] / n:.0f}")
    if pairs := found["costs"].get("pair_bands"):
        print(f"  signatures read by a task of pairs, B/row: {pairs[-1].read / n:.0f}")


def extrapolate(low: dict[str, Any], high: dict[str, Any]) -> None:
    def slope(of: Callable[[dict[str, Any]], float]) -> float:
        return (of(high) - of(low)) / (high["rows"] - low["rows"])

    driver = slope(lambda found: found["driver"].memory)
    pair = slope(lambda found: statistics.median(c.memory for c in found["costs"]["pair_bands"]))
    signed = DedupeConfig().n_permutations * 4
    n_tasks = len(high["costs"]["pair_bands"])
    together = driver + signed + n_tasks * pair
    print(
        f"\nbytes per further row: driver {driver:.0f}, signatures {signed}, "
        f"each of {n_tasks} tasks of pairs {pair:.0f}; all at once on one machine {together:.0f}"
    )
    for memory in (64, 256):
        million = [memory * 1e3 / each for each in (together, driver)]
        print(
            f"  {memory} GB: {million[0]:.0f} million rows on one machine, "
            f"{million[1]:.0f} million where others make the pairs"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 200_000, 400_000])
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    options = parser.parse_args()
    found = []
    for n_rows in sorted(options.rows):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            found.append(measure(Path(name) / "run", n_rows))
        show(found[-1])
    with_pairs = [one for one in found if "pair_bands" in one["costs"]]
    if len(with_pairs) > 1:
        extrapolate(with_pairs[0], with_pairs[-1])


if __name__ == "__main__":
    main()
