"""Third stage: one decision for every row, by the policy of the settings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from auditor.clean.compare import compare
from auditor.clean.config import DedupeConfig
from auditor.clean.duplicates import (
    Candidates,
    choose_keepers,
    clusters,
    exact_leaders,
)
from auditor.clean.engine import Engine, Progress
from auditor.clean.scan import Scan
from auditor.clean.shards import Shard

REASONS: Final = (None, "exact", "near", "repetition", "exposure", "implicated", "unreadable")
KEPT, EXACT, NEAR, REPETITION, EXPOSURE, IMPLICATED, UNREADABLE = range(len(REASONS))


@dataclass(frozen=True, kw_only=True)
class Marked:
    """Sample ids that something outside of the shards speaks about."""

    exposed: Collection[str] = ()
    """Consumed by the run as often as ``max_exposures`` allows."""
    implicated: Collection[str] = ()
    """Named to be dropped."""
    only: Collection[str] | None = None
    """Duplicates and repetitive rows go only where they are, or are like, one of these; None:
    wherever they are."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What becomes of each row, and why; **N** rows in input order."""

    reason: NDArray[np.int8]  # [N], into REASONS
    keeper: NDArray[np.int64]  # [N], -1 where there is none
    jaccard: NDArray[np.float64]  # [N], nan where there is no keeper
    cluster: NDArray[np.int64]  # [N], -1 where there is none
    weight: NDArray[np.float64]  # [N], 0 for rows that go
    protected: NDArray[np.bool_]  # [N]
    source_names: list[str]
    source: NDArray[np.int32]  # [N], into source_names
    found: Candidates

    @property
    def kept(self) -> NDArray[np.bool_]:
        return self.reason == KEPT


def decide(
    shards: Sequence[Shard],
    facts: Scan,
    config: DedupeConfig,
    marked: Marked,
    engine: Engine,
    work: Path,
    tell: Progress,
) -> Decisions:
    """Compare the rows and decide on each."""
    names, source = _sources(facts)
    sources = {name: code for code, name in enumerate(names)}
    protected = _with_ids(facts, config.protect_ids) | np.isin(
        source, [sources[name] for name in config.protect_sources if name in sources]
    )
    reason = np.full(len(facts.exact), KEPT, np.int8)
    # Of several reasons the last one counts: it says most about the row.
    reason[facts.repetitive] = REPETITION
    reason[_with_ids(facts, marked.exposed)] = EXPOSURE
    reason[_with_ids(facts, marked.implicated)] = IMPLICATED
    reason[protected] = KEPT
    reason[~facts.readable] = UNREADABLE

    order = keep_order(facts, config, protected, source, names)
    leader = exact_leaders(facts.exact, order, (reason == KEPT) & facts.has_content)
    leaders = order[leader[order] == order]
    found, similarity = compare(shards, facts, leaders, config, engine, work, tell)
    by_source = np.array([config.thresholds.get(name, config.threshold) for name in names])
    threshold = by_source[source]
    keepers = choose_keepers(
        found.pairs,
        similarity,
        leader=leader,
        order=order,
        threshold=threshold,
        protected=protected,
        copies=len(order) if config.soft else config.copies,
    )
    dropped = keepers.keeper >= 0
    same = leader[keepers.keeper] == leader
    reason[dropped] = np.where(same[dropped], EXACT, NEAR)
    # Contents are alike by the lowest threshold of any row that has one of them.
    lowest = np.full(len(order), np.inf)
    compared = np.flatnonzero(leader >= 0)
    np.minimum.at(lowest, leader[compared], threshold[compared])
    like = similarity >= lowest[found.pairs].min(axis=1)
    followers = compared[leader[compared] != compared]
    edges = np.concatenate([found.pairs[like], np.stack([leader[followers], followers], axis=1)])
    cluster = clusters(len(order), edges)
    keeper, jaccard = keepers.keeper, keepers.similarity
    meant = np.ones(len(order), np.bool_)
    if marked.only is not None:
        meant = _alike(_with_ids(facts, marked.only), cluster)
        spared = ~meant & np.isin(reason, (EXACT, NEAR, REPETITION))
        reason[spared] = KEPT
        keeper, jaccard = np.where(spared, -1, keeper), np.where(spared, np.nan, jaccard)
    weight = (reason == KEPT).astype(np.float64)
    if config.soft:
        shared = meant & (cluster >= 0)
        weight[shared] = 1 / np.bincount(cluster[shared])[cluster[shared]]
    return Decisions(
        reason=reason,
        keeper=keeper,
        jaccard=jaccard,
        cluster=cluster,
        weight=weight,
        protected=protected,
        source_names=names,
        source=source,
        found=found,
    )


def keep_order(
    facts: Scan,
    config: DedupeConfig,
    protected: NDArray[np.bool_],
    source: NDArray[np.int32],
    names: Sequence[str],
) -> NDArray[np.int64]:
    """Rows in the order in which they are considered, i64 [N].

    Protected rows first, then those of preferred sources, then by ``keep``; as they come where all
    that is equal.
    """
    preferred = {name: rank for rank, name in enumerate(config.prefer)}
    by_source = np.array([preferred.get(name, len(preferred)) for name in names], np.int64)
    if config.keep == "longest":
        value = -facts.lengths.astype(np.float64)
    elif config.keep == "first":
        value = np.zeros(len(source))
    else:
        value = -facts.quality if config.keep.startswith("highest:") else facts.quality
    # lexsort puts nan last, and is stable.
    return np.lexsort((value, by_source[source], ~protected))


def _sources(facts: Scan) -> tuple[list[str], NDArray[np.int32]]:
    """Names of all sources in alphabetical order, and each row's, i32 [N]."""
    parts = []
    for number in range(len(facts.shards)):
        column = facts.identities(number).column("source").combine_chunks()
        parts.append(column.dictionary_encode())
    names = sorted({name for part in parts for name in part.dictionary.to_pylist()})
    codes = {name: code for code, name in enumerate(names)}
    source = [
        np.array([codes[name] for name in part.dictionary.to_pylist()], np.int32)[
            np.from_dlpack(part.indices)  # to_numpy would import pandas
        ]
        for part in parts
        if len(part)
    ]
    return names, np.concatenate(source) if source else np.empty(0, np.int32)


def _alike(rows: NDArray[np.bool_], cluster: NDArray[np.int64]) -> NDArray[np.bool_]:
    """These rows and all that are in a cluster with one of them, bool [N]."""
    touched = np.zeros(int(cluster.max(initial=-1)) + 2, np.bool_)
    touched[cluster[rows]] = True
    touched[-1] = False  # where rows without a cluster point
    return rows | touched[cluster]


def _with_ids(facts: Scan, ids: Collection[str]) -> NDArray[np.bool_]:
    """Rows that have one of these sample ids, bool [N]."""
    if not ids:
        return np.zeros(len(facts.exact), np.bool_)
    wanted = pa.array(sorted(ids), pa.string())
    parts = [
        pc.is_in(facts.identities(number).column("sample_id"), value_set=wanted).to_numpy()
        for number in range(len(facts.shards))
    ]
    return np.concatenate(parts).astype(np.bool_)
