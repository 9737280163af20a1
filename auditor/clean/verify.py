"""Is a cleaned folder what its manifest says it is?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from auditor.clean.engine import Progress, told
from auditor.clean.manifest import Manifest, load_manifest
from auditor.errors import AuditorError, ShardError
from auditor.files import sha256, sha256_of


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What ``verify`` found.

    ``n_shards_hashed``: shards whose rows were there and were hashed, in the cleaned shards or,
    where the manifest stands alone, in the parents. ``missing_parents`` are gone, or behind URLs
    and not fetched to be compared. Parents that are gone are a failure where the rows that stay are
    read from them, or the folder they are in was named.
    """

    n_shards: int
    n_shards_hashed: int
    n_rows: int
    failures: tuple[str, ...]
    missing_parents: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failures


def verify(
    directory: str | Path,
    *,
    sample: int | None = None,
    parents: str | Path | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Check a cleaned folder against its manifest.

    Children by SHA-256 and number of rows, ``rows.parquet`` by SHA-256 and for consistency (every
    row once, kept and dropped add up, every keeper is kept), ``substrings.parquet`` by SHA-256,
    counts against a recount, weights against a sum of one, ``data/`` for files that the manifest
    does not name, parents by SHA-256: all where the manifest stands alone, else those that are
    still on this machine.

    Args:
        directory: folder or ``manifest.json``.
        sample: hash this many shards, evenly spread, instead of all; the rows are always checked.
        parents: see ``load_manifest``.
        progress: called with ``verify``, and bytes of shards that are hashed and that there are.
    """
    manifest = load_manifest(directory, parents=parents)
    entries = manifest.document["shards"]
    failures: list[str] = []
    missing: list[str] = []
    picked = range(len(entries))
    if sample is not None:
        if sample < 1:
            raise ValueError(f"sample must be positive, got {sample!r}")
        spread = np.linspace(0, len(entries) - 1, min(sample, len(entries))).round().astype(int)
        picked = sorted(set(spread.tolist()))  # type: ignore[assignment]
    sizes = [entries[i]["bytes_in"] + (entries[i]["bytes_out"] or 0) for i in picked]
    done = told("verify", sizes, progress or (lambda stage, done, total: None))
    n_hashed = 0
    for number, i in enumerate(picked):
        n_hashed += _check_shard(manifest, i, failures, missing)
        done(number)
    _check_rows(manifest, failures)
    _check_substrings(manifest, failures)
    _check_totals(manifest, failures)
    _check_strays(manifest, failures)
    return VerifyResult(
        n_shards=len(entries),
        n_shards_hashed=n_hashed,
        n_rows=manifest.counts["rows_in"],
        failures=tuple(failures),
        missing_parents=tuple(missing),
    )


def _check_shard(manifest: Manifest, number: int, failures: list[str], missing: list[str]) -> bool:
    """Check a child and its parent; returns whether the rows were there and were hashed."""
    parent = manifest.parents[number]
    is_there = isinstance(parent.path, Path) and parent.path.exists()
    if manifest.has_children:
        hashed = _check_child(manifest, number, failures)
        if not is_there:
            missing.append(str(parent.path))
            if manifest.parents_folder is not None:
                failures.append(f"{parent.path}: the input is not there")
            return hashed
    elif isinstance(parent.path, Path) and not is_there:
        missing.append(str(parent.path))
    try:
        with manifest.parent_as_cleaned(number):
            pass
    except ShardError as error:
        failures.append(f"{parent.path}: {error.message}")
        return is_there
    except (AuditorError, OSError) as error:
        failures.append(f"{parent.path}: {error}")
        return False
    return True


def _check_child(manifest: Manifest, number: int, failures: list[str]) -> bool:
    shard, entry = manifest.shards[number], manifest.document["shards"][number]
    try:
        if sha256_of(shard.files()) != entry["child_sha256"]:
            failures.append(f"{shard.path}: SHA-256 differs from the manifest")
        n_rows = shard.count(manifest.reading)
    except (AuditorError, OSError) as error:
        failures.append(f"{shard.path}: {error}")
        return False
    if n_rows != entry["rows_out"]:
        failures.append(f"{shard.path}: {n_rows} rows, the manifest has {entry['rows_out']}")
    return True


def _check_substrings(manifest: Manifest, failures: list[str]) -> None:
    said = (manifest.document.get("substrings") or {}).get("sha256")
    path = manifest._folder() / "substrings.parquet"
    if said is None:
        return
    if not path.is_file():
        failures.append(f"{path}: is not there")
    elif sha256(path) != said:
        failures.append(f"{path}: SHA-256 differs from the manifest")


def _check_rows(manifest: Manifest, failures: list[str]) -> None:
    path = manifest._folder() / "rows.parquet"
    try:
        if sha256(path) != manifest.document["rows_sha256"]:
            failures.append(f"{path}: SHA-256 differs from the manifest")
        rows = manifest.rows
    except (AuditorError, OSError) as error:
        failures.append(f"{path}: {error}")
        return
    kept = pl.col("decision") == "kept"
    found = {
        shard: (n, n_kept, n_rows, last)
        for shard, n, n_kept, n_rows, last in rows.group_by("shard")
        .agg(pl.len(), kept.sum().alias("kept"), pl.col("row").n_unique().alias("n"), pl.max("row"))
        .iter_rows()
    }
    for entry in manifest.document["shards"]:
        n, n_kept, n_rows, last = found.pop(entry["shard"], (0, 0, 0, -1))
        if not (n == n_rows == entry["rows_in"] and last == n - 1):
            failures.append(
                f"{path}: {entry['shard']} has not each of {entry['rows_in']} rows once"
            )
        if n_kept != entry["rows_out"]:
            failures.append(
                f"{path}: {entry['shard']} keeps {n_kept}, not {entry['rows_out']} rows"
            )
    failures.extend(f"{path}: {shard} is not in the manifest" for shard in sorted(found))
    known = pl.col("decision").is_in(["kept", "dropped"])
    if bad := rows.filter(~known | (kept != pl.col("reason").is_null())).height:
        failures.append(f"{path}: {bad} rows whose decision and reason disagree")
    keepers = rows.filter(kept).select("shard", "row")
    duplicates = rows.filter(pl.col("reason").is_in(["exact", "near"]))
    orphans = duplicates.join(
        keepers, left_on=["keeper_shard", "keeper_row"], right_on=["shard", "row"], how="anti"
    ).height
    if orphans:
        failures.append(f"{path}: {orphans} duplicates were dropped for a keeper that is not kept")


def _check_totals(manifest: Manifest, failures: list[str]) -> None:
    """Counts and weights of the document against the rows."""
    try:
        rows = manifest.rows
    except AuditorError:
        return  # said already
    found = dict(rows.filter(pl.col("reason").is_not_null()).group_by("reason").len().iter_rows())
    found |= {"rows_in": rows.height, "rows_out": (rows["decision"] == "kept").sum()}
    always = ("rows_in", "rows_out", "exact", "near", "repetition", "unreadable")
    for name in dict.fromkeys((*always, *sorted(found))):
        said, there = manifest.counts.get(name, 0), found.get(name, 0)
        if said != there:
            failures.append(f"manifest.json: {name} is {said}, rows.parquet has {there}")
    weights = manifest.weights.values()
    total = sum(weights)
    # All are zero where nothing is left to draw; a sum that is no number is not one either.
    if any(weights) and not abs(total - 1.0) <= 1e-6:
        failures.append(f"manifest.json: weights of the sources sum to {total:.6f}, not to one")


def _check_strays(manifest: Manifest, failures: list[str]) -> None:
    """Files among the cleaned shards that the manifest knows nothing of."""
    folder = manifest._folder() / "data"
    if not manifest.has_children:
        return
    known = {file.resolve() for shard in manifest.shards for file in shard.files()}
    known |= {(folder / name).resolve() for name in manifest.document.get("beside", ())}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    failures += [f"{path}: not in the manifest" for path in files if path.resolve() not in known]
