"""Small JSON Lines files for the cleaning tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zstandard


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Rows as JSON Lines, compressed as the name says."""
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if path.suffix == ".gz":
        lines = gzip.compress(lines)
    elif path.suffix == ".zst":
        lines = zstandard.compress(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lines)
    return path
