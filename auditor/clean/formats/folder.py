"""Units of several files: a folder that appears whole or not at all, and paths within it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from auditor.errors import ShardError


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A folder that is renamed to ``out`` when the block ends without an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        if out.exists():
            shutil.rmtree(out)
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def within(folder: Path, name: str) -> Path:
    """A file that a unit's own index names; raises ``ShardError`` where it leads out of it."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name:
        raise ShardError(
            f"names a file outside of the folder: {name!r}",
            path=folder,
            remedy="Do not use this folder as it is",
        )
    return folder / name


def read_index(path: Path) -> dict[str, Any]:
    """A JSON object; raises ``ShardError`` where it is missing or is none."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ShardError(
            f"cannot be read as JSON: {error}", path=path, remedy="Fetch or write the folder again"
        ) from error
    if not isinstance(document, dict):
        raise ShardError("is not a JSON object", path=path)
    return document
