"""Signatures of texts by other packages, for ``dedupe.py``: the same shingles, 128 values each.

A side is a function of texts and a kind of shingles ("word5" or "char5"). It starts from Python
strings. Daft's own normalisation differs in a few signs: it takes out punctuation where we part
words at it. Packages that are not installed are left out, by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

Side = Callable[[Sequence[str], str], Any]


def elements(text: str, kind: str) -> list[str]:
    """Words or characters, by the normalisation of ``auditor.measure.sketch``."""
    lower = text.lower()
    return re.findall(r"\w+", lower) if kind == "word5" else list(" ".join(lower.split()))


def shingles(text: str, kind: str) -> list[str]:
    parts, glue = elements(text, kind), " " if kind == "word5" else ""
    count = max(len(parts) - 4, min(len(parts), 1))
    return [glue.join(parts[i : i + 5]) for i in range(count)]


def encoded(text: str, kind: str) -> list[bytes]:
    return [shingle.encode("utf-8", "surrogatepass") for shingle in shingles(text, kind)]


def _datasketch(**settings: Any) -> Side:
    from datasketch import MinHash

    def side(texts: Sequence[str], kind: str) -> Any:
        return MinHash.bulk((encoded(text, kind) for text in texts), num_perm=128, **settings)

    return side


def _datasketch_xxh32() -> Side:
    import xxhash

    return _datasketch(hashfunc=xxhash.xxh32_intdigest, scheme="affine32")


def ready(text: str, kind: str) -> str:
    """Words or characters with blanks between them, a blank itself written as another sign."""
    return " ".join(part.replace(" ", "\u2581") for part in elements(text, kind))


HASHING_ALONE: Final = "daft, hashing alone"
"""This side is given ``ready`` texts."""


def _daft(hashing_alone: bool) -> Side:
    os.environ["DO_NOT_TRACK"] = "1"
    from daft import Series, col, from_pydict

    def side(texts: Sequence[str], kind: str) -> Any:
        if hashing_alone or kind == "char5":
            # It has shingles of words only.
            texts = texts if hashing_alone else [ready(text, kind) for text in texts]
            return Series.from_pylist(texts).minhash(128, 5, 1, "xxhash")
        words = col("text").normalize(remove_punct=True, lowercase=True, white_space=True)
        sketch = words.minhash(num_hashes=128, ngram_size=5, seed=1, hash_function="xxhash")
        return from_pydict({"text": texts}).select(sketch).collect()

    return side


def _gaoya() -> Side:
    from gaoya.minhash import MinHashStringIndex

    def side(texts: Sequence[str], kind: str) -> Any:
        # It offers no signatures by themselves: this is the time of its index.
        index = MinHashStringIndex(
            hash_size=32,
            num_bands=32,
            band_size=4,
            analyzer="word" if kind == "word5" else "char",
            lowercase=True,
            ngram_range=(5, 5),
            id_container="vec",
        )
        for i, text in enumerate(texts):
            index.insert_document(i, text)

    return side


def _rensa() -> Side:
    from rensa import RMinHash

    return lambda texts, kind: RMinHash.digest_matrix_from_token_sets(
        [shingles(text, kind) for text in texts], 128, 1
    )


def _fastsketch() -> Side:
    from FastSketchLSH import FastSimilaritySketch

    sketcher = FastSimilaritySketch(size=128, seed=1)
    return lambda texts, kind: sketcher.batch(
        [shingles(text, kind) for text in texts], num_threads=1
    )


def _datatrove() -> Side:
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.hashing import create_hash_func

    # Without its constructor, which loads a tokenizer: the shingles are given.
    step = MinhashDedupSignature.__new__(MinhashDedupSignature)
    step.config = MinhashConfig(num_buckets=32, hashes_per_bucket=4)
    step.num_hashes, step._parameters = 128, None
    function = create_hash_func(step.config.hash_config)

    def side(texts: Sequence[str], kind: str) -> Any:
        for text in texts:
            hashes = np.fromiter(map(function, encoded(text, kind)), np.uint64).reshape(-1, 1)
            if len(hashes):
                step.get_signature(hashes)

    return side


def _text_dedup() -> Side:
    from text_dedup.config.algorithms.minhash import MinHashAlgorithmConfig

    config = MinHashAlgorithmConfig(
        algorithm_name="minhash",
        text_column="text",
        num_perm=128,
        bands=32,
        rows=4,
        ngram_size=5,
        min_length=1,
        threshold=0.8,
    )
    embed = config.get_embed_func()

    def side(texts: Sequence[str], kind: str) -> Any:
        for text in texts:
            embed([text if kind == "word5" else " ".join(elements(text, kind))], [0])

    return side


PEERS: dict[str, Callable[[], Side]] = {
    "datasketch": lambda: _datasketch(),
    "datasketch, xxh32": _datasketch_xxh32,
    "daft": lambda: _daft(hashing_alone=False),
    HASHING_ALONE: lambda: _daft(hashing_alone=True),
    "gaoya": _gaoya,
    "rensa": _rensa,
    "fastsketchlsh": _fastsketch,
    "datatrove": _datatrove,
    "text-dedup": _text_dedup,
}


def installed(left_out: Callable[[str, Exception], None]) -> dict[str, Side]:
    """The sides whose package is there; ``left_out`` is told of the others."""
    found = {}
    for name, make in PEERS.items():
        try:
            found[name] = make()
        except ImportError as error:
            left_out(name, error)
    return found
