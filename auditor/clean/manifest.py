"""The manifest: which rows of which files were kept, which were dropped and why.

DIR/manifest.json   parents and children with their SHA-256, parameters, counts, weights
DIR/rows.parquet    one row per input row, columns of ``schema.ROWS``
DIR/data/           the cleaned shards under their parents' relative names; not there where the
                    manifest alone was asked for: the rows that stay are then read from the parents

A row that was kept has no reason; one dropped as exact or near has a keeper, its Jaccard similarity
to it and a cluster, and so has a keeper its cluster. Rows dropped for repetition or as unreadable
are compared with nothing: ``cluster``, ``keeper_shard``, ``keeper_row`` and ``jaccard`` are null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor.clean.engine import Progress, told
from auditor.clean.mixes import MixSampler
from auditor.clean.row import Reading, Row
from auditor.clean.shards import Shard
from auditor.errors import AuditorError, ManifestError, SchemaVersionError
from auditor.files import atomic, sha256, sha256_of
from auditor.run import polars_schema
from auditor.schema import MANIFEST_VERSION, ROWS

ROWS_SCHEMA: Final = polars_schema(ROWS)

_REQUIRED: Final = ("manifest_version", "shards", "sources", "counts", "parameters", "rows_sha256")
_REQUIRED_OF_SHARD: Final = (
    "shard",
    "parent",
    "parent_sha256",
    "child",
    "child_sha256",
    "rows_in",
    "rows_out",
    "bytes_in",
    "bytes_out",
)


@dataclass(frozen=True)
class Manifest:
    """A cleaned data set and its provenance.

    ``document`` is the content of ``manifest.json``; ``directory`` is None for a rehearsal, which
    has decisions but no files. ``parents_folder`` is where the parents lie now, by the names of
    their shards; None: where they were when they were cleaned.
    """

    directory: Path | None
    document: dict[str, Any]
    _rows: pl.DataFrame | None = field(default=None, repr=False)
    parents_folder: Path | None = None

    @cached_property
    def rows(self) -> pl.DataFrame:
        """One row per input row, columns of ``schema.ROWS``, in input order."""
        if self._rows is not None:
            return self._rows
        return _read_rows(self._folder() / "rows.parquet")

    def scan_rows(self) -> pl.LazyFrame:
        """The same, lazily: for a look at a few of very many rows."""
        if self._rows is not None:
            return self._rows.lazy()
        return pl.scan_parquet(self._folder() / "rows.parquet")

    @property
    def counts(self) -> dict[str, int]:
        """Rows in, rows out, and rows per reason."""
        return dict(self.document["counts"])

    @property
    def weights(self) -> dict[str, float]:
        """Weight per source after cleaning, summing to one, within the repetition budget."""
        return {name: entry["weight"] for name, entry in self.document["sources"].items()}

    @property
    def has_children(self) -> bool:
        """Whether cleaned shards were written; without them rows are read from the parents."""
        return all(entry["child"] is not None for entry in self.document["shards"])

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The cleaned shards in manifest order; the parents where the manifest stands alone."""
        if not self.has_children:
            return self.parents
        folder = self._folder()
        return tuple(
            Shard(folder / entry["child"], entry["shard"]) for entry in self.document["shards"]
        )

    @property
    def parents(self) -> tuple[Shard, ...]:
        """The shards that were cleaned: in ``parents_folder``, or where they were then."""
        return tuple(
            Shard(
                _place(entry["parent"])
                if self.parents_folder is None
                else self.parents_folder / entry["shard"],
                entry["shard"],
            )
            for entry in self.document["shards"]
        )

    @property
    def reading(self) -> Reading:
        """How the rows of children are read."""
        said = self.document["parameters"]
        return Reading(**{name: said.get(name) for name in ("content", "dtype", "eot")})

    @property
    def reading_of_parents(self) -> Reading:
        """How the rows of parents are read: with those that could not be."""
        return replace(self.reading, on_error=self.document["parameters"].get("on_error", "raise"))

    def kept_rows(self, number: int) -> Iterator[Row]:
        """The rows of a shard that stay, in order, from its child or else from its parent."""
        entry = self.document["shards"][number]
        if not entry["rows_out"]:
            return iter(())
        if self.has_children:
            return self.shards[number].rows(self.reading)
        rows = self.parents[number].rows(self.reading_of_parents)
        return compress(rows, self.keep(entry["shard"]))

    @cached_property
    def dataset(self) -> Any:
        """``datasets.Dataset`` over the cleaned shards in manifest order, rows in shard order.

        Columns: ``text`` (str) or ``input_ids`` (list of int64; padding under an attention mask
        left out), whichever the shards hold; ``id`` (str), ``source`` (str), ``shard`` (str) and
        ``row`` (int64, among those of its shard). Shards of one corpus often differ in their other
        columns; those stay in the files. Kept as Arrow on disk in the cache of ``datasets``.

        Raises ``ManifestError`` where some shards hold text and others tokens, or no row was kept.
        """
        import datasets

        column = self._content_column()
        kind = (
            datasets.Value("string")
            if column == "text"
            else datasets.Sequence(datasets.Value("int64"))
        )
        names = {name: datasets.Value("string") for name in ("id", "source", "shard")}
        return datasets.Dataset.from_generator(
            _dataset_rows,
            features=datasets.Features({column: kind, **names, "row": datasets.Value("int64")}),
            # What the rows depend on names the cached copy: files by their hash.
            gen_kwargs={
                "folder": str(self._folder().absolute()),
                "column": column,
                "parents": None if self.parents_folder is None else str(self.parents_folder),
                "hashes": (
                    self.document["rows_sha256"],
                    *(
                        entry["child_sha256"] or entry["parent_sha256"]
                        for entry in self.document["shards"]
                    ),
                ),
            },
        )

    def _content_column(self) -> str:
        """What the cleaned shards hold: ``text`` or ``input_ids``."""
        kinds = {}
        for number, entry in enumerate(self.document["shards"]):
            contents = (row.content for row in self.kept_rows(number))
            first = next((content for content in contents if content is not None), None)
            if first is not None:
                kinds["text" if isinstance(first, str) else "input_ids"] = entry["shard"]
        if len(kinds) > 1:
            raise ManifestError(
                f"{kinds['text']} holds text and {kinds['input_ids']} tokens",
                path=self._folder(),
                remedy="Clean them apart, or load them with datasets.load_dataset",
            )
        if not self.counts["rows_out"]:
            raise ManifestError("no row was kept", path=self._folder())
        return next(iter(kinds), "text")

    def sampler(self, seed: int, n_samples: int) -> MixSampler:
        """Indices into ``dataset`` drawn by ``weights``; for ``DataLoader(sampler=...)``.

        Within a source, rows come as often as their own weights say.
        """
        kept = self.rows.filter(pl.col("decision") == "kept")
        return MixSampler(
            kept["source"].to_list(),
            self.weights,
            seed,
            n_samples,
            row_weights=kept["weight"].to_numpy(),
        )

    def keep(self, shard: str) -> NDArray[np.bool_]:
        """Which of a parent shard's rows were kept, bool [rows_in]."""
        rows = self.rows.filter(pl.col("shard") == shard)
        names = [entry["shard"] for entry in self.document["shards"]]
        if shard not in names:
            raise ManifestError(
                f"no shard {shard!r}", path=self.directory, remedy=f"Shards: {', '.join(names[:9])}"
            )
        return rows.sort("row")["decision"].to_numpy() == "kept"

    def _folder(self) -> Path:
        if self.directory is None:
            raise ManifestError("a dry run wrote no files", remedy="Run again without --dry-run")
        return self.directory


def _dataset_rows(
    folder: str, column: str, parents: str | None, hashes: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Rows of ``Manifest.dataset``; ``hashes`` only names the cached copy."""
    manifest = load_manifest(folder, parents=parents)
    kept = manifest.rows.filter(pl.col("decision") == "kept").select("sample_id", "source")
    identities = kept.iter_rows()
    for number, entry in enumerate(manifest.document["shards"]):
        for place, row in enumerate(manifest.kept_rows(number)):
            sample_id, source = next(identities)
            yield {
                column: row.content,
                "id": sample_id,
                "source": source,
                "shard": entry["shard"],
                "row": place,
            }


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What ``verify`` found. Parents that are gone are reported; they are no failure."""

    n_shards: int
    n_shards_hashed: int
    n_rows: int
    failures: tuple[str, ...]
    missing_parents: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failures


def write_manifest(directory: Path, document: dict[str, Any]) -> Manifest:
    """Write ``manifest.json`` beside ``rows.parquet``: a folder with it is complete."""
    document = {**document, "rows_sha256": sha256(directory / "rows.parquet")}
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    with atomic(directory / "manifest.json") as file:
        file.write(text.encode() + b"\n")
    return Manifest(directory, document)


def _place(parent: str) -> Path | str:
    """A parent as a path on this machine, or as the URL that it is."""
    return parent if "://" in parent else Path(parent)


def load_manifest(path: str | Path, *, parents: str | Path | None = None) -> Manifest:
    """Open a manifest, given its folder or its ``manifest.json``.

    ``parents`` is a folder that holds the shards that were cleaned, by their names in the manifest;
    default: they are where they were then.

    Raises ``ManifestError`` where it is missing, malformed or points outside of its folder, and
    ``SchemaVersionError`` where a newer auditor wrote it.
    """
    path = Path(path)
    file = path / "manifest.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ManifestError(
            f"no manifest: {error.strerror}", path=file, remedy="Name the folder dedupe wrote"
        ) from error
    except ValueError as error:
        raise ManifestError(f"not JSON: {error}", path=file) from error
    _check_document(document, file)
    folder = None if parents is None else Path(parents).absolute()
    return Manifest(file.parent, document, parents_folder=folder)


def verify(
    directory: str | Path,
    *,
    sample: int | None = None,
    parents: str | Path | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Check a cleaned folder against its manifest.

    Children by SHA-256 and number of rows, ``rows.parquet`` by SHA-256 and for consistency (every
    row once, kept and dropped add up, every keeper is kept), counts against a recount, weights
    against a sum of one, ``data/`` for files that the manifest does not name, parents by SHA-256
    where they are still there.

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
    children, inputs = manifest.shards, manifest.parents
    for number, i in enumerate(picked):
        if manifest.has_children:
            _check_child(children[i], entries[i], manifest.reading, failures)
        _check_parent(inputs[i], entries[i], failures, missing)
        done(number)
    _check_rows(manifest, failures)
    _check_totals(manifest, failures)
    _check_strays(manifest, failures)
    return VerifyResult(
        n_shards=len(entries),
        n_shards_hashed=len(picked),
        n_rows=manifest.counts["rows_in"],
        failures=tuple(failures),
        missing_parents=tuple(missing),
    )


def _check_document(document: Any, file: Path) -> None:
    missing = [n for n in _REQUIRED if not isinstance(document, dict) or n not in document]
    if missing:
        raise ManifestError(f"not a manifest: no {', '.join(missing)}", path=file)
    version = document["manifest_version"]
    if not isinstance(version, int) or version > MANIFEST_VERSION:
        raise SchemaVersionError(
            "the manifest", path=file, found=version, expected=MANIFEST_VERSION
        )
    for i, entry in enumerate(document["shards"]):
        missing = [n for n in _REQUIRED_OF_SHARD if n not in entry]
        if missing:
            raise ManifestError(f"shard {i} has no {', '.join(missing)}", path=file)
        remedy = "Do not use this manifest; it was not written by auditor"
        if _leads_out(entry["shard"]):
            raise ManifestError(
                f"shard {i} has a name that leads out of its folder: {entry['shard']!r}",
                path=file,
                remedy=remedy,
            )
        if entry["child"] is None:
            continue
        target = (file.parent / entry["child"]).resolve()
        if _leads_out(entry["child"]) or not target.is_relative_to(file.parent.resolve()):
            raise ManifestError(
                f"shard {i} points outside of the manifest's folder: {entry['child']!r}",
                path=file,
                remedy=remedy,
            )


def _leads_out(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts


def _check_child(
    shard: Shard, entry: dict[str, Any], reading: Reading, failures: list[str]
) -> None:
    try:
        if sha256_of(shard.files()) != entry["child_sha256"]:
            failures.append(f"{shard.path}: SHA-256 differs from the manifest")
        n_rows = shard.count(reading)
    except (AuditorError, OSError) as error:
        failures.append(f"{shard.path}: {error}")
        return
    if n_rows != entry["rows_out"]:
        failures.append(f"{shard.path}: {n_rows} rows, the manifest has {entry['rows_out']}")


def _check_parent(
    shard: Shard, entry: dict[str, Any], failures: list[str], missing: list[str]
) -> None:
    if not Path(shard.path).exists():
        missing.append(str(shard.path))
        return
    try:
        if sha256_of(shard.files()) != entry["parent_sha256"]:
            failures.append(f"{shard.path}: the input has changed since it was cleaned")
    except (AuditorError, OSError) as error:
        failures.append(f"{shard.path}: {error}")


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


def _read_rows(path: Path) -> pl.DataFrame:
    try:
        rows = pl.read_parquet(path)
        return rows.select(pl.col(name).cast(kind) for name, kind in ROWS_SCHEMA.items())
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ManifestError(
            f"cannot be read: {error}", path=path, remedy="Clean the inputs again"
        ) from error
