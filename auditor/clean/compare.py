"""Second stage: which rows are how similar, exactly.

Signatures propose pairs; shingle hashes of the rows in them, read a second time, decide. On disk
the hashes take 8 bytes per distinct shingle of those rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from auditor.clean.config import DedupeConfig
from auditor.clean.duplicates import Candidates, candidates, union, verify_pairs
from auditor.clean.engine import Engine, Progress, told
from auditor.clean.row import Row
from auditor.clean.scan import Scan, batches, changed, mapped
from auditor.clean.shards import Shard
from auditor.clean.work import damaged
from auditor.files import append, atomic, sha256_of
from auditor.measure.facts import distinct_hashes, distinct_hashes_tokens

_ROWS_FOR_ONE_TASK: Final = 50_000
"""Rows up to which all bands are one task: a process costs more than it saves."""

_BANDS_OF_A_TASK: Final = 4


@dataclass(frozen=True, kw_only=True)
class PairTask:
    """Some bands of all leaders, which ``leaders`` (raw i64) holds in keep order."""

    signatures: Path
    leaders: Path
    bands: range
    config: DedupeConfig


@dataclass(frozen=True, kw_only=True)
class HashTask:
    """Rows of a shard (i64, ascending) to hash; ``base`` is what is written, less its extension."""

    shard: Shard
    sha256: str
    base: Path
    rows: NDArray[np.int64]
    config: DedupeConfig


def compare(
    shards: Sequence[Shard],
    facts: Scan,
    leaders: NDArray[np.int64],
    config: DedupeConfig,
    engine: Engine,
    work: Path,
    tell: Progress,
) -> tuple[Candidates, NDArray[np.float64]]:
    """Pairs of leaders (i64, in keep order) that may be similar, and how similar they are.

    Exact Jaccard similarity of their shingles as sets, f64 [M].
    """
    found = _propose(facts, leaders, config, engine, work, tell)
    needed = np.unique(found.pairs)
    low = np.searchsorted(needed, facts.starts)
    numbers = np.flatnonzero(np.diff(low)).tolist()
    tasks = [
        HashTask(
            shard=shards[i],
            sha256=facts.shards[i].sha256,
            base=work / "hashes" / facts.bases[i].name,
            rows=needed[low[i] : low[i + 1]] - facts.starts[i],
            config=config,
        )
        for i in numbers
    ]
    n_bytes = [facts.shards[i].n_bytes for i in numbers]
    ends = engine.map(hash_rows, tasks, told("compare", n_bytes, tell))
    hashes, offsets = _join(work / "hashes", tasks, ends)
    positions = np.searchsorted(needed, found.pairs)
    return found, verify_pairs(positions, hashes, offsets[:-1], offsets[1:])


def pair_bands(task: PairTask) -> Candidates:
    """Stage: plausible pairs of some bands."""
    config = task.config
    signatures = mapped(task.signatures, np.uint32).reshape(-1, config.n_permutations)
    return candidates(
        signatures,
        mapped(task.leaders, np.int64),
        bands=config.bands,
        of_bands=task.bands,
        threshold=config.lowest_threshold,
    )


def hash_rows(task: HashTask) -> NDArray[np.int64]:
    """Stage: distinct sorted shingle hashes of some rows of a shard, one row after the other.

    Writes them raw, u64, and returns where each row's end, i64 [n_rows]. Raises ``ShardError``
    where the shard is not what it was when it was scanned.
    """
    counted, hashed = task.base.with_suffix(".ends.npy"), task.base.with_suffix(".hashes")
    done = _found(task)
    if done is not None:
        return done
    wanted = np.zeros(task.rows.max() + 1, np.bool_)
    wanted[task.rows] = True
    ends = [np.zeros(1, np.int64)]
    with task.shard.local(task.base.parent) as shard, atomic(hashed) as file:
        if sha256_of(shard.files()) != task.sha256:
            raise changed(task.shard)
        rows = shard.rows(replace(task.config.reading, wanted=wanted))
        for batch in batches(
            row for row, is_wanted in zip(rows, wanted, strict=False) if is_wanted
        ):
            hashes, offsets = _hashes(batch, task.config)
            file.write(hashes.tobytes())
            ends.append(ends[-1][-1] + offsets[1:])
    result = np.concatenate(ends)[1:]
    if len(result) != len(task.rows):
        raise changed(task.shard)
    with atomic(counted) as file:
        np.save(file, result)
    return result


def _found(task: HashTask) -> NDArray[np.int64] | None:
    """What an earlier call returned, None where a file of it is missing or cut off."""
    try:
        ends: NDArray[np.int64] = np.load(task.base.with_suffix(".ends.npy"))
    except (FileNotFoundError, ValueError, EOFError):
        return None
    hashed = task.base.with_suffix(".hashes")
    # The hashes of all shards may be one file already.
    if len(ends) != len(task.rows) or not (
        hashed.stat().st_size == 8 * ends[-1]
        if hashed.exists()
        else hashed.with_name("hashes").exists()
    ):
        return None
    return ends


def _propose(
    facts: Scan,
    leaders: NDArray[np.int64],
    config: DedupeConfig,
    engine: Engine,
    work: Path,
    tell: Progress,
) -> Candidates:
    path = work / "leaders"
    with atomic(path) as file:
        file.write(leaders.tobytes())
    step = config.bands if len(leaders) <= _ROWS_FOR_ONE_TASK else _BANDS_OF_A_TASK
    tasks = [
        PairTask(
            signatures=work / "scan" / "signatures",
            leaders=path,
            bands=range(low, min(low + step, config.bands)),
            config=config,
        )
        for low in range(0, config.bands, step)
    ]
    if len(tasks) == 1:
        return pair_bands(tasks[0])
    results = engine.map(pair_bands, tasks, told("pair", [1] * len(tasks), tell))
    return union(results, len(facts.exact))


def _hashes(batch: list[Row], config: DedupeConfig) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    contents: list[Any] = [row.content for row in batch]
    if all(isinstance(one, str) for one in contents):
        return distinct_hashes(contents, config.shingle)  # type: ignore[arg-type]
    if all(isinstance(one, np.ndarray) for one in contents):
        return distinct_hashes_tokens(contents)
    parts = [_hashes([row], config) for row in batch]
    offsets = np.cumsum([0, *(len(hashes) for hashes, _ in parts)])
    return np.concatenate([hashes for hashes, _ in parts]), offsets


def _join(
    folder: Path, tasks: Sequence[HashTask], ends: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The hashes of all shards as one file, and where each row's start, i64 [n + 1]."""
    offsets = [np.zeros(1, np.int64)]
    for part in ends:
        offsets.append(offsets[-1][-1] + part)
    if not tasks:
        return np.empty(0, np.uint64), offsets[0]
    whole = folder / "hashes"
    if not whole.is_file():
        with atomic(whole) as file:
            for task in tasks:
                append(task.base.with_suffix(".hashes"), file)
        for task in tasks:
            task.base.with_suffix(".hashes").unlink()
    if whole.stat().st_size != 8 * offsets[-1][-1]:
        raise damaged(whole)
    return mapped(whole, np.uint64), np.concatenate(offsets)
