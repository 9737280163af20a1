"""The work folder: what an interrupted call has done already, and who is at it now.

OUT/.incomplete/            there until the output is whole
    job.json                inputs and settings; other ones start over
    scan/000012.*           facts of the rows of shard 12
    hashes/000012.*         shingle hashes of those of its rows that may be near-duplicates
    write/000012.json       what was written of shard 12
OUT/.lock                   held by the process that works here

Everything in it is whole or not there, and is the same whoever made it: a call that finds it there
need not make it again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from auditor.clean.shards import MARKER
from auditor.errors import ShardError
from auditor.files import atomic


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
    with _only_one(out):
        folder = out / MARKER
        text = json.dumps(job, sort_keys=True, default=list)
        written = folder / "job.json"
        if not written.is_file() or written.read_text("utf-8") != text:
            _clear(out)
            folder.mkdir()
            write_json(written, job)
        yield folder
        shutil.rmtree(folder)


def write_json(path: Path, value: Any) -> None:
    """Write a file of JSON, whole or not at all."""
    with atomic(path) as file:
        file.write(json.dumps(value, sort_keys=True, default=list).encode())


def read_json(path: Path) -> Any:
    """What ``write_json`` wrote, or None where it did not."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


@contextmanager
def _only_one(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ShardError(
            "another process is writing this output",
            path=out,
            remedy="Wait for it, or choose another --out",
        ) from error
    try:
        yield
        (out / ".lock").unlink(missing_ok=True)
    finally:
        lock.release()


def _clear(out: Path) -> None:
    """Remove what an interrupted call with another job left."""
    for name in ("manifest.json", "rows.parquet"):
        (out / name).unlink(missing_ok=True)
    for folder in (out / "data", out / MARKER):
        shutil.rmtree(folder, ignore_errors=True)
