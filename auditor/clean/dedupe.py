"""Deduplicate shards into cleaned shards and a manifest.

    >>> manifest = dedupe(["corpus/"], "clean/")
    >>> manifest.counts
    {'rows_in': 4293, 'rows_out': 2864, 'exact': 120, 'near': 1309, 'repetition': 0, ...}

Every row gets one decision, tried in this order:

1. ``unreadable``: the line is not JSON (only with ``on_error="skip"``, else an error).
2. ``repetition``: the sample repeats itself. Such a row is nobody's keeper, since it is not kept,
   and is in no cluster.
3. ``exact``: same normalised content as a kept row.
4. ``near``: exact Jaccard similarity to a kept row at or above the threshold.

Rows without content (null, missing, not text) are kept and counted as ``without_content``. Cleaning
the result again drops nothing more, unless a bucket was capped (``capped_buckets``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor.clean.duplicates import (
    Candidates,
    candidates,
    choose_keepers,
    clusters,
    exact_keepers,
    keep_order,
    plausible,
    verify_pairs,
)
from auditor.clean.manifest import Manifest, write_manifest
from auditor.clean.mixes import cap_repetition
from auditor.clean.row import Reading
from auditor.clean.scan import (
    REPETITIVE_ELEMENTS,
    REPETITIVE_SHARE,
    Progress,
    Scan,
    scan,
    shingle_hashes,
)
from auditor.clean.shards import MARKER, Shard, begin_out, check_out, find_shards
from auditor.errors import ShardError
from auditor.files import sha256
from auditor.measure.sketch import NORMALISATION_VERSION
from auditor.schema import DUPLICATE_SIMILARITY, MANIFEST_VERSION


@dataclass(frozen=True, kw_only=True)
class DedupeConfig:
    """Settings of ``dedupe``; a bad value raises ``ValueError``."""

    threshold: float = DUPLICATE_SIMILARITY
    """Exact Jaccard similarity from which two samples are near-duplicates."""
    shingle: Literal["auto", "word5", "char5", "token5"] = "auto"
    """``auto``: token5 for token ids, else word5 or char5 by the text's script."""
    keep: Literal["first", "longest"] = "first"
    """Which of several duplicates stays; the longest by characters or tokens."""
    repetition: bool = True
    """Drop samples that repeat themselves: OLMo 2's flag, or a covered share of half or more."""
    n_permutations: int = 128
    bands: int = 32
    seed: int = 1
    max_epochs: float = 4.0
    """Repetition budget for the weights that the manifest proposes."""
    content: str | None = None
    """Column of the content; None: text, else input_ids or tokens.

    Of token ids, those under the ones of a column ``attention_mask`` count: padding is no content.
    Without a mask all ids do, and rows that are mostly padding are dropped for repetition: add the
    mask, or set ``repetition=False``.
    """
    on_error: Literal["raise", "skip"] = "raise"
    """What a row that cannot be parsed does: end the run, or be dropped as unreadable."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold must be within (0, 1], got {self.threshold!r}")
        if self.shingle not in ("auto", "word5", "char5", "token5"):
            raise ValueError(f"shingle must be auto, word5, char5 or token5, got {self.shingle!r}")
        if self.keep not in ("first", "longest"):
            raise ValueError(f"keep must be first or longest, got {self.keep!r}")
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be raise or skip, got {self.on_error!r}")
        if not 1 <= self.n_permutations <= 4096:
            raise ValueError(f"n_permutations must be within 1..4096, got {self.n_permutations!r}")
        if self.bands < 1 or self.n_permutations % self.bands:
            raise ValueError(
                f"bands must divide n_permutations = {self.n_permutations}, got {self.bands!r}"
            )
        if not self.max_epochs > 0:
            raise ValueError(f"max_epochs must be positive, got {self.max_epochs!r}")


_REASONS: Final = (None, "exact", "near", "repetition", "unreadable")
_KEPT, _EXACT, _NEAR, _REPETITION, _UNREADABLE = range(5)


@dataclass(frozen=True, kw_only=True)
class _Decisions:
    reason: NDArray[np.int8]  # [N], into _REASONS
    keeper: NDArray[np.int64]  # [N], -1 where there is none
    jaccard: NDArray[np.float64]  # [N], nan where there is no keeper
    cluster: NDArray[np.int64]  # [N], -1 where there is none
    found: Candidates

    @property
    def kept(self) -> NDArray[np.bool_]:
        return self.reason == _KEPT


def dedupe(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    config: DedupeConfig = DedupeConfig(),
    run_id: str | None = None,
    source_weights: Mapping[str, float] | None = None,
    n_samples: int | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Manifest:
    """Clean files, folders and globs into the folder ``out``; the inputs are only read.

    Args:
        inputs: files, folders or globs, see ``shards.FORMATS``.
        out: a new or empty folder, or one that an interrupted call left behind.
        config: settings.
        run_id: run whose data this is, recorded in the manifest.
        source_weights: weights the run drew its sources with; default: by number of rows. A source
            left out weighs nothing. Names that are not in the inputs are listed as ``unmatched``
            in the manifest; when none is, weights go by rows.
        n_samples: samples the run consumes, to project epochs; default: one pass over the inputs.
        progress: called with stage (read, verify, write), shards done and shards in all.
        dry_run: decide, and write nothing.

    Raises:
        ShardError: an input cannot be read, or the output folder is in use.
    """
    out = Path(out)
    tell: Progress = progress or (lambda stage, done, total: None)
    found = find_shards(inputs)
    check_out(out, found)
    before = [_fingerprint(shard) for shard in found.shards]
    facts = scan(found.shards, config, tell)
    if not dry_run:
        begin_out(out)
    decisions = _decide(found.shards, facts, config, None if dry_run else out, tell)
    sources, mix = _sources(facts, decisions.kept, config, source_weights, n_samples)
    written: list[dict[str, Any]] = []
    for i, shard in enumerate(found.shards):
        tell("write", i, len(found.shards))
        keep = decisions.kept[facts.starts[i] : facts.starts[i + 1]]
        written.append(_write(shard, out, keep, before[i], config, dry_run=dry_run))
    tell("write", len(found.shards), len(found.shards))
    rows = _rows(found.shards, facts, decisions)
    document = {
        "manifest_version": MANIFEST_VERSION,
        "tool": "auditor",
        "tool_version": _version(),
        "normalisation_version": NORMALISATION_VERSION,
        "run_id": run_id,
        "seed": config.seed,
        "parameters": {
            **asdict(config),
            "repetitive_share": REPETITIVE_SHARE,
            "repetitive_elements": REPETITIVE_ELEMENTS,
        },
        "counts": _counts(facts, decisions),
        "capped_buckets": {
            "n_buckets": decisions.found.n_capped_buckets,
            "n_pairs_left_out": decisions.found.n_pairs_left_out,
        },
        "mix": mix,
        "sources": sources,
        "shards": written,
        "ignored": [str(path) for path in found.ignored],
    }
    if dry_run:
        return Manifest(None, document, rows)
    manifest = write_manifest(out, document, rows)
    (out / MARKER).unlink()
    return manifest


def _decide(
    shards: tuple[Shard, ...],
    facts: Scan,
    config: DedupeConfig,
    folder: Path | None,
    tell: Progress,
) -> _Decisions:
    n = len(facts.exact)
    usable = facts.readable & facts.has_content & ~facts.repetitive
    order = keep_order(n, facts.lengths if config.keep == "longest" else None)
    leader = exact_keepers(facts.exact, order, usable)
    leaders = order[leader[order] == order]
    found = candidates(facts.signatures, leaders, bands=config.bands)
    pairs = plausible(facts.signatures, found.pairs, config.threshold)
    needed = np.unique(pairs)
    hashes = shingle_hashes(shards, facts.starts, needed, config, folder, tell)
    similarity = verify_pairs(pairs, *hashes)
    keeper, jaccard = choose_keepers(pairs, similarity, order, config.threshold)

    reason = np.full(n, _KEPT, np.int8)
    reason[keeper >= 0] = _NEAR
    follower = usable & (leader != np.arange(n))
    # A copy of a row that is itself a near-duplicate is one too, of the same kept row: equal
    # normalised content has equal shingles.
    led_by = leader[follower]
    leader_kept = keeper[led_by] < 0
    reason[follower] = np.where(leader_kept, _EXACT, _NEAR)
    keeper[follower] = np.where(leader_kept, led_by, keeper[led_by])
    jaccard[follower] = np.where(leader_kept, 1.0, jaccard[led_by])
    reason[facts.repetitive] = _REPETITION
    reason[~facts.readable] = _UNREADABLE
    edges = np.concatenate(
        [
            pairs[similarity >= config.threshold],
            np.stack([led_by, np.flatnonzero(follower)], axis=1),
        ]
    )
    return _Decisions(
        reason=reason, keeper=keeper, jaccard=jaccard, cluster=clusters(n, edges), found=found
    )


def _sources(
    facts: Scan,
    kept: NDArray[np.bool_],
    config: DedupeConfig,
    source_weights: Mapping[str, float] | None,
    n_samples: int | None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    names, codes = np.unique(np.array(facts.sources, np.str_), return_inverse=True)
    sources = [str(name) for name in names]
    rows_in = np.bincount(codes, minlength=len(names))
    rows_out = np.bincount(codes[kept], minlength=len(names))
    wished = dict(zip(sources, rows_in.tolist(), strict=True))
    unmatched = sorted(set(source_weights or ()) - set(sources))
    if source_weights is not None and any(source_weights.get(name, 0) > 0 for name in sources):
        wished = {name: source_weights.get(name, 0) for name in sources}
    total = sum(wished.values())
    consumed = len(codes) if n_samples is None else n_samples
    unique = dict(zip(sources, rows_out.tolist(), strict=True))
    drawn = any(wished[name] > 0 and unique[name] > 0 for name in sources)
    mix = cap_repetition(wished, unique, consumed, config.max_epochs) if drawn else None
    table = {}
    for i, name in enumerate(sources):
        weight = wished[name] / total if total else 0.0
        table[name] = {
            "rows_in": int(rows_in[i]),
            "rows_out": int(rows_out[i]),
            "weight_before": weight,
            "weight": mix.weights[name] if mix else 0.0,
            # What cleaning alone would do: fewer rows, drawn as often as before.
            "projected_epochs_at_old_weight": weight * consumed / max(1, int(rows_out[i])),
            "projected_epochs": mix.projected_epochs[name] if mix else 0.0,
        }
    return table, {
        "n_samples": consumed,
        "max_epochs": config.max_epochs,
        "feasible": mix.feasible if mix else False,
        "capped": list(mix.capped) if mix else [],
        "unmatched": unmatched,
    }


def _fingerprint(shard: Shard) -> tuple[str, int, int]:
    (file,) = shard.files()
    stat = file.stat()
    return sha256(file), stat.st_size, stat.st_mtime_ns


def _write(
    shard: Shard,
    out: Path,
    keep: NDArray[np.bool_],
    before: tuple[str, int, int],
    config: DedupeConfig,
    *,
    dry_run: bool,
) -> dict[str, Any]:
    child = f"data/{shard.name}"
    if not dry_run:
        reading = Reading(content=config.content, on_error=config.on_error)
        shard.copy(out / child, keep, reading)
    stat = Path(shard.path).stat()
    if (stat.st_size, stat.st_mtime_ns) != before[1:]:
        raise ShardError(
            "changed while it was being cleaned",
            path=shard.path,
            remedy="Start again when nothing writes to the inputs",
        )
    return {
        "shard": shard.name,
        "parent": str(shard.path),
        "parent_sha256": before[0],
        "child": child,
        "child_sha256": None if dry_run else sha256(out / child),
        "rows_in": len(keep),
        "rows_out": int(keep.sum()),
        "bytes_in": before[1],
        "bytes_out": None if dry_run else (out / child).stat().st_size,
    }


def _rows(shards: tuple[Shard, ...], facts: Scan, decisions: _Decisions) -> pl.DataFrame:
    names = np.array([*(shard.name for shard in shards), None], object)
    shard_of = facts.shard_of
    row = np.arange(len(shard_of)) - facts.starts[shard_of]
    has_keeper = decisions.keeper >= 0
    keeper_shard = np.where(has_keeper, shard_of[decisions.keeper], len(shards))
    keeper_row = pl.Series(row[decisions.keeper], dtype=pl.Int64)
    return pl.DataFrame(
        {
            "shard": pl.Series(names[shard_of].tolist(), dtype=pl.String),
            "row": row,
            "sample_id": pl.Series(facts.sample_ids, dtype=pl.String),
            "source": pl.Series(facts.sources, dtype=pl.String),
            "decision": np.where(decisions.kept, "kept", "dropped").tolist(),
            "reason": pl.Series([_REASONS[r] for r in decisions.reason], dtype=pl.String),
            "cluster": pl.Series(decisions.cluster).replace(-1, None),
            "keeper_shard": pl.Series(names[keeper_shard].tolist(), dtype=pl.String),
            "keeper_row": keeper_row.set(pl.Series(~has_keeper), None),
            "jaccard": pl.Series(decisions.jaccard, dtype=pl.Float32).fill_nan(None),
            "weight": decisions.kept.astype(np.float32),
        }
    )


def _counts(facts: Scan, decisions: _Decisions) -> dict[str, int]:
    n_rows = np.bincount(decisions.reason, minlength=len(_REASONS)).tolist()
    return {
        "rows_in": len(decisions.reason),
        "rows_out": n_rows[_KEPT],
        "exact": n_rows[_EXACT],
        "near": n_rows[_NEAR],
        "repetition": n_rows[_REPETITION],
        "unreadable": n_rows[_UNREADABLE],
        "without_content": int((facts.readable & ~facts.has_content).sum()),
        "n_clusters": int(decisions.cluster.max(initial=-1)) + 1,
        "n_shards": len(facts.starts) - 1,
    }


def _version() -> str:
    try:
        return metadata.version("auditor")
    except metadata.PackageNotFoundError:
        return "unknown"
