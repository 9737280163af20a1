"""Substring duplicates: throughput, memory and disk at two sizes of one made-up corpus.

    python benchmarks/substrings.py [--mb 50 200] [--partitions 64] [--elements 50] [--gzip]

Each size runs in a process of its own. Peak memory is what that process held at most, looked at
every 5 ms, less what it held after one small run had loaded and compiled everything; pages of the
work folder's files that are mapped are not in it, since the system takes them back when it needs to
(Linux only). Disk is what the work folder held at most. CPU seconds of one thread.

The corpus has documents of 100 to 2,000 words with Zipf-like frequencies; a tenth of them hold a
paragraph of 100 words that was in an earlier document, and a tenth the same boilerplate of 60
words. More is found than was copied where a copy and its source are followed by the same word by
chance.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import tempfile
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from stat import S_ISREG

import numpy as np

from auditor.clean.shards import find_shards
from auditor.clean.substrings import rows_with_spans, substring_duplicates

PARAGRAPH, BOILERPLATE = 100, 60


def write_corpus(folder: Path, n_bytes: int, *, compressed: bool) -> tuple[int, int]:
    """Shards of about 20 MB; returns bytes of text, and words that were copied."""
    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    vocabulary = np.array(
        ["".join(generator.choice(letters, generator.integers(2, 10))) for _ in range(50_000)]
    )
    boilerplate = generator.choice(vocabulary, BOILERPLATE)
    paragraph = generator.choice(vocabulary, PARAGRAPH)
    total = n_copied = shard = 0
    n_boilerplate = 0
    while total < n_bytes:
        path = folder / f"part-{shard}.jsonl{'.gz' if compressed else ''}"
        size = 0
        with gzip.open(path, "wb", compresslevel=1) if compressed else path.open("wb") as file:
            while size < 20e6 and total < n_bytes:
                ranks = np.minimum(generator.zipf(1.2, generator.integers(100, 2000)), 50_000) - 1
                parts = [vocabulary[ranks]]
                draw = generator.random()
                if draw < 0.1:
                    parts.insert(0, paragraph)
                    n_copied += PARAGRAPH
                elif draw < 0.2:
                    parts.append(boilerplate)
                    n_copied += BOILERPLATE if n_boilerplate else 0
                    n_boilerplate += 1
                elif draw < 0.3:
                    paragraph = parts[0][:PARAGRAPH]
                text = " ".join(np.concatenate(parts))
                file.write(json.dumps({"text": text}).encode() + b"\n")
                size += len(text)
                total += len(text)
        shard += 1
    return total, n_copied


class Watch(threading.Thread):
    """Looks at memory and disk every 5 ms; both in bytes, at most so far."""

    def __init__(self, work: Path) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._over = threading.Event()
        self.start_memory = held_bytes()
        self.memory = self.disk = 0

    def run(self) -> None:
        while not self._over.wait(0.005):
            self.memory = max(self.memory, held_bytes() - self.start_memory)
            # Files go while they are counted.
            with contextlib.suppress(FileNotFoundError):
                files = [file.stat() for file in self._work.rglob("*")]
                self.disk = max(self.disk, sum(s.st_size for s in files if S_ISREG(s.st_mode)))

    def stop(self) -> None:
        self._over.set()
        self.join()


def held_bytes() -> int:
    """Memory of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def measure(folder: Path, corpus: tuple[int, int], n_partitions: int, n_elements: int) -> str:
    total, n_copied = corpus
    work = folder / "work"
    small = folder / "small.jsonl"
    small.write_text(json.dumps({"text": "a b c " * 100}) + "\n")
    rows_with_spans(substring_duplicates(find_shards([small]).shards, work=work))
    shards = find_shards([folder / "data"]).shards
    start = time.process_time()
    for shard in shards:
        for _ in shard.rows():
            pass
    reading = time.process_time() - start
    watch = Watch(work)
    watch.start()
    # Of this thread: that which watches is not counted.
    start = time.thread_time()
    spans = substring_duplicates(
        shards, n_elements=n_elements, work=work, n_partitions=n_partitions
    )
    seconds = time.thread_time() - start
    watch.stop()
    n_cut = int(rows_with_spans(spans)["n_cut"].sum())
    return (
        f"{total / 1e6:8.0f} {seconds:8.1f} {total / 1e6 / seconds:8.1f} {reading:8.1f} "
        f"{watch.memory / 1e6:10.0f} {watch.disk / total:12.2f} {len(spans):9} "
        f"{n_cut / max(n_copied, 1):10.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, nargs="+", default=[50, 200])
    parser.add_argument("--partitions", type=int, default=64)
    parser.add_argument("--elements", type=int, default=50)
    parser.add_argument("--gzip", action="store_true", help="compressed shards")
    options = parser.parse_args()
    print("                            reading    peak MB    disk, of             found, of")
    print("      MB    CPU s     MB/s    alone  over start  text bytes     spans     copied")
    for mb in options.mb:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "data").mkdir()
            # One process writes and one measures: neither has the other's peak.
            with get_context("spawn").Pool(1) as pool:
                corpus = pool.apply(
                    write_corpus,
                    (folder / "data", int(mb * 1e6)),
                    {"compressed": options.gzip},
                )
            with get_context("spawn").Pool(1) as pool:
                task = (folder, corpus, options.partitions, options.elements)
                print(pool.apply(measure, task), flush=True)


if __name__ == "__main__":
    main()
