"""First stage: one pass over each shard, to know of every row what cleaning must know.

Of a shard the work folder then holds

    scan/000012.json            a ``Scanned``, and the bytes of the others; written last
    scan/000012.identities      Parquet: ``sample_id`` and ``source`` of each row
    scan/000012.facts           npz: the arrays of ``Scan``, of the shard's rows
    scan/000012.signatures      u32 [n_rows, P], raw

and no content. In memory are the facts of all rows, about 30 bytes each; signatures stay on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from auditor.clean.columns import strings
from auditor.clean.config import REPETITIVE_ELEMENTS, DedupeConfig
from auditor.clean.row import Finding, Row
from auditor.clean.shards import Shard
from auditor.clean.work import damaged, read_json, write_json
from auditor.errors import ShardError
from auditor.files import append, atomic, sha256_of
from auditor.measure.facts import Facts, facts_of_texts, facts_of_tokens
from auditor.measure.repetition import FLAG_REPEATS

_BATCH_ROWS: Final = 512

_BATCH_ELEMENTS: Final = 1 << 22
"""Characters or token ids that end a batch of fewer rows: memory goes by rows, not by text."""

_ENDS: Final = (".facts", ".identities", ".signatures")

_IDENTITIES: Final = pa.schema([("sample_id", pa.string()), ("source", pa.string())])


@dataclass(frozen=True, kw_only=True)
class ScanTask:
    """A shard to scan; ``base`` is the path of what is written, without its extension."""

    shard: Shard
    base: Path
    config: DedupeConfig


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """What is known of a shard as a whole."""

    n_rows: int
    n_bytes: int
    sha256: str
    findings: list[Finding]


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Facts of all rows in input order; **N** rows, **P** permutations.

    ``starts`` i64 [n_shards + 1]: shard i has rows ``starts[i]`` to ``starts[i + 1]``.
    """

    shards: list[Scanned]
    bases: list[Path]
    starts: NDArray[np.int64]
    signatures: NDArray[np.uint32]  # [N, P], on disk
    exact: NDArray[np.int64]  # [N] hash of the normalised content
    lengths: NDArray[np.int64]  # [N] characters or tokens
    quality: NDArray[np.float64]  # [N] value of the quality column, nan where there is none
    readable: NDArray[np.bool_]  # [N]
    has_content: NDArray[np.bool_]  # [N]
    repetitive: NDArray[np.bool_]  # [N]

    @property
    def shard_of(self) -> NDArray[np.int64]:
        """Shard number of each row, i64 [N]."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def identities(self, number: int) -> pa.Table:
        """Columns ``sample_id`` and ``source`` (str) of a shard's rows, in order."""
        # read_table would import pandas, which takes longer than all of these files together.
        with pq.ParquetFile(self.bases[number].with_suffix(".identities")) as file:
            return file.read()


def scan_shard(task: ScanTask) -> Scanned:
    """Stage: read one shard once. Raises ``ShardError`` for what cannot be read."""
    done = _found(task.base)
    if done is not None:
        return done
    task.base.parent.mkdir(parents=True, exist_ok=True)
    findings: list[Finding] = []
    with task.shard.local(task.base.parent) as shard:
        before = shard.stamps()
        facts = _scan_rows(shard, task, findings)
        digest = sha256_of(shard.files())
        if shard.stamps() != before:
            raise changed(task.shard)
        scanned = Scanned(
            n_rows=len(facts["exact"]),
            n_bytes=sum(size for size, _ in before),
            sha256=digest,
            findings=findings,
        )
    with atomic(task.base.with_suffix(".facts")) as file:
        np.savez(file, **facts)  # type: ignore[arg-type]
    sizes = {end: task.base.with_suffix(end).stat().st_size for end in _ENDS}
    write_json(task.base.with_suffix(".json"), {"scanned": asdict(scanned), "sizes": sizes})
    return scanned


def join_scans(scanned: Sequence[Scanned], bases: Sequence[Path], config: DedupeConfig) -> Scan:
    """The facts of all shards as one. The signatures of the shards become one file."""
    starts = np.cumsum([0, *(one.n_rows for one in scanned)])
    parts = [np.load(base.with_suffix(".facts")) for base in bases]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0].files}
    signatures = bases[0].with_name("signatures")
    if not signatures.is_file():
        with atomic(signatures) as whole:
            for base in bases:
                append(base.with_suffix(".signatures"), whole)
        for base in bases:
            base.with_suffix(".signatures").unlink()
    shape = (int(starts[-1]), config.n_permutations)
    if signatures.stat().st_size != 4 * shape[0] * shape[1]:
        raise damaged(signatures)
    return Scan(
        shards=list(scanned),
        bases=list(bases),
        starts=starts,
        signatures=mapped(signatures, np.uint32).reshape(shape),
        **arrays,
    )


def mapped(path: Path, dtype: Any) -> NDArray[Any]:
    """A file of raw values, read-only and on disk; a file of no bytes is an empty array."""
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r").view(np.ndarray)


def changed(shard: Shard) -> ShardError:
    """The error for a shard that is not what it was when it was scanned."""
    return ShardError(
        "changed while it was being cleaned",
        path=shard.path,
        remedy="Remove the output folder and start again when nothing writes to the inputs",
    )


def batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows in lists of a size that kernels like."""
    batch: list[Row] = []
    n_elements = 0
    for row in rows:
        batch.append(row)
        n_elements += 0 if row.content is None else len(row.content)
        if len(batch) == _BATCH_ROWS or n_elements >= _BATCH_ELEMENTS:
            yield batch
            batch, n_elements = [], 0
    if batch:
        yield batch


def check_shingle(contents: Sequence[Any], shard: Shard, config: DedupeConfig) -> None:
    """Raise ``ShardError`` where the shingle of the settings does not fit the content."""
    if config.shingle == "token5" and any(isinstance(one, str) for one in contents):
        raise ShardError(
            "holds text, and token5 shingles need token ids",
            path=shard.path,
            remedy="Use --shingle auto, word5 or char5, or name a column of ids with --content",
        )
    if config.shingle in ("word5", "char5") and any(
        isinstance(one, np.ndarray) for one in contents
    ):
        raise ShardError(
            f"holds token ids, and {config.shingle} shingles need text",
            path=shard.path,
            remedy="Use --shingle auto or token5, or name a column of text with --content",
        )


def _found(base: Path) -> Scanned | None:
    """What an earlier call knows of a shard, None where a file of it is missing or cut off."""
    done = read_json(base.with_suffix(".json"))
    if done is None:
        return None
    for end, size in done["sizes"].items():
        path = base.with_suffix(end)
        # The signatures of all shards may be one file already.
        if end == ".signatures" and not path.exists() and base.with_name("signatures").exists():
            continue
        if not path.exists() or path.stat().st_size != size:
            return None
    scanned = done["scanned"]
    return Scanned(**{**scanned, "findings": [Finding(*one) for one in scanned["findings"]]})


def _scan_rows(shard: Shard, task: ScanTask, findings: list[Finding]) -> dict[str, NDArray[Any]]:
    """Write signatures and identities batch by batch; returns the facts."""
    config = task.config
    parts = [_measure([], config)[0]]
    n_rows = 0
    with (
        atomic(task.base.with_suffix(".signatures")) as signatures,
        atomic(task.base.with_suffix(".identities")) as file,
        pq.ParquetWriter(file, _IDENTITIES, compression="zstd") as identities,
    ):
        for batch in batches(shard.rows(config.reading, findings)):
            check_shingle([row.content for row in batch], shard, config)
            facts, signed = _measure(batch, config)
            parts.append(facts)
            signatures.write(signed.tobytes())
            ids = [
                f"{shard.name}:{n_rows + i}" if row.sample_id is None else row.sample_id
                for i, row in enumerate(batch)
            ]
            sources = [shard.stem if row.source is None else row.source for row in batch]
            columns = [strings(ids), strings(sources)]
            identities.write_table(pa.Table.from_arrays(columns, schema=_IDENTITIES))
            n_rows += len(batch)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _measure(
    batch: list[Row], config: DedupeConfig
) -> tuple[dict[str, NDArray[Any]], NDArray[np.uint32]]:
    n = len(batch)
    exact = np.zeros(n, np.int64)
    signatures = np.full((n, config.n_permutations), 0xFFFFFFFF, np.uint32)
    repetitive = np.zeros(n, np.bool_)

    def put(rows: list[int], facts: Facts) -> None:
        exact[rows] = facts.exact
        signatures[rows] = facts.signatures
        judged = (facts.share >= config.repetitive_share) & (
            facts.n_elements >= REPETITIVE_ELEMENTS
        )
        repetitive[rows] = config.repetition & (judged | (facts.repeats >= FLAG_REPEATS))

    drawn = (config.n_permutations, config.seed)
    if texts := [i for i, row in enumerate(batch) if isinstance(row.content, str)]:
        contents: list[Any] = [batch[i].content for i in texts]
        shingle: Any = config.shingle
        put(texts, facts_of_texts(contents, shingle, *drawn, repetition=config.repetition))
    if tokens := [i for i, row in enumerate(batch) if isinstance(row.content, np.ndarray)]:
        contents = [batch[i].content for i in tokens]
        put(tokens, facts_of_tokens(contents, *drawn, repetition=config.repetition))
    lengths = [0 if row.content is None else len(row.content) for row in batch]
    return {
        "exact": exact,
        "lengths": np.array(lengths, np.int64),
        "quality": np.array([_number(row.columns) for row in batch], np.float64),
        "readable": np.array([row.readable for row in batch], np.bool_),
        "has_content": np.array([row.content is not None for row in batch], np.bool_),
        "repetitive": repetitive,
    }, signatures


def _number(columns: tuple[Any, ...]) -> float:
    """The quality of a row, nan where its column holds no number."""
    value = columns[0] if columns else None
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:  # JSON knows integers of any size
        return float("nan")
