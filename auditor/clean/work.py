"""The work folder: what an interrupted call has done already, and who is at it now.

OUT/.incomplete/            there until the output is whole
    lock                    held by the process that works here
    job.json                inputs and settings; other ones start over
    scan/000012.*           facts of the rows of shard 12
    hashes/000012.*         shingle hashes of those of its rows that may be near-duplicates
    write/000012.json       what was written of shard 12

Everything in it is whole or not there, and is the same whoever made it: a call that finds it there
need not make it again. Files are flushed to disk before they get their names, and the folder goes
last, so this holds after a loss of power as well. A file that is damaged all the same, or gone, is
told by its size and made again.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from auditor.clean.shards import MARKER
from auditor.errors import ShardError
from auditor.files import atomic

_PARTIAL: Final = re.compile(r"\..+\.partial-\d+")
"""Name of a file or folder whose writer was killed."""


@contextmanager
def work_folder(out: Path | None, job: dict[str, Any]) -> Iterator[Path]:
    """The work folder of an output, kept when the block fails and removed when it does not.

    Without an output (a rehearsal) it is a temporary folder, removed in any case.

    Args:
        out: the output folder, made if it is not there.
        job: inputs and settings, in values of JSON. What was left there by another job is removed.

    Raises ``ShardError`` where another process works there, or the folder cannot be written.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="auditor-") as name:
            yield Path(name)
        return
    folder = out / MARKER
    _claim(out, folder)
    lock = _locked(out, folder / "lock")
    try:
        written = folder / "job.json"
        text = json.dumps(job, sort_keys=True, default=list).encode()
        if not written.is_file() or written.read_bytes() != text:
            _clear(out, folder)
            write_json(written, job)
        yield folder
        _remove_partial(out)
        _empty(folder)
        (folder / "lock").unlink()
        # Released first: of a file that is open, a network file system leaves something behind.
        lock.release()
        folder.rmdir()
    finally:
        lock.release()


@contextmanager
def writing(out: Path, again: str) -> Iterator[None]:
    """An operating system that refuses to write is told of as bad input is.

    ``again``: what the same command does, a sentence without its full stop.
    """
    try:
        yield
    except OSError as error:
        path = Path(error.filename) if isinstance(error.filename, str) else out
        remedy = again
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"Free some space. {again}"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            here, there = out.absolute(), path.absolute()
            is_out = there.is_relative_to(here) or here.is_relative_to(there)
            change = "Choose another --out, or change" if is_out else "Change"
            remedy = f"{change} the permissions there. {again}"
        raise ShardError(
            f"cannot go on: {error.strerror or error}", path=path, remedy=remedy
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write a file of JSON, whole or not at all."""
    with atomic(path) as file:
        file.write(json.dumps(value, sort_keys=True, default=list).encode())


def read_json(path: Path) -> Any:
    """What ``write_json`` wrote; None where it did not, or the file is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def damaged(path: Path) -> ShardError:
    """The error for a file of the work folder, removed here, that later stages cannot do without.

    The next call finds it gone and makes it again.
    """
    path.unlink(missing_ok=True)
    return ShardError(
        "the work folder is damaged", path=path, remedy="The same command makes this file again"
    )


def interrupted_here(out: Path) -> ShardError:
    """The refusal of a folder in which a call of another kind was interrupted."""
    return ShardError(
        "another call was interrupted here",
        path=out,
        remedy="Choose another --out, or remove the folder",
    )


def _claim(out: Path, folder: Path) -> None:
    """Make the work folder, unless an interrupted call left one."""
    out.mkdir(parents=True, exist_ok=True)
    if folder.is_file():  # the mark of ``restore``
        raise interrupted_here(out)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    # Another process may have made its output whole since this call looked.
    if any(path.name != MARKER for path in out.iterdir()):
        folder.rmdir()
        raise ShardError(
            "another process has just written this output", path=out, remedy="Choose another --out"
        )


def _locked(out: Path, path: Path) -> FileLock:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ShardError(
            "another process is writing this output",
            path=out,
            remedy="Wait for it, or choose another --out",
        ) from error
    return lock


def _clear(out: Path, folder: Path) -> None:
    """Remove what an interrupted call with another job left."""
    for name in ("manifest.json", "rows.parquet", "substrings.parquet"):
        (out / name).unlink(missing_ok=True)
    if (out / "data").exists():
        shutil.rmtree(out / "data")
    _empty(folder)


def _empty(folder: Path) -> None:
    """Remove all of the work folder but the lock."""
    for path in folder.iterdir():
        if path.name != "lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove_partial(out: Path) -> None:
    """Remove what killed processes were writing."""
    for path in [*out.iterdir(), *(out / "data").rglob("*")]:
        if _PARTIAL.fullmatch(path.name):
            # One within another went with it.
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
