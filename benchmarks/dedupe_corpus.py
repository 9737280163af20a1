"""Texts for ``dedupe.py``: real sentences put together anew, with near-duplicates planted.

A small corpus does not give the sizes at which deduplication costs anything, and repeated it would
be duplicates throughout. So documents are drawn sentence by sentence, each from one source, with
lengths like those of web pages, and a known share are copies of earlier ones with some sentences
changed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from auditor.clean.shards import find_shards

EXACT_SHARE: Final = 0.05
NEAR_SHARE: Final = 0.15
_CHARACTERS: Final = (7.4, 0.8)  # of the lognormal length: median 1,600, mean 2,250


def read_texts(paths: Sequence[Path], n_bytes: int | None = None) -> dict[str, list[str]]:
    """Texts by source, the first ``n_bytes`` of them if given."""
    found: dict[str, list[str]] = {}
    total = 0
    for shard in find_shards([*map(str, paths)]).shards:
        for row in shard.rows():
            if isinstance(row.content, str):
                found.setdefault(row.source or shard.stem, []).append(row.content)
                total += len(row.content.encode("utf-8", "surrogatepass"))
                if n_bytes is not None and total >= n_bytes:
                    return found
    return found


def random_texts(n_bytes: int) -> dict[str, list[str]]:
    """Sentences of 4 to 30 words of 2 to 9 letters, with Zipf-like frequencies."""
    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(generator.choice(letters, generator.integers(2, 10))) for _ in range(20_000)]
    texts: list[str] = []
    total = 0
    while total < n_bytes:
        sentences = []
        for n in generator.integers(4, 31, 12):
            ranks = np.minimum(generator.zipf(1.3, n), len(words)) - 1
            sentences.append(" ".join(words[rank] for rank in ranks).capitalize() + ".")
        texts.append("\n".join(sentences))
        total += len(texts[-1])
    return {"random": texts}


def sentences(text: str) -> list[str]:
    """Sentences and lines of a text, without the empty ones."""
    return [part for part in re.split(r"(?<=[.!?。!?])\s+|\n+", text) if part.strip()]


def recombined(sources: dict[str, list[str]], n_bytes: int, seed: int = 1) -> Iterator[str]:
    """Documents of about ``n_bytes`` of UTF-8 together; the same for the same input and seed."""
    generator = random.Random(seed)
    pools = [[part for text in texts for part in sentences(text)] for texts in sources.values()]
    weights = [sum(map(len, pool)) for pool in pools]
    earlier: list[tuple[list[str], list[str]]] = []  # a sample of documents, and their pools
    total = 0
    while total < n_bytes:
        draw = generator.random()
        if earlier and draw < EXACT_SHARE + NEAR_SHARE:
            parts, pool = generator.choice(earlier)
            if draw >= EXACT_SHARE:
                changed = generator.uniform(0, 0.25)
                parts = [
                    generator.choice(pool) if generator.random() < changed else part
                    for part in parts
                ]
        else:
            pool = generator.choices(pools, weights)[0]
            parts, left = [], int(generator.lognormvariate(*_CHARACTERS))
            while left > 0:
                parts.append(generator.choice(pool))
                left -= len(parts[-1])
            if len(earlier) < 20_000:
                earlier.append((parts, pool))
            else:
                earlier[generator.randrange(20_000)] = (parts, pool)
        text = "\n".join(parts)
        total += len(text.encode("utf-8", "surrogatepass"))
        yield text


def write_shards(texts: Sequence[str], folder: Path, n_shards: int = 16) -> None:
    """Write texts as JSONL shards, in order."""
    folder.mkdir(parents=True)
    per_shard = -(-len(texts) // n_shards)
    for number in range(n_shards):
        with (folder / f"texts-{number:03d}.jsonl").open("w", encoding="utf-8") as file:
            for text in texts[number * per_shard : (number + 1) * per_shard]:
                file.write(json.dumps({"text": text}) + "\n")
