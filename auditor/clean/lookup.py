"""One row of a cleaned data set: what was decided on it, and the rows it was compared with.

    >>> (found,) = look_up(load_manifest("clean/"), "web-00.jsonl:17")
    >>> found.row["reason"], found.keeper["row"], round(found.similarity, 2)
    ('near', 3, 0.91)

Contents are read from the parents; where these are gone, or are not what they were, the decision is
told all the same and ``unread`` says why there is no content.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor.clean.manifest import Manifest
from auditor.errors import AuditorError, ManifestError
from auditor.measure.sketch import (
    exact_hash_text,
    exact_hash_tokens,
    jaccard,
    shingle_hashes_text,
    shingle_hashes_tokens,
)

N_MEMBERS: Final = 10
"""Members of a cluster that are named."""

Content = str | NDArray[np.int64] | None
Place = tuple[str, int]
"""Shard and row."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A row, its keeper and its cluster, each row as a dict of the columns of ``schema.ROWS``.

    ``similarity`` is the Jaccard similarity to the keeper, computed again from the contents; None
    where there is no keeper or no content. ``members`` are the first of the ``n_members`` rows of
    the cluster. ``unread`` says why contents were not read, None where they were.
    """

    row: dict[str, Any]
    keeper: dict[str, Any] | None
    members: list[dict[str, Any]]
    n_members: int
    content: Content
    keeper_content: Content
    similarity: float | None
    unread: str | None


def look_up(manifest: Manifest, name: str) -> list[Found]:
    """The rows of this sample id, or at this ``shard:row``, in input order; [] if there are none.

    Raises ``ManifestError`` where the table of rows cannot be read.
    """
    shard, _, row = name.rpartition(":")
    named = pl.col("sample_id") == name
    if row.isdecimal():
        named |= (pl.col("shard") == shard) & (pl.col("row") == int(row))
    rows = _collect(manifest, manifest.scan_rows().filter(named))
    return describe(manifest, list(rows.iter_rows(named=True)))


def samples_of(manifest: Manifest, n: int) -> list[Found]:
    """For each reason ``n`` of the rows dropped for it, without the members of their clusters.

    Near-duplicates are spread from the least similar to the most; others over the input.
    """
    dropped = manifest.scan_rows().filter(pl.col("reason").is_not_null()).with_row_index("place")
    chosen = []
    if n:
        places = _collect(manifest, dropped.select("place", "reason", "jaccard"))
        for _, group in places.group_by("reason", maintain_order=True):
            ordered = group.sort("jaccard", nulls_last=True, maintain_order=True)
            if group["reason"][0] != "near":
                ordered = group
            spread = np.linspace(0, len(group) - 1, min(n, len(group))).round().astype(int)
            chosen += ordered["place"][spread.tolist()].to_list()
    rows = _collect(manifest, dropped.filter(pl.col("place").is_in(chosen))).drop("place")
    by_reason = rows.sort("reason", "jaccard", nulls_last=True, maintain_order=True)
    return describe(manifest, list(by_reason.iter_rows(named=True)), with_clusters=False)


def ids_not_there(manifest: Manifest, ids: Collection[str]) -> set[str]:
    """Those of these sample ids that no row has."""
    if not ids:
        return set()
    wanted = pl.Series("sample_id", sorted(ids), pl.String)
    found = manifest.scan_rows().select("sample_id").filter(pl.col("sample_id").is_in(wanted))
    return set(ids) - set(_collect(manifest, found.unique())["sample_id"])


def describe(
    manifest: Manifest, rows: Sequence[dict[str, Any]], *, with_clusters: bool = True
) -> list[Found]:
    """Rows of the manifest with their keepers, clusters and contents, in the order given."""
    keepers = _at(manifest, [_keeper_of(row) for row in rows if row["keeper_shard"] is not None])
    members, sizes = _clusters(manifest, rows) if with_clusters else ({}, {})
    places = [_place_of(row) for row in rows]
    contents, unread = read_contents(manifest, [*places, *keepers])
    found = []
    for row, place in zip(rows, places, strict=True):
        keeper = _keeper_of(row) if row["keeper_shard"] is not None else None
        content = contents.get(place)
        other = None if keeper is None else contents.get(keeper)
        missing = [unread[p[0]] for p in (place, keeper) if p is not None and p[0] in unread]
        found.append(
            Found(
                row=row,
                keeper=None if keeper is None else keepers.get(keeper),
                members=members.get(row["cluster"], []),
                n_members=sizes.get(row["cluster"], 0),
                content=content,
                keeper_content=other,
                similarity=similarity(
                    content, other, manifest.document["parameters"].get("shingle", "auto")
                ),
                unread=missing[0] if missing else None,
            )
        )
    return found


def similarity(a: Content, b: Content, shingle: str) -> float | None:
    """Exact Jaccard similarity as cleaning has it: 1 for equal normalised content.

    None where one is missing, or one is text and the other tokens.
    """
    if isinstance(a, str) and isinstance(b, str):
        if exact_hash_text(a) == exact_hash_text(b):
            return 1.0
        kind: Any = shingle
        return jaccard(*(shingle_hashes_text(text, kind, bits=64) for text in (a, b)))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if exact_hash_tokens(a) == exact_hash_tokens(b):
            return 1.0
        return jaccard(*(shingle_hashes_tokens(ids, bits=64) for ids in (a, b)))
    return None


def read_contents(
    manifest: Manifest, places: Iterable[Place]
) -> tuple[dict[Place, Content], dict[str, str]]:
    """Contents of rows of the parents, and of shards that could not be read, why.

    Of each shard the rows up to the last one wanted are read. A shard whose SHA-256 is not the
    manifest's is not read: its rows may be others.
    """
    wanted: dict[str, set[int]] = {}
    for name, number in places:
        wanted.setdefault(name, set()).add(number)
    contents: dict[Place, Content] = {}
    unread: dict[str, str] = {}
    for place, parent in enumerate(manifest.parents):
        rows = wanted.get(parent.name)
        if rows is None:
            continue
        try:
            with manifest.parent_as_cleaned(place) as shard:
                read = islice(shard.rows(manifest.reading_of_parents), max(rows) + 1)
                for number, row in enumerate(read):
                    if number in rows:
                        contents[parent.name, number] = row.content
        except (AuditorError, OSError) as error:
            unread[parent.name] = str(error)
    return contents, unread


def _at(manifest: Manifest, places: Sequence[Place]) -> dict[Place, dict[str, Any]]:
    """Rows at these places."""
    if not places:
        return {}
    shards, rows = zip(*dict.fromkeys(places), strict=True)
    wanted = pl.LazyFrame({"shard": shards, "row": rows}, {"shard": pl.String, "row": pl.Int64})
    found = _collect(manifest, manifest.scan_rows().join(wanted, on=["shard", "row"], how="semi"))
    return {_place_of(row): row for row in found.iter_rows(named=True)}


def _clusters(
    manifest: Manifest, rows: Sequence[dict[str, Any]]
) -> tuple[dict[int, list[dict[str, Any]]], dict[int, int]]:
    """First members and number of members of the clusters of these rows."""
    numbers = sorted({row["cluster"] for row in rows if row["cluster"] is not None})
    if not numbers:
        return {}, {}
    inside = manifest.scan_rows().filter(pl.col("cluster").is_in(numbers))
    sizes = dict(_collect(manifest, inside.group_by("cluster").len()).iter_rows())
    first = _collect(manifest, inside.group_by("cluster", maintain_order=True).head(N_MEMBERS))
    members: dict[int, list[dict[str, Any]]] = {}
    for row in first.iter_rows(named=True):
        members.setdefault(row["cluster"], []).append(row)
    return members, sizes


def _collect(manifest: Manifest, frame: pl.LazyFrame) -> pl.DataFrame:
    try:
        return frame.collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ManifestError(
            f"rows.parquet cannot be read: {error}",
            path=manifest.directory,
            remedy="Clean the inputs again",
        ) from error


def _place_of(row: dict[str, Any]) -> Place:
    return row["shard"], row["row"]


def _keeper_of(row: dict[str, Any]) -> Place:
    return row["keeper_shard"], row["keeper_row"]
