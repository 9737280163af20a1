"""What a recorded run says about its own data: the shards it read and the mix it drew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from auditor.clean.config import DedupeConfig
from auditor.clean.dedupe import dedupe
from auditor.clean.engine import Progress
from auditor.clean.manifest import Manifest
from auditor.errors import RunError, ShardError
from auditor.files import sha256
from auditor.run import Run


def dedupe_run(
    run: Run,
    out: str | Path,
    *,
    shards: Sequence[str | Path] = (),
    config: DedupeConfig | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Manifest:
    """:func:`auditor.clean.dedupe.dedupe` of a run's data, starting from the mix it drew.

    Raises what :func:`run_data` and ``dedupe`` raise.
    """
    data = run_data(run, shards)
    return dedupe(
        data.shards,
        out,
        config=config or DedupeConfig(),
        run_id=data.run_id,
        source_weights=data.weights or None,
        n_samples=data.n_samples or None,
        progress=progress,
        dry_run=dry_run,
    )


@dataclass(frozen=True)
class RunData:
    """Shards of a run, weight per source as it was consumed, and samples consumed."""

    run_id: str
    shards: list[Path]
    weights: dict[str, float]
    n_samples: int


def run_data(run: Run, shards: Sequence[str | Path] = ()) -> RunData:
    """The data of a run, from the given shards or from those the run recorded.

    Raises:
        RunError: neither are there.
        ShardError: a recorded shard is gone, or is not the file that was trained on.
    """
    paths = [Path(shard) for shard in shards]
    if not paths:
        for shard in run.shards:
            path = Path(shard["path"])
            if not path.is_file():
                raise ShardError(
                    "recorded by the run, but not there",
                    path=path,
                    remedy="Give the files as they are now with --shards",
                )
            if shard["sha256"] is not None and sha256(path) != shard["sha256"]:
                raise ShardError(
                    "has changed since the run was trained on it",
                    path=path,
                    remedy="Restore it, or clean it as it is now with --shards",
                )
            paths.append(path)
    if not paths:
        raise RunError(
            "the run did not record which shards it read",
            path=run.path,
            remedy="Name them with --shards, or give the dataset a `shards` attribute "
            "before it is audited",
        )
    counted = (
        run.scan("exposures")
        .filter((pl.col("state") == "trained") & pl.col("source").is_not_null())
        .group_by("source")
        .len()
        .sort("source")
        .collect()
    )
    n = int(counted["len"].sum())
    weights = {name: count / n for name, count in counted.iter_rows()} if n else {}
    return RunData(run.run_id, paths, weights, n)
