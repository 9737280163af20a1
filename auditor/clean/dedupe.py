"""Deduplicate shards into cleaned shards and a manifest.

    >>> manifest = dedupe(["corpus/"], "clean/")
    >>> manifest.counts
    {'rows_in': 4293, 'rows_out': 2864, 'exact': 120, 'near': 1309, 'repetition': 0, ...}

Every row gets one decision. Of these reasons to drop it, the first that holds is given:

1. ``unreadable``: the row cannot be read (only with ``on_error="skip"``, else an error).
2. ``implicated``: its id was named. ``exposure``: the run has consumed it often enough.
3. ``repetition``: the sample repeats itself. Such rows, and those above, are nobody's keeper, since
   they are not kept, and are in no cluster.
4. ``exact``: same normalised content as a kept row.
5. ``near``: exact Jaccard similarity to a kept row at or above the threshold.

Rows without content (null, missing, not text) are kept and counted as ``without_content``. Cleaning
the result again drops nothing more, unless a bucket was capped (``capped_buckets``).

Four stages, each a function of one shard (or of some bands): scan, compare, decide, write. What
they made is kept in a work folder until the output is whole, so that a call which was interrupted,
or killed, goes on when it is made again, and gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from auditor.clean.config import REPETITIVE_ELEMENTS, DedupeConfig
from auditor.clean.decide import REASONS, Decisions, Marked, decide
from auditor.clean.engine import Engine, InProcess, Progress, told
from auditor.clean.inputs import filesystem
from auditor.clean.manifest import Manifest, write_manifest
from auditor.clean.mixes import cap_repetition
from auditor.clean.scan import Scan, ScanTask, join_scans, scan_shard
from auditor.clean.shards import Inputs, Shard, check_out, find_shards
from auditor.clean.substrings import KeptRows, cuts_of, rows_with_spans, substring_duplicates
from auditor.clean.work import work_folder, writing
from auditor.clean.write import WriteTask, Written, write_rows, write_shard
from auditor.files import append, atomic, sha256
from auditor.measure.sketch import NORMALISATION_VERSION
from auditor.schema import MANIFEST_VERSION

_MAX_FINDINGS: Final = 1000
"""Findings that the manifest lists; further ones are counted."""


def dedupe(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    config: DedupeConfig | None = None,
    run_id: str | None = None,
    source_weights: Mapping[str, float] | None = None,
    n_samples: int | None = None,
    marked: Marked | None = None,
    engine: Engine | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
    manifest_only: bool = False,
) -> Manifest:
    """Clean files, folders and globs into the folder ``out``; the inputs are only read.

    Args:
        inputs: files, folders or globs, or URLs of them, see ``shards.FORMATS``.
        out: a new or empty folder, or one that an interrupted call left behind.
        config: settings; default: those of ``DedupeConfig()``.
        run_id: run whose data this is, recorded in the manifest.
        source_weights: weights the run drew its sources with; default: by number of rows. A source
            left out weighs nothing. Names that are not in the inputs are listed as ``unmatched``
            in the manifest; when none is, weights go by rows.
        n_samples: samples the run consumes, to project epochs; default: one pass over the inputs.
        marked: sample ids to drop, or to look for duplicates of, for what a run says of them.
        engine: where the stages run; default: one after the other in this process.
        progress: see ``Progress``.
        dry_run: decide, and write nothing.
        manifest_only: write the manifest and no shards: ``load_manifest`` then reads the rows that
            stay from the inputs.

    Raises:
        ShardError: an input cannot be read, the output cannot be written, or is in use; or spans
            are to be cut out of a shard whose format is not cut.
    """
    out, config, marked = Path(out), config or DedupeConfig(), marked or Marked()
    found = find_shards(inputs)
    check_out(out, found)
    if config.substrings == "cut" and not manifest_only:
        for shard in found.shards:
            shard.check_cut()
    job = _job(found, config, marked)
    with (
        writing(out, "The same command goes on where it stopped"),
        work_folder(None if dry_run else out, job) as work,
    ):
        return _run(
            found,
            out,
            work,
            config=config,
            marked=marked,
            engine=engine or InProcess(),
            tell=progress or (lambda stage, done, total: None),
            write=not (dry_run or manifest_only),
            dry_run=dry_run,
            about={"run_id": run_id},
            mix=(source_weights, n_samples),
        )


def _run(
    found: Inputs,
    out: Path,
    work: Path,
    *,
    config: DedupeConfig,
    marked: Marked,
    engine: Engine,
    tell: Progress,
    write: bool,
    dry_run: bool,
    about: dict[str, Any],
    mix: tuple[Mapping[str, float] | None, int | None],
) -> Manifest:
    shards = found.shards
    facts = _scan(shards, config, engine, work, tell)
    decisions = decide(shards, facts, config, marked, engine, work, tell)
    spans = _substrings(shards, facts, decisions, config, work, tell)
    tables = work if dry_run else out
    rows = tables / "rows.parquet"
    written = None
    with ThreadPoolExecutor(1) as beside:
        table = beside.submit(write_rows, rows, shards, facts, decisions)
        if write:
            cuts = spans if config.substrings == "cut" else None
            written = _write(shards, facts, decisions, cuts, out, config, engine, work, tell)
        table.result()
    if spans is not None:
        with atomic(tables / "substrings.parquet") as file:
            spans.write_parquet(file)
    sources, weights = _sources(decisions, config, *mix)
    findings = [
        {"shard": shard.name, **finding._asdict()}
        for shard, one in zip(shards, facts.shards, strict=True)
        for finding in one.findings
    ]
    document = {
        "manifest_version": MANIFEST_VERSION,
        "tool": "auditor",
        "tool_version": _version(),
        "normalisation_version": NORMALISATION_VERSION,
        **about,
        "seed": config.seed,
        "parameters": {**_parameters(config), "repetitive_elements": REPETITIVE_ELEMENTS},
        "counts": _counts(facts, decisions, config),
        "capped_buckets": {
            "n_buckets": decisions.found.n_capped_buckets,
            "n_pairs_left_out": decisions.found.n_pairs_left_out,
        },
        "substrings": _about_substrings(spans, tables / "substrings.parquet", config),
        "mix": weights,
        "sources": sources,
        "folders": [str(folder) for folder in found.folders],
        "shards": _entries(shards, facts, decisions, written),
        "beside": _copy_beside(found, out) if write else [],
        "ignored": [str(path) for path in found.ignored],
        "findings": findings[:_MAX_FINDINGS],
        "n_findings": len(findings),
    }
    if dry_run:
        return Manifest(None, document, pl.read_parquet(rows))
    return write_manifest(out, document)


def _scan(
    shards: Sequence[Shard],
    config: DedupeConfig,
    engine: Engine,
    work: Path,
    tell: Progress,
) -> Scan:
    bases = [work / "scan" / f"{number:06d}" for number in range(len(shards))]
    tasks = [
        ScanTask(shard=shard, base=base, config=config)
        for shard, base in zip(shards, bases, strict=True)
    ]
    scanned = engine.map(scan_shard, tasks, told("read", _sizes(shards), tell))
    return join_scans(scanned, bases, config)


def _write(
    shards: Sequence[Shard],
    facts: Scan,
    decisions: Decisions,
    spans: pl.DataFrame | None,
    out: Path,
    config: DedupeConfig,
    engine: Engine,
    work: Path,
    tell: Progress,
) -> list[Written]:
    cuts = {} if spans is None else cuts_of(spans)
    tasks = [
        WriteTask(
            shard=shard,
            sha256=one.sha256,
            keep=decisions.kept[facts.starts[number] : facts.starts[number + 1]],
            child=out / "data" / shard.name,
            journal=work / "write" / f"{number:06d}.json",
            reading=config.reading,
            cuts=cuts.get(shard.name, {}),
        )
        for number, (shard, one) in enumerate(zip(shards, facts.shards, strict=True))
    ]
    n_bytes = [one.n_bytes for one in facts.shards]
    return engine.map(write_shard, tasks, told("write", n_bytes, tell))


def _substrings(
    shards: Sequence[Shard],
    facts: Scan,
    decisions: Decisions,
    config: DedupeConfig,
    work: Path,
    tell: Progress,
) -> pl.DataFrame | None:
    """Spans of rows that stay which occur in an earlier one; those to cut only, if any are."""
    if config.substrings == "keep":
        return None
    bounds = [slice(*facts.starts[number : number + 2]) for number in range(len(shards))]
    kept = [
        KeptRows(shard, decisions.kept[span]) for shard, span in zip(shards, bounds, strict=True)
    ]
    spans = substring_duplicates(
        kept,
        n_elements=config.substring_elements,
        work=work,
        reading=config.reading,
        progress=lambda stage, done, total: tell(f"substrings: {stage}", done, total),
    )
    if config.substrings == "report" or not decisions.protected.any():
        return spans
    numbers = {shard.name: number for number, shard in enumerate(shards)}
    starts = facts.starts[spans["shard"].replace_strict(numbers, return_dtype=pl.Int64).to_numpy()]
    return spans.filter(~decisions.protected[starts + spans["row"].to_numpy()])


def _about_substrings(
    spans: pl.DataFrame | None, path: Path, config: DedupeConfig
) -> dict[str, Any] | None:
    if spans is None:
        return None
    rows = rows_with_spans(spans)
    return {
        "n_spans": spans.height,
        "n_rows": rows.height,
        "n_elements": int(rows["n_cut"].sum()),
        "are_cut": config.substrings == "cut",
        "sha256": sha256(path),
    }


def _sizes(shards: Sequence[Shard]) -> list[int]:
    """Bytes of each shard, 1 where that is known only when it is fetched."""
    return [
        1 if isinstance(shard.path, str) else sum(file.stat().st_size for file in shard.files())
        for shard in shards
    ]


def _copy_beside(found: Inputs, out: Path) -> list[str]:
    """Copy the small files that several shards are opened by; returns their names."""
    for path, name in found.beside:
        target = out / "data" / name
        if isinstance(path, Path):
            with atomic(target) as sink:
                append(path, sink)
        else:
            system, inner = filesystem(path)
            with atomic(target) as sink:
                sink.write(system.cat_file(inner))
    return [name for _, name in found.beside]


def _entries(
    shards: Sequence[Shard],
    facts: Scan,
    decisions: Decisions,
    written: Sequence[Written] | None,
) -> list[dict[str, Any]]:
    entries = []
    for number, (shard, one) in enumerate(zip(shards, facts.shards, strict=True)):
        child = None if written is None else written[number]
        entries.append(
            {
                "shard": shard.name,
                "format": shard.format,
                "parent": str(shard.path),
                "parent_sha256": one.sha256,
                "child": None if child is None else f"data/{shard.name}",
                "child_sha256": None if child is None else child.sha256,
                "rows_in": one.n_rows,
                "rows_out": int(decisions.kept[slice(*facts.starts[number : number + 2])].sum()),
                "bytes_in": one.n_bytes,
                "bytes_out": None if child is None else child.n_bytes,
            }
        )
    return entries


def _job(found: Inputs, config: DedupeConfig, marked: Marked) -> dict[str, Any]:
    """What the files in the work folder depend on."""
    digest = blake2b(digest_size=16)
    for ids in (marked.exposed, marked.implicated, marked.only):
        known = ["none"] if ids is None else ["some", *sorted(ids)]
        digest.update("\n".join(known).encode("utf-8", "surrogatepass") + b"\0")
    return {
        "tool_version": _version(),
        "normalisation_version": NORMALISATION_VERSION,
        "parameters": _parameters(config),
        "marked": digest.hexdigest(),
        "shards": [[shard.name, str(shard.path), shard.stamps()] for shard in found.shards],
    }


def _parameters(config: DedupeConfig) -> dict[str, Any]:
    return {**asdict(config), "protect_ids": sorted(config.protect_ids)}


def _sources(
    decisions: Decisions,
    config: DedupeConfig,
    source_weights: Mapping[str, float] | None,
    n_samples: int | None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What becomes of each source, and the mix that its weights are part of."""
    sources, codes = decisions.source_names, decisions.source
    rows_in = np.bincount(codes, minlength=len(sources))
    rows_out = np.bincount(codes[decisions.kept], minlength=len(sources))
    # Rows that share a weight of one count as one: together they are drawn as often as one.
    unique = np.bincount(codes, decisions.weight, minlength=len(sources))
    wished: dict[str, float] = dict(zip(sources, rows_in.tolist(), strict=True))
    unmatched = sorted(set(source_weights or ()) - set(sources))
    if source_weights is not None and any(source_weights.get(name, 0) > 0 for name in sources):
        wished = {name: source_weights.get(name, 0) for name in sources}
    total = sum(wished.values())
    consumed = len(codes) if n_samples is None else n_samples
    n_unique = dict(zip(sources, unique.tolist(), strict=True))
    drawn = any(wished[name] > 0 and n_unique[name] > 0 for name in sources)
    mix = cap_repetition(wished, n_unique, consumed, config.max_epochs) if drawn else None
    table = {}
    for i, name in enumerate(sources):
        weight = wished[name] / total if total else 0.0
        table[name] = {
            "rows_in": int(rows_in[i]),
            "rows_out": int(rows_out[i]),
            "weight_before": weight,
            "weight": mix.weights[name] if mix else 0.0,
            # What cleaning alone would do: fewer rows, drawn as often as before; None: no row left.
            "projected_epochs_at_old_weight": _epochs(weight * consumed, float(unique[i])),
            "projected_epochs": mix.projected_epochs[name] if mix else 0.0,
        }
    return table, {
        "n_samples": consumed,
        "max_epochs": config.max_epochs,
        "feasible": mix.feasible if mix else False,
        "capped": list(mix.capped) if mix else [],
        "unmatched": unmatched,
    }


def _epochs(n_drawn: float, n_unique: float) -> float | None:
    """How often each of some rows is drawn; None where there is none to draw."""
    if n_unique > 0:
        return n_drawn / n_unique
    return None if n_drawn > 0 else 0.0


def _counts(facts: Scan, decisions: Decisions, config: DedupeConfig) -> dict[str, int]:
    n_rows = np.bincount(decisions.reason, minlength=len(REASONS)).tolist()
    by_reason = dict(zip(REASONS, n_rows, strict=True))
    unrated = facts.readable & np.isnan(facts.quality)
    return {
        "rows_in": len(decisions.reason),
        "rows_out": by_reason.pop(None),
        **by_reason,  # type: ignore[dict-item]
        "without_content": int((facts.readable & ~facts.has_content).sum()),
        "n_clusters": int(decisions.cluster.max(initial=-1)) + 1,
        "n_shards": len(facts.starts) - 1,
        "n_shards_cut_off": sum(any(one.ends for one in each.findings) for each in facts.shards),
        **({} if config.quality_column is None else {"without_quality": int(unrated.sum())}),
    }


def _version() -> str:
    try:
        return metadata.version("auditor")
    except metadata.PackageNotFoundError:
        return "unknown"
