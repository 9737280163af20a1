"""A file system that is not this machine's, though its files are: ``elsewhere:///folder/file``."""

from __future__ import annotations

from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Elsewhere(LocalFileSystem):
    """What stands in for a bucket in tests of one process."""

    protocol = "elsewhere"


fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)


def elsewhere(path: Path) -> str:
    """The URL that a file or folder has there."""
    return f"elsewhere://{path}"
