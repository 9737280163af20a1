"""Give dropped rows back: as shards of their parents' formats, from the parents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor.clean.decide import REASONS
from auditor.clean.engine import Progress, told
from auditor.clean.manifest import Manifest
from auditor.clean.shards import MARKER, Inputs, check_out
from auditor.clean.work import interrupted_here, writing
from auditor.errors import ManifestError
from auditor.files import append, atomic, sha256

_REASONS: Final = tuple(name for name in REASONS if name is not None)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was written: number of rows by the name of their shard, and by reason.

    ``lost_by_shard``: rows that are not among them, since they cannot be read and their format
    cannot give them back as they are.
    """

    by_shard: dict[str, int]
    by_reason: dict[str, int]
    lost_by_shard: dict[str, int]

    @property
    def n_rows(self) -> int:
        return sum(self.by_shard.values())

    @property
    def n_lost(self) -> int:
        return sum(self.lost_by_shard.values())


def restore(
    manifest: Manifest,
    out: str | Path,
    *,
    reason: str | None = None,
    source: str | None = None,
    progress: Progress | None = None,
) -> Restored:
    """Write the rows that were dropped to shards in the folder ``out``, in their order.

    Shards have the names and formats of their parents; one that gives no row is not written.
    Together with the kept rows these are the input's rows, unless substrings were cut out of kept
    ones. A row that cannot be read is given back where its format allows, as JSON Lines does, and
    else counted. An interrupted call can be made again.

    Args:
        manifest: of a cleaned folder.
        out: a new or empty folder.
        reason: only rows dropped for this reason.
        source: only rows of this source.
        progress: called with ``restore``, and bytes of parents that are copied from and there are.

    Raises:
        ShardError: a parent is not there or has changed, or ``out`` is in use: no row is written
            then, unless the parent is behind a URL. Or ``out`` cannot be written.
        ManifestError: no row was dropped for that reason, or from that source.
        ValueError: there is no such reason.
    """
    out = Path(out)
    if reason is not None and reason not in _REASONS:
        raise ValueError(f"reason must be one of {', '.join(_REASONS)}, got {reason!r}")
    chosen = _chosen(manifest, reason, source)
    masks = [codes >= 0 for codes in chosen]
    entries = manifest.document["shards"]
    places = [number for number, mask in enumerate(masks) if mask.any()]
    parents = manifest.parents
    check_out(out, Inputs(parents, _folders(manifest), ()))
    for place in places:
        if isinstance(parents[place].path, Path):
            with manifest.parent_as_cleaned(place):
                pass
    done = told(
        "restore",
        [entries[place]["bytes_in"] for place in places],
        progress or (lambda stage, done, total: None),
    )
    job = {"rows_sha256": manifest.document.get("rows_sha256"), "reason": reason, "source": source}
    lost_by_shard: dict[str, int] = {}
    with writing(out, "The same command begins again"), _marked(out, job):
        for number, place in enumerate(places):
            with manifest.parent_as_cleaned(place) as shard:
                reading = manifest.reading_of_parents
                lost = shard.copy_readable(out / shard.name, masks[place], reading)
            if lost.any():
                lost_by_shard[parents[place].name] = int(lost.sum())
                masks[place] &= ~lost
            done(number)
        if all(mask.any() for mask in masks):  # what lies beside shards names all of them
            for name, path in _beside(manifest):
                with atomic(out / name) as sink:
                    append(path, sink)
    codes = np.concatenate([codes[mask] for codes, mask in zip(chosen, masks, strict=True)])
    n_rows = np.bincount(codes, minlength=len(_REASONS)).tolist()
    return Restored(
        by_shard={parents[i].name: int(masks[i].sum()) for i in places if masks[i].any()},
        by_reason={name: n for name, n in sorted(zip(_REASONS, n_rows, strict=True)) if n},
        lost_by_shard=lost_by_shard,
    )


def _chosen(manifest: Manifest, reason: str | None, source: str | None) -> list[NDArray[np.int64]]:
    """Of each shard, i64 [rows_in]: the place in ``_REASONS`` for rows to give back, else -1."""
    path = None if manifest.directory is None else manifest.directory / "rows.parquet"
    if path is not None and sha256(path) != manifest.document["rows_sha256"]:
        raise ManifestError("SHA-256 differs from the manifest", path=path)
    wanted = pl.col("decision") == "dropped"
    if reason is not None:
        wanted &= pl.col("reason") == reason
    if source is not None:
        wanted &= pl.col("source") == source
    # The table is in input order, shard after shard.
    found = manifest.scan_rows().select("reason", wanted=wanted).collect()
    if not found["wanted"].any():
        words = ["no row was dropped"]
        words += [f"for {reason}"] if reason is not None else []
        words += [f"from {source!r}"] if source is not None else []
        raise ManifestError(" ".join(words), path=manifest.directory)
    ends = np.cumsum([entry["rows_in"] for entry in manifest.document["shards"]])
    codes = pl.col("reason").replace_strict(_REASONS, range(len(_REASONS)), default=-1)
    of_rows = found.select(pl.when("wanted").then(codes).otherwise(-1)).to_series()
    return np.split(of_rows.to_numpy(), ends[:-1])


def _folders(manifest: Manifest) -> tuple[Path, ...]:
    """Folders that nothing may be written into: of the inputs, and the cleaned one."""
    folders = [Path(folder) for folder in manifest.document.get("folders", ())]
    further = (manifest.directory, manifest.parents_folder)
    return (*folders, *(folder.absolute() for folder in further if folder is not None))


def _beside(manifest: Manifest) -> list[tuple[str, Path]]:
    """Small files that belong to several shards, from beside the cleaned ones."""
    if manifest.directory is None:
        return []
    data = manifest.directory / "data"
    return [(name, data / name) for name in manifest.document.get("beside", ())]


@contextmanager
def _marked(out: Path, job: dict[str, Any]) -> Iterator[None]:
    """Mark the folder as incomplete until the block ends without an error."""
    marker, text = out / MARKER, json.dumps(job, sort_keys=True)
    if marker.exists() and (marker.is_dir() or marker.read_text("utf-8") != text):
        raise interrupted_here(out)
    with atomic(marker) as file:
        file.write(text.encode())
    yield
    marker.unlink()
