"""Deduplication beside other packages: signatures, end to end, memory, growth, in one run.

    python benchmarks/dedupe.py [--texts PATH ...] [--mb 250] [--signature-mb 10] [--only PART]

Everything starts from the same documents and the same shingles, 128 values a document. CPU seconds
of one thread, the sides in turn, the best of each. Packages that are not installed are left out by
name; ``benchmarks/requirements-peers.txt`` says how to install them.

``--texts`` gives shards of real text, which are put together anew to the size asked for (see
``dedupe_corpus.py``); ``--as-they-are`` takes their rows instead, as many as make up the size.
Without ``--texts``, random words of a fixed seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

# Before anything that starts threads.
for _name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "POLARS_MAX_THREADS", "DAFT_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402
from dedupe_corpus import random_texts, read_texts, recombined, write_shards  # noqa: E402
from dedupe_peers import HASHING_ALONE, Side, installed, ready  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from auditor.clean.duplicates import candidates  # noqa: E402
from auditor.measure.facts import facts_of_texts  # noqa: E402
from auditor.measure.sketch import signatures_text  # noqa: E402

PARTS: Final = ("signatures", "end-to-end", "growth")
GROWTH: Final = (10_000, 20_000, 40_000, 80_000)
WAYS: Final = (
    "auditor",
    "auditor, in memory",
    "datasketch",
    "datasketch, tuned",
    "rensa",
    "fastsketchlsh",
)


def best_seconds(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Shortest CPU time of each side over alternating rounds, in seconds."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.process_time()
            side()
            best[name] = min(best[name], time.process_time() - start)
    return best


def ours() -> dict[str, Side]:
    """Our sides: signatures alone, and all that cleaning asks of a text."""
    return {
        "auditor": lambda texts, kind: signatures_text(texts, kind),  # type: ignore[arg-type]
        "auditor, oph": lambda texts, kind: signatures_text(
            texts,
            kind,  # type: ignore[arg-type]
            scheme="oph",
        ),
        "auditor, all facts": lambda texts, kind: facts_of_texts(
            texts,
            kind,  # type: ignore[arg-type]
            repetition=True,
        ),
    }


def signatures(texts: Sequence[str], peers: dict[str, Side], rounds: int, show: Console) -> None:
    megabytes = size(texts)
    sides = {**ours(), **peers}
    for kind in ("word5", "char5"):
        given = dict.fromkeys(sides, texts) | {HASHING_ALONE: [ready(text, kind) for text in texts]}
        calls = {name: partial(side, given[name], kind) for name, side in sides.items()}
        for name, side in sides.items():
            side(given[name][:50], kind)  # compiled, or read from the cache
        seconds = best_seconds(calls, rounds)
        table = Table(title=f"{kind}: {len(texts)} texts, {megabytes:.1f} MB", title_justify="left")
        for column in ("", "CPU s", "MB/s", "auditor is", "oph is"):
            table.add_column(column, justify="right" if column else "left")
        for name, taken in seconds.items():
            table.add_row(
                name,
                f"{taken:.3f}",
                f"{megabytes / taken:.1f}",
                f"{taken / seconds['auditor']:.1f} x",
                f"{taken / seconds['auditor, oph']:.1f} x",
            )
        show.print(table)


def end_to_end(
    folder: Path, ways: Sequence[str], megabytes: float, show: Console
) -> dict[str, dict[str, Any]]:
    script = Path(__file__).with_name("dedupe_end_to_end.py")
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        with tempfile.TemporaryDirectory(dir=folder.parent) as out:
            done = subprocess.run(
                [sys.executable, str(script), way, str(folder), str(Path(out) / "out")],
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            show.print(f"{way}: left out: {done.stderr.strip().splitlines()[-1]}")
        else:
            found[way] = json.loads(done.stdout.splitlines()[-1])
    table = Table(title=f"end to end at .8, word5: {megabytes:.1f} MB", title_justify="left")
    columns = (
        "",
        "CPU s",
        "MB/s",
        "to auditor",
        "without reading",
        "to in memory",
        "peak MB",
        "kept",
    )
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    whole = found["auditor"]["seconds"]
    inside = found["auditor, in memory"]["seconds"] - found["auditor, in memory"]["loaded"]
    for way, one in found.items():
        unread = one["seconds"] - one["loaded"]
        table.add_row(
            way,
            f"{one['seconds']:.1f}",
            f"{megabytes / one['seconds']:.1f}",
            f"{one['seconds'] / whole:.1f} x",
            f"{unread:.1f}" if one["loaded"] else "",
            f"{unread / inside:.1f} x" if one["loaded"] else "",
            f"{one['megabytes']:.0f}",
            f"{one['kept']}",
        )
    show.print(table)
    return found


def two_cores(folder: Path, rounds: int, show: Console) -> None:
    """One call with two processes, beside two calls of one process on half the shards each.

    Interleaved: on a shared machine a round is comparable to the one before it and to no other.
    """
    script = Path(__file__).with_name("dedupe_end_to_end.py")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        shards = sorted(folder.iterdir())
        halves = []
        for number in range(2):
            half = Path(scratch) / f"half-{number}"
            half.mkdir()
            for shard in shards[number::2]:
                (half / shard.name).hardlink_to(shard)
            halves.append(half)

        def seconds(way: str, *inputs: Path) -> float:
            outs = [Path(scratch) / f"{one.name}-out" for one in inputs]
            begin = time.perf_counter()
            processes = [
                subprocess.Popen(
                    [sys.executable, str(script), way, str(one), str(out)],
                    stdout=subprocess.DEVNULL,
                )
                for one, out in zip(inputs, outs, strict=True)
            ]
            for process in processes:
                process.wait()
            if any(process.returncode for process in processes):
                raise SystemExit("a process of --two-cores failed")
            took = time.perf_counter() - begin
            for out in outs:
                shutil.rmtree(out)
            return took

        both, alone = [], []
        for _ in range(rounds):
            both.append(seconds("auditor, two cores", folder))
            alone.append(seconds("auditor", *halves))
    ratios = sorted(one / other for one, other in zip(both, alone, strict=True))
    show.print(
        f"two cores, {rounds} rounds: one call {statistics.median(both):.1f} s, two independent "
        f"calls {statistics.median(alone):.1f} s of wall time; {statistics.median(ratios):.2f} x "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def growth(texts: Sequence[str], sizes: Sequence[int], show: Console) -> None:
    """Candidates of the first so many documents: a corpus twice as large has how many more?"""
    facts = [
        facts_of_texts(texts[i : i + 2048], "word5", repetition=False)
        for i in range(0, max(sizes), 2048)
    ]
    sketches = np.concatenate([one.signatures for one in facts])[: max(sizes)]
    table = Table(title="candidates of 32 bands of 4 rows", title_justify="left")
    for column in ("documents", "proposed", "distinct pairs", "plausible at .8", "a document", "s"):
        table.add_column(column, justify="right")
    for n in sizes:
        start = time.process_time()
        everything = candidates(sketches, np.arange(n), bands=32)
        plausible = candidates(sketches, np.arange(n), bands=32, threshold=0.8)
        table.add_row(
            str(n),
            str(everything.n_proposed),
            str(len(everything.pairs)),
            str(len(plausible.pairs)),
            f"{len(plausible.pairs) / n:.3f}",
            f"{time.process_time() - start:.2f}",
        )
    show.print(table)


def size(texts: Sequence[str]) -> float:
    """Megabytes of UTF-8."""
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=Path, nargs="+", help="shards with a text column")
    parser.add_argument("--as-they-are", action="store_true", help="do not recombine --texts")
    parser.add_argument("--mb", type=float, default=250.0, help="megabytes of text, end to end")
    parser.add_argument(
        "--signature-mb", type=float, default=10.0, help="megabytes of it for signatures alone"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all parts")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--two-cores", action="store_true", help="also measure two workers")
    options = parser.parse_args()
    show = Console(width=120)
    parts = options.only or PARTS

    n_bytes = int(options.mb * 1e6)
    if options.texts and options.as_they_are:
        by_source = read_texts(options.texts, n_bytes)
        texts = [text for one in by_source.values() for text in one]
    else:
        by_source = read_texts(options.texts) if options.texts else random_texts(n_bytes // 10)
        texts = list(recombined(by_source, n_bytes, options.seed))
    megabytes = size(texts)
    show.print(
        f"{len(texts)} documents, {megabytes:.1f} MB, seed {options.seed}; "
        f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}"
    )

    if "signatures" in parts:
        step = max(1, round(megabytes / options.signature_mb))
        peers: dict[str, Side] = {}
        if not options.without_peers:
            peers = installed(lambda name, error: show.print(f"{name}: left out: {error}"))
        signatures(texts[::step], peers, options.rounds, show)
    if "growth" in parts:
        sizes = [n for n in GROWTH if n <= len(texts)] or [len(texts)]
        growth(texts, sizes, show)
    if "end-to-end" in parts or options.two_cores:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "shards"
            write_shards(texts, folder)
            del texts
            if "end-to-end" in parts:
                ways = WAYS[:2] if options.without_peers else WAYS
                end_to_end(folder, ways, megabytes, show)
            if options.two_cores:
                two_cores(folder, options.rounds, show)


if __name__ == "__main__":
    main()
