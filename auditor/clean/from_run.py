"""What a recorded run says about its own data: its shards, the mix it drew, what it has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from auditor.clean.config import DedupeConfig
from auditor.clean.decide import Marked
from auditor.clean.dedupe import dedupe
from auditor.clean.engine import Engine, Progress
from auditor.clean.manifest import Manifest
from auditor.errors import RunError, ShardError
from auditor.files import sha256
from auditor.run import Run


@dataclass(frozen=True)
class RunData:
    """Shards of a run, weight per source as it was consumed, and samples consumed.

    ``exposed`` are the ids of the samples it was trained on as often as was asked for.
    """

    run_id: str
    shards: list[str | Path]
    weights: dict[str, float]
    n_samples: int
    exposed: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """What ``dedupe`` takes of a run, by the names of its arguments."""
        return {
            "run_id": self.run_id,
            "source_weights": self.weights or None,
            "n_samples": self.n_samples or None,
        }


def dedupe_run(
    run: Run,
    out: str | Path,
    *,
    shards: Sequence[str | Path] = (),
    config: DedupeConfig | None = None,
    engine: Engine | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
    manifest_only: bool = False,
) -> Manifest:
    """:func:`auditor.clean.dedupe.dedupe` of a run's data, starting from the mix it drew.

    With ``config.max_exposures``, samples the run was trained on that often are dropped.

    Raises what :func:`run_data` and ``dedupe`` raise.
    """
    config = config or DedupeConfig()
    data = run_data(run, shards, max_exposures=config.max_exposures)
    return dedupe(
        data.shards,
        out,
        config=config,
        engine=engine,
        progress=progress,
        dry_run=dry_run,
        manifest_only=manifest_only,
        marked=Marked(exposed=data.exposed),
        **data.settings,
    )


def run_data(
    run: Run, shards: Sequence[str | Path] = (), *, max_exposures: int | None = None
) -> RunData:
    """The data of a run, from the given shards or from those the run recorded.

    ``max_exposures``: trained exposures from which a sample is one of ``exposed``.

    Raises:
        RunError: neither are there.
        ShardError: a recorded shard is gone, or is not the file that was trained on.
    """
    paths: list[str | Path] = [*shards] or [*_recorded_shards(run)]
    if not paths:
        raise RunError(
            "the run did not record which shards it read",
            path=run.path,
            remedy="Name them with --shards, or give the dataset a `shards` attribute "
            "before it is audited",
        )
    trained = run.scan("exposures").filter(pl.col("state") == "trained")
    counted = (
        trained.filter(pl.col("source").is_not_null())
        .group_by("source")
        .len()
        .sort("source")
        .collect()
    )
    n = int(counted["len"].sum())
    weights = {name: count / n for name, count in counted.iter_rows()} if n else {}
    exposed = frozenset() if max_exposures is None else _exposed(trained, max_exposures)
    return RunData(run.run_id, paths, weights, n, exposed)


def _recorded_shards(run: Run) -> list[Path]:
    paths = []
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
    return paths


def _exposed(trained: pl.LazyFrame, at_least: int) -> frozenset[str]:
    """Ids of the samples that were trained on this often."""
    often = trained.group_by("sample_id").len().filter(pl.col("len") >= at_least)
    return frozenset(often.select("sample_id").collect(engine="streaming")["sample_id"])
