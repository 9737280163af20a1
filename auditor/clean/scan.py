"""One pass over the shards: what cleaning must know of every row, without holding its content.

About 600 bytes per row at 128 permutations. The content of rows that may be near-duplicates is read
a second time, by ``shingle_hashes``, into a temporary file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from auditor.clean.row import Reading, Row
from auditor.clean.shards import Shard
from auditor.errors import ShardError
from auditor.measure.repetition import FLAG_REPEATS, character_ids, repetition_batch, word_ids
from auditor.measure.sketch import (
    choose_shingle,
    exact_hash_text,
    exact_hash_tokens,
    pack_tokens,
    shingle_hashes_text,
    shingle_hashes_tokens,
    signatures_text,
    signatures_tokens,
)

Progress = Callable[[str, int, int], None]

REPETITIVE_SHARE: Final = 0.5
"""Share of a sample covered by consecutive repeats from which it counts as repetitive."""

REPETITIVE_ELEMENTS: Final = 16
"""Words, characters or ids from which that share is judged: shorter is a title or a chant."""

_BATCH_ROWS = 512


class ScanConfig(Protocol):
    """The settings that a scan depends on."""

    @property
    def shingle(self) -> str: ...
    @property
    def n_permutations(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def repetition(self) -> bool: ...
    @property
    def content(self) -> str | None: ...
    @property
    def on_error(self) -> Literal["raise", "skip"]: ...


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Facts of all rows in input order; **N** rows, **P** permutations.

    ``starts`` i64 [n_shards + 1]: shard i has rows ``starts[i]`` to ``starts[i + 1]``.
    """

    starts: NDArray[np.int64]
    sample_ids: list[str]
    sources: list[str]
    exact: NDArray[np.int64]  # [N] hash of the normalised content
    lengths: NDArray[np.int64]  # [N] characters or tokens
    signatures: NDArray[np.uint32]  # [N, P]
    readable: NDArray[np.bool_]  # [N]
    has_content: NDArray[np.bool_]  # [N]
    repetitive: NDArray[np.bool_]  # [N]

    @property
    def shard_of(self) -> NDArray[np.int64]:
        """Shard number of each row, i64 [N]."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


def scan(shards: Sequence[Shard], config: ScanConfig, progress: Progress) -> Scan:
    """Read every shard once. Raises ``ShardError`` for what cannot be read."""
    parts: list[dict[str, Any]] = []
    starts = [0]
    sample_ids: list[str] = []
    sources: list[str] = []
    for i, shard in enumerate(shards):
        progress("read", i, len(shards))
        n = 0
        batch: list[Row] = []
        for row in _rows(shard, config):
            sample_ids.append(row.sample_id if row.sample_id is not None else f"{shard.name}:{n}")
            sources.append(row.source if row.source is not None else shard.stem)
            n += 1
            batch.append(row)
            if len(batch) == _BATCH_ROWS:
                parts.append(_measure(batch, shard, config))
                batch = []
        parts.append(_measure(batch, shard, config))
        starts.append(starts[-1] + n)
    progress("read", len(shards), len(shards))
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Scan(starts=np.array(starts), sample_ids=sample_ids, sources=sources, **arrays)


def shingle_hashes(
    shards: Sequence[Shard],
    starts: NDArray[np.int64],
    rows: NDArray[np.int64],
    config: ScanConfig,
    folder: Path | None,
    progress: Progress,
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """Distinct 64-bit shingle hashes, sorted, of the given rows (i64, ascending).

    Returns the hashes as a memory map of a nameless temporary file in ``folder`` and, over all N
    rows, where a row's hashes start and stop: u64 [total], i64 [N], i64 [N].
    """
    begin = np.zeros(int(starts[-1]), np.int64)
    end = np.zeros(int(starts[-1]), np.int64)
    total = 0
    with tempfile.TemporaryFile(dir=folder) as file:
        for i, shard in enumerate(shards):
            progress("verify", i, len(shards))
            low, high = np.searchsorted(rows, starts[i : i + 2])
            wanted = set((rows[low:high] - starts[i]).tolist())
            for n, row in enumerate(_rows(shard, config) if wanted else ()):
                if n in wanted:
                    hashes = np.unique(_hashes(row.content, config.shingle))
                    file.write(hashes.tobytes())
                    begin[starts[i] + n] = total
                    total += len(hashes)
                    end[starts[i] + n] = total
        progress("verify", len(shards), len(shards))
        file.flush()
        if not total:
            return np.empty(0, np.uint64), begin, end
        # The map holds the file open, and the file vanishes with it.
        return np.memmap(file, np.uint64, "r").view(np.ndarray), begin, end


def _rows(shard: Shard, config: ScanConfig) -> Any:
    return shard.rows(Reading(content=config.content, on_error=config.on_error))


def _hashes(content: Any, shingle: str) -> NDArray[np.uint64]:
    if isinstance(content, str):
        return shingle_hashes_text(content, shingle, bits=64)  # type: ignore[arg-type]
    if content is None:
        return np.empty(0, np.uint64)
    return shingle_hashes_tokens(content, bits=64)


def _measure(batch: list[Row], shard: Shard, config: ScanConfig) -> dict[str, NDArray[Any]]:
    n = len(batch)
    exact = np.zeros(n, np.int64)
    signatures = np.full((n, config.n_permutations), 0xFFFFFFFF, np.uint32)
    repetitive = np.zeros(n, np.bool_)
    texts = [i for i, row in enumerate(batch) if isinstance(row.content, str)]
    tokens = [i for i, row in enumerate(batch) if isinstance(row.content, np.ndarray)]
    _check_shingle(bool(texts), bool(tokens), shard, config)
    elements: list[NDArray[np.int64]] = []
    if texts:
        contents: list[Any] = [batch[i].content for i in texts]
        exact[texts] = [exact_hash_text(text) for text in contents]
        shingle: Any = config.shingle
        signatures[texts] = signatures_text(contents, shingle, config.n_permutations, config.seed)
        if config.repetition:
            elements += [_elements(text, shingle) for text in contents]
    if tokens:
        contents = [batch[i].content for i in tokens]
        exact[tokens] = [exact_hash_tokens(ids) for ids in contents]
        signatures[tokens] = signatures_tokens(contents, config.n_permutations, config.seed)
        if config.repetition:
            elements += contents
    if elements:
        values, offsets = pack_tokens(elements)
        share, repeats = repetition_batch(values, offsets)
        long_enough = np.diff(offsets) >= REPETITIVE_ELEMENTS
        repetitive[texts + tokens] = (repeats >= FLAG_REPEATS) | (
            (share >= REPETITIVE_SHARE) & long_enough
        )
    return {
        "exact": exact,
        "lengths": np.array(
            [0 if row.content is None else len(row.content) for row in batch], np.int64
        ),
        "signatures": signatures,
        "readable": np.array([row.readable for row in batch], np.bool_),
        "has_content": np.array([row.content is not None for row in batch], np.bool_),
        "repetitive": repetitive,
    }


def _elements(text: str, shingle: str) -> NDArray[np.int64]:
    chosen = choose_shingle(text) if shingle == "auto" else shingle
    return word_ids(text) if chosen == "word5" else character_ids(text)


def _check_shingle(texts: bool, tokens: bool, shard: Shard, config: ScanConfig) -> None:
    if texts and config.shingle == "token5":
        raise ShardError(
            "holds text, and token5 shingles need token ids",
            path=shard.path,
            remedy="Use --shingle auto, word5 or char5, or name a column of ids with --content",
        )
    if tokens and config.shingle in ("word5", "char5"):
        raise ShardError(
            f"holds token ids, and {config.shingle} shingles need text",
            path=shard.path,
            remedy="Use --shingle auto or token5, or name a column of text with --content",
        )
