"""One way to deduplicate a folder of JSONL shards, in a process of its own, for ``dedupe.py``.

    python benchmarks/dedupe_end_to_end.py WAY FOLDER OUT

All keep a row unless its exact Jaccard similarity, over shingles of 5 words, to a row kept before
it is .8 or more; candidates come from 32 bands of 4 rows. Prints JSON: CPU seconds from the start
of the process, those until the texts were in memory, peak memory and rows kept.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from dedupe_peers import encoded, shingles

THRESHOLD: Final = 0.8
SHINGLE: Final = "word5"


def load(folder: Path) -> list[str]:
    texts: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            texts += [orjson.loads(line)["text"] for line in file]
    return texts


def in_memory(texts: Sequence[str]) -> list[int]:
    """The parts of ``auditor.clean`` over texts in memory."""
    from auditor.clean.duplicates import candidates, choose_keepers, exact_leaders, verify_pairs
    from auditor.measure.facts import distinct_hashes, facts_of_texts

    batches = [texts[i : i + 2048] for i in range(0, len(texts), 2048)]
    facts = [facts_of_texts(batch, SHINGLE, repetition=False) for batch in batches]
    signatures = np.concatenate([one.signatures for one in facts])
    exact = np.concatenate([one.exact for one in facts])
    order = np.arange(len(texts))
    leader = exact_leaders(exact, order, np.ones(len(texts), np.bool_))
    leaders = order[leader == order]
    pairs = candidates(signatures, leaders, bands=32, threshold=THRESHOLD).pairs
    rows = np.unique(pairs)
    hashes, offsets = distinct_hashes([texts[row] for row in rows], SHINGLE)
    starts, stops = np.zeros(len(texts), np.int64), np.zeros(len(texts), np.int64)
    starts[rows], stops[rows] = offsets[:-1], offsets[1:]
    keepers = choose_keepers(
        pairs,
        verify_pairs(pairs, hashes, starts, stops),
        leader=leader,
        order=order,
        threshold=np.full(len(texts), THRESHOLD),
        protected=np.zeros(len(texts), np.bool_),
    )
    kept: list[int] = np.flatnonzero(keepers.keeper < 0).tolist()
    return kept


def _greedy(texts: Sequence[str], found: Iterable[Sequence[int]]) -> list[int]:
    """Rows that stay; ``found`` gives each row its candidates, of which earlier kept ones count."""
    sets: dict[int, set[str]] = {}  # of rows that were a candidate once

    def shingles_of(row: int) -> set[str]:
        if row not in sets:
            sets[row] = set(shingles(texts[row], SHINGLE))
        return sets[row]

    kept: list[int] = []
    dropped = set()
    for row, others in enumerate(found):
        for other in others:
            if other < row and other not in dropped:
                a, b = shingles_of(row), shingles_of(other)
                shared = len(a & b)
                if shared and shared >= THRESHOLD * (len(a) + len(b) - shared):
                    dropped.add(row)
                    sets.pop(row)
                    break
        else:
            kept.append(row)
    return kept


def with_datasketch(texts: Sequence[str], tuned: bool) -> list[int]:
    """Its LSH, and exact comparison of what that finds."""
    from datasketch import MinHash, MinHashLSH

    settings: dict[str, Any] = {}
    if tuned:
        import xxhash

        settings = {"hashfunc": xxhash.xxh32_intdigest, "scheme": "affine32"}
    lsh = MinHashLSH(num_perm=128, params=(32, 4))
    signatures = MinHash.generator(
        (encoded(text, SHINGLE) for text in texts), num_perm=128, **settings
    )

    def found() -> Iterable[Sequence[int]]:
        for row, signature in enumerate(signatures):
            yield sorted(lsh.query(signature))
            lsh.insert(row, signature, check_duplication=False)

    return _greedy(texts, found())


def with_rensa(texts: Sequence[str]) -> list[int]:
    """Its signatures, its LSH by batches, and the same comparison."""
    from rensa import RMinHash, RMinHashLSH

    lsh = RMinHashLSH(THRESHOLD, 128, 32)

    def found() -> Iterable[Sequence[int]]:
        for row in range(0, len(texts), 2048):
            sets = [shingles(text, SHINGLE) for text in texts[row : row + 2048]]
            digests = RMinHash.from_token_sets(sets, 128, 1)
            lsh.insert_pairs([(row + i, digest) for i, digest in enumerate(digests)])
            yield from (sorted(others) for others in lsh.query_all(digests))

    return _greedy(texts, found())


def with_fastsketch(texts: Sequence[str]) -> list[int]:
    """Its sketches, its LSH by batches, and the same comparison."""
    from FastSketchLSH import LSH, FastSimilaritySketch

    sketcher = FastSimilaritySketch(size=128, seed=1)
    lsh = LSH(num_perm=128, num_bands=32)

    def found() -> Iterable[Sequence[int]]:
        for row in range(0, len(texts), 2048):
            sets = [shingles(text, SHINGLE) for text in texts[row : row + 2048]]
            sketches = sketcher.batch(sets, num_threads=1)
            lsh.insert(sketches)
            flat, ends = lsh.query(sketches, format="csr")
            others, bounds = flat.tolist(), ends.tolist()
            yield from (sorted(others[i:j]) for i, j in pairwise(bounds))

    return _greedy(texts, found())


def command(folder: Path, out: Path, n_workers: int) -> int:
    """``auditor dedupe`` as it is, reading and writing shards; returns the rows kept."""
    from auditor.clean.engine import InProcess, Processes

    # As the command does: workers load what they need beside this process.
    engine = InProcess() if n_workers == 1 else Processes(n_workers)
    from auditor.clean.config import DedupeConfig
    from auditor.clean.dedupe import dedupe

    config = DedupeConfig(threshold=THRESHOLD, shingle=SHINGLE, repetition=False)
    return int(dedupe([folder], out, config=config, engine=engine).counts["rows_out"])


IN_MEMORY: Final = {
    "auditor, in memory": in_memory,
    "datasketch": lambda texts: with_datasketch(texts, tuned=False),
    "datasketch, tuned": lambda texts: with_datasketch(texts, tuned=True),
    "rensa": with_rensa,
    "fastsketchlsh": with_fastsketch,
}


def _seconds() -> float:
    """CPU seconds of this process and of children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _peak_megabytes() -> float:
    """Peak resident memory. Not ``ru_maxrss``: it starts from that of the process that forked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def main() -> None:
    way, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    started, loaded = time.perf_counter(), 0.0
    if way in IN_MEMORY:
        texts = load(folder)
        loaded = _seconds()
        rows = IN_MEMORY[way](texts)
        with out.open("wb") as file:
            for row in rows:
                file.write(orjson.dumps({"text": texts[row]}) + b"\n")
        n_kept = len(rows)
    else:
        n_kept = command(folder, out, 2 if way == "auditor, two cores" else 1)
    report = {
        "seconds": _seconds(),
        "loaded": loaded,
        "wall": time.perf_counter() - started,
        "megabytes": _peak_megabytes(),
        "kept": n_kept,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
