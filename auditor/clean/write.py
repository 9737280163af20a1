"""Last stage: the cleaned copy of each shard, and the table of what became of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from auditor.clean.columns import chosen, numbers
from auditor.clean.decide import KEPT, REASONS, Decisions
from auditor.clean.row import Cuts, Reading
from auditor.clean.scan import Scan, changed
from auditor.clean.shards import Shard
from auditor.clean.work import read_json, write_json
from auditor.errors import ShardError
from auditor.files import atomic, sha256_of
from auditor.schema import ROWS

_ARROW: Final = {"str": pa.string(), "i64": pa.int64(), "f32": pa.float32()}
_ROWS: Final = pa.schema([(name, _ARROW[kind]) for name, kind in ROWS.items()])


@dataclass(frozen=True, kw_only=True)
class WriteTask:
    """A shard to write to ``child``; bool [n_rows]: which rows stay."""

    shard: Shard
    sha256: str
    keep: NDArray[np.bool_]
    child: Path
    journal: Path
    reading: Reading
    cuts: Cuts


@dataclass(frozen=True)
class Written:
    """The cleaned copy of a shard: SHA-256 of its file, or of its files, and their bytes."""

    sha256: str
    n_bytes: int


def write_shard(task: WriteTask) -> Written:
    """Stage: copy the rows of a shard that stay.

    Raises ``ShardError`` where the shard is not what it was when it was scanned.
    """
    plan = sha256(task.keep.tobytes() + repr(sorted(task.cuts.items())).encode()).hexdigest()
    done = read_json(task.journal)
    if done is not None and done["plan"] == plan and _sha256(task) == done["sha256"]:
        return Written(done["sha256"], done["n_bytes"])
    with task.shard.local(task.journal.parent) as shard:
        if sha256_of(shard.files()) != task.sha256:
            raise changed(task.shard)
        shard.copy(task.child, task.keep, task.reading, task.cuts)
    files = Shard(task.child, task.shard.name).files()
    written = Written(sha256_of(files), sum(file.stat().st_size for file in files))
    write_json(task.journal, {"plan": plan, "sha256": written.sha256, "n_bytes": written.n_bytes})
    return written


def _sha256(task: WriteTask) -> str | None:
    """SHA-256 of a child that is there already, None where it is not or is damaged."""
    try:
        return sha256_of(Shard(task.child, task.shard.name).files())
    except (OSError, ShardError):
        return None


def write_rows(path: Path, shards: Sequence[Shard], facts: Scan, decisions: Decisions) -> None:
    """Write ``rows.parquet``, columns of ``schema.ROWS``, one row group or more per shard."""
    names = [shard.name for shard in shards]
    reasons = [reason or "" for reason in REASONS]
    with (
        atomic(path) as file,
        pq.ParquetWriter(file, _ROWS, compression="zstd") as writer,
    ):
        for number in range(len(shards)):
            span = slice(facts.starts[number], facts.starts[number + 1])
            identities = facts.identities(number)
            reason, cluster = decisions.reason[span].astype(np.int64), decisions.cluster[span]
            keeper = decisions.keeper[span]
            has_keeper = keeper >= 0
            of_shard = np.searchsorted(facts.starts, keeper, "right") - 1
            of_shard[~has_keeper] = -1
            columns = {
                "shard": chosen(names, np.full(len(keeper), number)),
                "row": numbers(np.arange(len(keeper))),
                "sample_id": identities.column("sample_id"),
                "source": identities.column("source"),
                "decision": chosen(["kept", "dropped"], (reason != KEPT).astype(np.int64)),
                "reason": chosen(reasons, np.where(reason == KEPT, -1, reason)),
                "cluster": numbers(cluster, cluster >= 0),
                "keeper_shard": chosen(names, of_shard),
                "keeper_row": numbers(keeper - facts.starts[of_shard], has_keeper),
                "jaccard": numbers(decisions.jaccard[span].astype(np.float32), has_keeper),
                "weight": numbers(decisions.weight[span].astype(np.float32)),
            }
            writer.write_table(pa.table(columns, schema=_ROWS))
