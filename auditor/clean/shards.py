"""Shards: which units are meant, what their rows are, and how a cleaned copy is written.

What the formats are, ``auditor.clean.formats`` says. Inputs are only ever read.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.clean.formats import FORMATS, format_of, module_of, without_suffix
from auditor.clean.formats.folder import atomic_folder
from auditor.clean.inputs import (
    Found,
    Unit,
    expand,
    is_url,
    natural,
    remote_files,
    remote_stamps,
    unreachable,
)
from auditor.clean.row import DEFAULTS, Cuts, Finding, Findings, Reading, Row
from auditor.errors import ShardError
from auditor.files import append, atomic


@dataclass(frozen=True)
class Shard:
    """One unit of the input, which becomes one unit of the output.

    ``path`` is a file or a folder, or the URL of one; of Megatron's pair it is the ``.idx``.
    ``name`` is its path relative to the inputs' common folder, with slashes. ``kind`` is its format
    where it is known already; of a local path it is found out.
    """

    path: Path | str
    name: str
    kind: str | None = None

    @property
    def stem(self) -> str:
        """The name of the file or folder without extensions: the source of rows that name none."""
        return without_suffix(PurePosixPath(self.name).name)

    @property
    def format(self) -> str:
        """A name of ``auditor.clean.formats``; raises ``ShardError`` where it is none."""
        kind = self.kind or format_of(self._path())
        if kind is None:
            raise ShardError(
                "this format is not read", path=self.path, remedy=f"Formats read: {FORMATS}"
            )
        return kind

    def files(self) -> tuple[Path, ...]:
        """Every file of a local shard, in order; raises ``ShardError`` where it names none."""
        return tuple(module_of(self.format).files(self._path()))

    def stamps(self) -> list[list[Any]]:
        """Of each file what is another once it is written again: of a local one, size and time.

        Raises ``ShardError`` where what is behind a URL cannot be reached.
        """
        if isinstance(self.path, str):
            return list(remote_stamps(self.path, self.format))
        stats = [file.stat() for file in self.files()]
        return [[stat.st_size, stat.st_mtime_ns] for stat in stats]

    def rows(
        self, reading: Reading = DEFAULTS, findings: list[Finding] | None = None
    ) -> Iterator[Row]:
        """Stream the rows in order; what a careful reader should know is added to ``findings``.

        Raises ``ShardError`` for what cannot be read. With ``on_error="skip"`` a row that cannot be
        read is ``UNREADABLE`` and a shard that is cut off ends there, each with a finding.
        """
        self._check(reading)
        found = Findings(findings)
        ids, numbers = array("q"), array("q")
        n_rows = 0
        try:
            for row in module_of(self.format).rows(self._path(), reading, found):
                if row.sample_id is not None and found.wanted:
                    ids.append(hash(row.sample_id))
                    numbers.append(n_rows)
                n_rows += 1
                yield row
            if not n_rows:
                found.notice(None, "holds no rows")
            _notice_repeated(ids, numbers, found)
        except ShardError as error:
            if reading.on_error == "raise":
                raise
            found.ends(error.row, error.message)
        finally:
            found.close()

    def copy(
        self,
        out: Path,
        keep: NDArray[np.bool_],
        reading: Reading = DEFAULTS,
        cuts: Cuts | None = None,
    ) -> None:
        """Write the kept rows (bool [n_rows]) to ``out``, which appears whole or not at all.

        ``keep`` has as many rows as ``rows`` gave with the same ``reading``. Raises ``ShardError``
        for ``cuts`` in a format whose contents are not changed.
        """
        self._check(reading)
        if cuts:
            self.check_cut()
            module_of(self.format).copy_cut(self._path(), out, keep, reading, cuts)
        elif keep.all() and self._is_whole(len(keep), reading):
            # Nothing to remove: the child is the parent, byte for byte.
            self._copy_files(out)
        else:
            module_of(self.format).copy(self._path(), out, keep, reading)

    def check_cut(self) -> None:
        """Raise ``ShardError`` where spans cannot be cut out of contents of this format."""
        if not hasattr(module_of(self.format), "copy_cut"):
            raise ShardError(
                f"contents of {self.format} shards are not changed",
                path=self.path,
                remedy="Report substrings instead of cutting them (--substrings report), write no "
                "shards (--manifest-only), or convert this one to JSON Lines or Parquet",
            )

    def copy_readable(
        self, out: Path, keep: NDArray[np.bool_], reading: Reading
    ) -> NDArray[np.bool_]:
        """``copy`` of those kept rows that can be; returns which were left out, bool [n_rows].

        When skipping these are rows that cannot be read, and that the format cannot give back as
        they are. Where no other is kept, nothing is written.
        """
        try:
            self.copy(out, keep, reading)
        except ShardError:
            module = module_of(self.format)
            if reading.on_error == "raise" or not hasattr(module, "lost"):
                raise
            lost: NDArray[np.bool_] = module.lost(self._path(), keep)
            if not lost.any():
                raise
            if (keep & ~lost).any():
                self.copy(out, keep & ~lost, reading)
            return lost
        return np.zeros(len(keep), np.bool_)

    def count(self, reading: Reading = DEFAULTS) -> int:
        """Number of rows, without parsing them."""
        self._check(reading)
        return int(module_of(self.format).count(self._path(), reading))

    @contextmanager
    def local(self, scratch: Path) -> Iterator[Shard]:
        """The shard on this machine: itself, or a copy in ``scratch`` removed at the end.

        An error of the copy that ends the block names the file that was copied.

        Raises ``ShardError`` where a URL cannot be read.
        """
        if not isinstance(self.path, str):
            yield self
            return
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch, prefix="shard-") as folder:
            try:
                yield replace(self, path=_fetch(self.path, Path(folder), self.kind))
            except ShardError as error:
                # The copy is gone when this is read.
                here, there = f"{folder}/", self.path[: self.path.rindex("/") + 1]
                error.message = error.message.replace(here, there)
                if str(error.path).startswith(here):
                    error.path = str(error.path).replace(here, there)
                raise

    def _is_whole(self, n_rows: int, reading: Reading) -> bool:
        if reading.on_error == "raise":
            return True
        try:
            return bool(self.count(replace(reading, on_error="raise")) == n_rows)
        except ShardError:
            return False

    def _copy_files(self, out: Path) -> None:
        path = self._path()
        if path.is_dir():
            with atomic_folder(out) as folder:
                for file in self.files():
                    target = folder / file.relative_to(path)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, target)
            return
        for file in self.files():
            target = out if file == path else out.with_suffix(file.suffix)
            with atomic(target) as sink:
                append(file, sink)

    def _check(self, reading: Reading) -> None:
        # What the options lack is no fault of the file, and is not skipped.
        module = module_of(self.format)
        if hasattr(module, "check"):
            module.check(self._path(), reading)

    def _path(self) -> Path:
        if isinstance(self.path, str):
            raise ShardError("is not on this machine", path=self.path)
        return self.path


def _notice_repeated(ids: array[int], numbers: array[int], findings: Findings) -> None:
    """Whether rows carry the id of a row before them; ids by their hashes."""
    values = np.asarray(ids, np.int64)
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[inverse] != np.arange(len(values)))
    if len(again):
        row, earlier = (numbers[int(i)] for i in (again[0], first[inverse[again[0]]]))
        what = f"{len(again)} rows have the id of an earlier one, first this one that of {earlier}"
        findings.notice(row, what)


def _fetch(url: str, folder: Path, kind: str | None) -> Path:
    """Download a unit into ``folder``; returns its path there."""
    try:
        system, path, files = remote_files(url, kind)
        name = PurePosixPath(path).name
        for each in files:
            target = folder / posixpath.relpath(each, posixpath.dirname(path))
            if not target.resolve().is_relative_to(folder.resolve()):
                raise ShardError(f"holds a file that leads out of it: {each!r}", path=url)
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(each, str(target))
    except OSError as error:
        raise unreachable(url, error) from error
    return folder / name


@dataclass(frozen=True)
class Inputs:
    """The shards in natural order, the folders given, and data files in them not read.

    ``beside`` are small files that belong to several shards and name them (``dataset_dict.json``):
    where each is, and its name as a shard has one.
    """

    shards: tuple[Shard, ...]
    folders: tuple[Path, ...]
    ignored: tuple[Path | str, ...]
    beside: tuple[tuple[Path | str, str], ...] = ()


def find_shards(inputs: Sequence[str | Path]) -> Inputs:
    """Expand files, folders, globs and URLs; the same inputs always give the same shards in order.

    Raises ``ShardError`` for what does not exist, a format that is not read, and where no shard is
    found at all.
    """
    found = [each for given in inputs for each in expand(given)]
    units: dict[Path | str, Unit] = {unit.path: unit for each in found for unit in each.units}
    ignored = list(dict.fromkeys(path for each in found for path in each.ignored))
    if not units:
        raise ShardError(
            f"no shard found{f'; data of other formats: {len(ignored)} files' if ignored else ''}",
            path=", ".join(map(str, inputs)) or None,
            remedy=f"Formats read: {FORMATS}",
        )
    names = _Names(found)
    shards = [Shard(unit.path, names.of(unit.path), unit.format) for unit in units.values()]
    shards.sort(key=lambda shard: natural(shard.name))
    for one, other in pairwise(shards):
        if one.name == other.name:
            raise ShardError(
                f"has the name {one.name!r}, and so has {other.path}",
                path=one.path,
                remedy="Clean them apart",
            )
    return Inputs(
        tuple(shards),
        tuple(Path(each.folder) for each in found if each.folder and not is_url(each.folder)),
        tuple(sorted(ignored, key=str)),
        tuple((path, names.of(path)) for each in found for path, _ in each.beside),
    )


class _Names:
    """Names relative to the common folder, those of URLs to the common one of theirs."""

    def __init__(self, found: Sequence[Found]) -> None:
        self._common: dict[str, str] = {}
        parents: dict[str, list[str]] = {}
        for each in found:
            for folder in [each.folder] if each.folder else [unit.parent for unit in each.units]:
                parents.setdefault(_scheme(folder), []).append(folder.removeprefix(_scheme(folder)))
        for scheme, folders in parents.items():
            self._common[scheme] = (posixpath if scheme else os.path).commonpath(folders)

    def of(self, path: Path | str) -> str:
        scheme = _scheme(str(path))
        inner = str(path).removeprefix(scheme)
        common = self._common[scheme]
        name = posixpath.relpath(inner, common) if scheme else Path(inner).relative_to(common)
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts:
            raise ShardError("has a name that leads out of its folder", path=path)
        return PurePosixPath(*parts).as_posix()


def _scheme(path: str) -> str:
    return path[: path.index("://") + 3] if is_url(path) else ""


MARKER = ".incomplete"
"""File in an output folder while it is being written."""


def check_out(out: Path, inputs: Inputs) -> None:
    """Refuse an output folder that is in use, or that holds or lies within an input.

    A folder that an interrupted call left behind (``MARKER`` is in it) may be used again.
    """
    target = out.resolve()
    for shard in inputs.shards:
        if isinstance(shard.path, Path) and shard.path.resolve().is_relative_to(target):
            raise ShardError(
                f"the output folder contains the input {shard.path}",
                path=out,
                remedy="Choose an --out outside of the inputs",
            )
    units = [shard.path for shard in inputs.shards if isinstance(shard.path, Path)]
    for folder in (*inputs.folders, *(path for path in units if path.is_dir())):
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
