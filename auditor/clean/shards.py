"""Shards: which files are meant, what their rows are, and how a cleaned copy is written.

JSON Lines (plain, gzip, zstd) and Parquet. Inputs are only ever read.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from auditor.clean.formats import jsonl, parquet
from auditor.clean.row import DEFAULTS, Finding, Findings, Reading, Row
from auditor.errors import ShardError
from auditor.files import atomic

FORMATS = "JSON Lines (.jsonl, .ndjson, .json; plain, .gz or .zst) and Parquet (.parquet)"

_JSONL = re.compile(r"\.(jsonl|ndjson|json)(\.gz|\.zst|\.zstd)?$", re.IGNORECASE)
_PARQUET = re.compile(r"\.(parquet|pq)$", re.IGNORECASE)
# In a folder, a bare .json is rather a description of the data than data.
_FOUND_IN_FOLDERS = re.compile(r"\.((jsonl|ndjson)(\.gz|\.zst|\.zstd)?|parquet|pq)$", re.IGNORECASE)
# Data all the same, which must not be passed over in silence.
_OTHER_DATA = re.compile(r"\.(arrow|bin|idx|mds(\.zstd)?|tar|csv|tsv|txt|npy|feather|orc)$", re.I)


@dataclass(frozen=True)
class Shard:
    """One unit of the input, which becomes one unit of the output.

    ``path`` is a file or a folder, or the URL of one; ``name`` is its path relative to the inputs'
    common folder, with slashes.
    """

    path: Path | str
    name: str

    @property
    def stem(self) -> str:
        """The name of the file or folder without extensions: the source of rows that name none."""
        return Path(_PARQUET.sub("", _JSONL.sub("", self.name))).name

    @property
    def format(self) -> str:
        return "parquet" if _PARQUET.search(self.name) else "jsonl"

    def files(self) -> tuple[Path, ...]:
        """Every file of a local shard, in order."""
        return (self._path(),)

    def rows(
        self, reading: Reading = DEFAULTS, findings: list[Finding] | None = None
    ) -> Iterator[Row]:
        """Stream the rows in order; what a careful reader should know is added to ``findings``.

        Raises ``ShardError`` for what cannot be read. With ``on_error="skip"`` a row that cannot be
        read is ``UNREADABLE`` and a shard that is cut off ends there, each with a finding.
        """
        found = Findings(findings)
        try:
            yield from self._module().rows(self._path(), reading, found)
        except ShardError as error:
            if reading.on_error == "raise":
                raise
            found.lost(error.row, error.message)
        finally:
            found.close()

    def copy(self, out: Path, keep: NDArray[np.bool_], reading: Reading = DEFAULTS) -> None:
        """Write the kept rows (bool [n_rows]) to ``out``, which appears whole or not at all."""
        if keep.all() and reading.on_error == "raise":
            # Nothing to remove: the child is the parent, byte for byte.
            with self._path().open("rb") as source, atomic(out) as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        else:
            self._module().copy(self._path(), out, keep, reading)

    def count(self, reading: Reading = DEFAULTS) -> int:
        """Number of rows, without parsing them."""
        return int(self._module().count(self._path(), reading))

    @contextmanager
    def local(self, scratch: Path) -> Iterator[Shard]:
        """The shard on this machine: itself, or a copy in ``scratch`` removed at the end."""
        yield self

    def _module(self) -> ModuleType:
        return parquet if self.format == "parquet" else jsonl

    def _path(self) -> Path:
        if isinstance(self.path, str):
            raise ShardError("is not on this machine", path=self.path)
        return self.path


@dataclass(frozen=True)
class Inputs:
    """The shards in natural order, the folders given, and data files in them not read."""

    shards: tuple[Shard, ...]
    folders: tuple[Path, ...]
    ignored: tuple[Path, ...]


def find_shards(inputs: Sequence[str | Path]) -> Inputs:
    """Expand files, folders and globs; the same inputs always give the same shards in order.

    Raises ``ShardError`` for a path that does not exist, a format that is not read, and where no
    shard is found at all.
    """
    folders: list[Path] = []
    parents: list[Path] = []
    files: dict[Path, None] = {}
    ignored: dict[Path, None] = {}
    for given in inputs:
        for path in _expand(given):
            if path.is_dir():
                folders.append(path)
                found, other = _walk(path)
                files.update(dict.fromkeys(found))
                ignored.update(dict.fromkeys(other))
            else:
                if not (_JSONL.search(path.name) or _PARQUET.search(path.name)):
                    raise ShardError(
                        "this format is not read today",
                        path=path,
                        remedy=f"Formats read: {FORMATS}. Convert the file to one of them",
                    )
                parents.append(path.parent)
                files[path] = None
    if not files:
        raise ShardError(
            f"no shard found{f'; data of other formats: {len(ignored)} files' if ignored else ''}",
            path=", ".join(map(str, inputs)) or None,
            remedy=f"Formats read: {FORMATS}",
        )
    common = os.path.commonpath([*folders, *parents])
    shards = [Shard(path, path.relative_to(common).as_posix()) for path in files]
    shards.sort(key=lambda shard: _natural(shard.name))
    return Inputs(tuple(shards), tuple(folders), tuple(sorted(ignored)))


MARKER = ".incomplete"
"""File in an output folder while it is being written."""


def check_out(out: Path, inputs: Inputs) -> None:
    """Refuse an output folder that is in use, or that holds or lies within an input.

    A folder that an interrupted call left behind (``MARKER`` is in it) may be used again.
    """
    target = out.resolve()
    for shard in inputs.shards:
        if Path(shard.path).resolve().is_relative_to(target):
            raise ShardError(
                f"the output folder contains the input {shard.path}",
                path=out,
                remedy="Choose an --out outside of the inputs",
            )
    for folder in inputs.folders:
        if target.is_relative_to(folder.resolve()):
            raise ShardError(
                f"the output folder lies within the input {folder}",
                path=out,
                remedy="Choose an --out outside of the inputs",
            )
    if out.exists() and not out.is_dir():
        raise ShardError("the output is a file", path=out, remedy="Choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).exists():
        raise ShardError(
            "the output folder is not empty",
            path=out,
            remedy="Choose another --out, or remove the folder",
        )


def begin_out(out: Path) -> None:
    """Mark the output folder as incomplete, and clear what an interrupted call left in it."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / MARKER).exists():
        (out / "manifest.json").unlink(missing_ok=True)
        (out / "rows.parquet").unlink(missing_ok=True)
        shutil.rmtree(out / "data", ignore_errors=True)
    (out / MARKER).touch()


def _expand(given: str | Path) -> list[Path]:
    path = Path(given)
    if path.exists():
        return [_absolute(path)]
    # Path.glob takes no absolute patterns.
    found = glob.glob(str(given), recursive=True)  # noqa: PTH207
    if not found:
        raise ShardError("no such file or folder", path=given, remedy="Check the path")
    return sorted((_absolute(Path(name)) for name in found), key=lambda p: _natural(str(p)))


def _absolute(path: Path) -> Path:
    # Symbolic links stay: in a hub cache the link has the name and its target has none.
    return Path(os.path.abspath(path))  # noqa: PTH100


def _walk(folder: Path) -> tuple[list[Path], list[Path]]:
    found, other = [], []
    for path in sorted(folder.rglob("*"), key=lambda p: _natural(str(p))):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.is_file():
            if _FOUND_IN_FOLDERS.search(path.name):
                found.append(path)
            elif _OTHER_DATA.search(path.name):
                other.append(path)
    return found, other


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts shard 2 before shard 10."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(p), p) if p.isdecimal() else (0, 0, p) for p in parts]
