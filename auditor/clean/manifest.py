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
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor.clean.inputs import located
from auditor.clean.mixes import MixSampler
from auditor.clean.row import Cuts, Reading, Row
from auditor.clean.shards import Shard
from auditor.clean.substrings import cuts_of
from auditor.errors import ManifestError, SchemaVersionError, ShardError
from auditor.files import atomic, sha256, sha256_of
from auditor.measure.substrings import cut
from auditor.schema import MANIFEST_VERSION, ROWS
from auditor.tables import polars_schema

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
        return _read(self._folder() / "rows.parquet", ROWS_SCHEMA)

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
        return tuple(map(self._parent, self.document["shards"]))

    def _parent(self, entry: Mapping[str, Any]) -> Shard:
        name = entry["shard"]
        if self.parents_folder is not None:
            return Shard(self.parents_folder / name, name)
        place = located(entry["parent"])
        # Of what is behind a URL, which files belong to it goes by its format.
        return Shard(place, name, entry.get("format") if isinstance(place, str) else None)

    @property
    def reading(self) -> Reading:
        """How the rows of children are read."""
        said = self.document["parameters"]
        return Reading(**{name: said.get(name) for name in ("content", "dtype", "eot")})

    @property
    def reading_of_parents(self) -> Reading:
        """How the rows of parents are read: with those that could not be."""
        return replace(self.reading, on_error=self.document["parameters"].get("on_error", "raise"))

    @contextmanager
    def parent_as_cleaned(self, number: int) -> Iterator[Shard]:
        """A parent on this machine, which is what was cleaned: what is behind a URL is fetched.

        Raises ``ShardError`` where it is not there any more or has changed.
        """
        parent = self.parents[number]
        with (
            tempfile.TemporaryDirectory(prefix="auditor-") as scratch,
            parent.local(Path(scratch)) as shard,
        ):
            said = None
            if not Path(shard.path).exists():
                said = "the input is not there any more", "the inputs now"
            elif sha256_of(shard.files()) != self.document["shards"][number]["parent_sha256"]:
                said = "the input has changed since it was cleaned", "it as it was"
            if said is not None:
                remedy = f"Name the folder that holds {said[1]} with --parents, or parents="
                raise ShardError(said[0], path=parent.path, remedy=remedy)
            yield shard

    def kept_rows(self, number: int) -> Generator[Row, None, None]:
        """The rows of a shard that stay, in order, from its child or else from its parent.

        Spans that were to be cut are cut. Raises ``ShardError`` where the rows are to come from a
        parent that is not what it was.
        """
        entry = self.document["shards"][number]
        if not entry["rows_out"]:
            return
        if self.has_children:
            yield from self.shards[number].rows(self.reading)
            return
        keep, cuts = self.keep(entry["shard"]), self._cuts.get(entry["shard"], {})
        with self.parent_as_cleaned(number) as parent:
            rows = enumerate(parent.rows(self.reading_of_parents))
            for place, row in compress(rows, keep):
                spans = cuts.get(place)
                if spans is None or row.content is None:
                    yield row
                else:
                    yield row._replace(content=cut(row.content, spans))

    @cached_property
    def _cuts(self) -> dict[str, Cuts]:
        """What is to be cut out of the rows of parents, by shard."""
        if not (self.document.get("substrings") or {}).get("are_cut"):
            return {}
        return cuts_of(_read(self._folder() / "substrings.parquet"))

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
            with closing(self.kept_rows(number)) as rows:
                contents = (row.content for row in rows)
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


def write_manifest(directory: Path, document: dict[str, Any]) -> Manifest:
    """Write ``manifest.json`` beside ``rows.parquet``: a folder with it is complete."""
    document = {**document, "rows_sha256": sha256(directory / "rows.parquet")}
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    with atomic(directory / "manifest.json") as file:
        file.write(text.encode() + b"\n")
    return Manifest(directory, document)


def load_manifest(path: str | Path, *, parents: str | Path | None = None) -> Manifest:
    """Open a manifest, given its folder or its ``manifest.json``.

    ``parents`` is a folder that holds the shards that were cleaned, by their names in the manifest;
    default: they are where they were then.

    Raises ``ManifestError`` where it is missing, malformed or points outside of its folder, or
    ``parents`` is no folder; ``SchemaVersionError`` where a newer auditor wrote it.
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
    if folder is not None and not folder.is_dir():
        raise ManifestError("no such folder of inputs", path=folder)
    return Manifest(file.parent, document, parents_folder=folder)


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


def _read(path: Path, schema: Mapping[str, Any] | None = None) -> pl.DataFrame:
    """A table of the manifest, with the columns of ``schema`` where one is given."""
    try:
        rows = pl.read_parquet(path)
        if schema is None:
            return rows
        return rows.select(pl.col(name).cast(kind) for name, kind in schema.items())
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ManifestError(
            f"cannot be read: {error}", path=path, remedy="Clean the inputs again"
        ) from error
