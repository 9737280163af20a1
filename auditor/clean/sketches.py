"""Sketches of a corpus, made once: training then looks them up instead of making them again.

    signatures/
      signatures.json   version, normalisation, counts; of each shard path, bytes, SHA-256, rows
      keys.npy          i64 [N], hashes of the rows' ids, ascending
      sketches.npy      i64 [N, WORDS], compact sketches of the rows in that order

A row is found by its id, so rows without an id column are left out and counted. 280 bytes a row.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from auditor.clean.row import Reading, Row
from auditor.clean.shards import Shard, check_out, find_shards
from auditor.errors import ShardError
from auditor.files import atomic, sha256_of
from auditor.measure.compact import compact
from auditor.measure.sketch import NORMALISATION_VERSION, exact_hash
from auditor.schema import ID_COLUMNS, SKETCHES_VERSION

_BATCH_ROWS: Final = 512


def sketch(
    inputs: Sequence[str | Path],
    out: Path,
    *,
    content: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Sketch every row of the shards into the folder ``out``; returns what its JSON says.

    Raises:
        ShardError: an input cannot be read, no row has an id, or ``out`` is not a new folder.
    """
    found = find_shards(inputs)
    check_out(out, found)
    tell = progress or (lambda *_: None)
    keys: list[NDArray[np.int64]] = []
    sketches: list[NDArray[np.int64]] = []
    shards: list[dict[str, Any]] = []
    n_without_id = 0
    for number, shard in enumerate(found.shards):
        tell("sketch", number, len(found.shards))
        n_rows = 0
        with shard.local(Path(tempfile.gettempdir())) as local:
            for rows in _batches(local, content):
                n_rows += len(rows)
                named = [row for row in rows if row.sample_id is not None]
                n_without_id += len(rows) - len(named)
                if named:
                    ids = [str(row.sample_id).encode() for row in named]
                    keys.append(np.asarray([exact_hash(one) for one in ids]))
                    sketches.append(compact([row.content for row in named]))
            shards.append(
                {
                    "path": str(shard.path),
                    "bytes": sum(file.stat().st_size for file in local.files()),
                    "sha256": sha256_of(local.files()),
                    "rows": n_rows,
                }
            )
    tell("sketch", len(found.shards), len(found.shards))
    if not keys:
        raise ShardError(
            "no row has an id to look it up by",
            path=found.shards[0].path,
            remedy=f"Give the rows one of the columns {', '.join(ID_COLUMNS)}",
        )
    # Of rows with one id the first counts; a stable sort keeps it first.
    all_keys, first = np.unique(np.concatenate(keys), return_index=True)
    document = {
        "schema_version": SKETCHES_VERSION,
        "normalisation": NORMALISATION_VERSION,
        "n_rows": len(all_keys),
        "n_without_id": n_without_id,
        "n_repeated_ids": sum(map(len, keys)) - len(all_keys),
        "shards": shards,
    }
    rows_of = np.concatenate(sketches)
    for name, array in (("keys", all_keys), ("sketches", rows_of[first])):
        with atomic(out / f"{name}.npy") as file:
            np.save(file, array)
    with atomic(out / "signatures.json") as file:  # last: a folder with it is whole
        file.write(json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n")
    return document


def _batches(shard: Shard, content: str | None) -> Iterator[list[Row]]:
    rows = shard.rows(Reading(content=content))
    while batch := list(islice(rows, _BATCH_ROWS)):
        yield batch
