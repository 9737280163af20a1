"""Signature throughput beside datasketch, on the same texts and the same shingles, in one run.

    python benchmarks/dedupe.py [--texts FILE.jsonl[.gz|.zst]] [--mb 3] [--shingle word5]

Both sides start from Python strings and end with 128 MinHash values per text; datasketch is given
its bulk call and xxhash where that is installed, which is faster than its default. Sides alternate,
and the best of each is compared. One thread. Without ``--texts``, random words of a fixed seed.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasketch import MinHash
from datasketch.hashfunc import sha1_hash32

from auditor.clean.shards import find_shards
from auditor.measure.sketch import signatures_text


def random_texts(n_bytes: int) -> list[str]:
    """Texts of 50 to 1,000 words of 2 to 9 letters, with Zipf-like frequencies."""
    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(generator.choice(letters, generator.integers(2, 10))) for _ in range(20_000)]
    texts: list[str] = []
    total = 0
    while total < n_bytes:
        ranks = np.minimum(generator.zipf(1.3, generator.integers(50, 1000)), len(words)) - 1
        texts.append(" ".join(words[rank] for rank in ranks))
        total += len(texts[-1])
    return texts


def read_texts(path: Path, n_bytes: int) -> list[str]:
    """The first texts of a shard, about ``n_bytes`` of them."""
    texts: list[str] = []
    total = 0
    for row in find_shards([path]).shards[0].rows():
        if isinstance(row.content, str):
            texts.append(row.content)
            total += len(row.content.encode("utf-8", "surrogatepass"))
        if total >= n_bytes:
            break
    return texts


def shingles(text: str, kind: str) -> list[bytes]:
    """The shingles of ``auditor.measure.sketch`` as bytes, for datasketch."""
    if kind == "word5":
        parts, glue = re.findall(r"\w+", text.lower()), " "
    else:
        parts, glue = list(" ".join(text.lower().split())), ""
    count = max(len(parts) - 4, min(len(parts), 1))
    return [glue.join(parts[i : i + 5]).encode("utf-8", "surrogatepass") for i in range(count)]


def best_seconds(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Shortest CPU time of each side over alternating rounds, in seconds."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.process_time()
            side()
            best[name] = min(best[name], time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=Path, help="a shard with a text column")
    parser.add_argument("--mb", type=float, default=3.0, help="megabytes of text to hash")
    parser.add_argument("--shingle", choices=["word5", "char5", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    n_bytes = int(options.mb * 1e6)
    texts = read_texts(options.texts, n_bytes) if options.texts else random_texts(n_bytes)
    megabytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) / 1e6

    hashes: dict[str, Callable[[bytes], int]] = {"datasketch sha1": sha1_hash32}
    try:
        import xxhash

        hashes["datasketch xxh32"] = xxhash.xxh32_intdigest
    except ImportError:
        print("xxhash is not installed: datasketch with its default hash only")

    print(f"{len(texts)} texts, {megabytes:.1f} MB, 128 permutations, CPU seconds of one thread")
    kinds = ["word5", "char5"] if options.shingle == "both" else [options.shingle]
    for kind in kinds:
        start = time.process_time()
        signatures_text(texts[:1], kind)
        compiled = time.process_time() - start

        def ours(kind: str = kind) -> Any:
            return signatures_text(texts, kind)  # type: ignore[arg-type]

        sides: dict[str, Callable[[], Any]] = {"auditor": ours}
        for name, function in hashes.items():

            def theirs(kind: str = kind, function: Callable[[bytes], int] = function) -> Any:
                sets = (shingles(text, kind) for text in texts)
                return MinHash.bulk(sets, num_perm=128, seed=1, hashfunc=function)

            sides[name] = theirs
        seconds = best_seconds(sides, options.rounds)
        print(f"\n{kind} (first call, compiled or from the cache: {compiled:.2f} s)")
        for name, taken in seconds.items():
            ratio = taken / seconds["auditor"]
            print(f"  {name:17} {taken:8.3f} s  {megabytes / taken:8.1f} MB/s  {ratio:6.1f} x")


if __name__ == "__main__":
    main()
