"""The register of checkpoints: one JSON object per line, written on the recorder's thread.

checkpoints/rank-00000.jsonl    {"attempt", "step", "path", "time"}
"""

from __future__ import annotations

import json
import os
import time
from os import PathLike
from pathlib import Path

FOLDER = "checkpoints"


def append_checkpoint(
    run: Path, path: str | PathLike[str], step: int, *, attempt: int, rank: int
) -> None:
    """Add a checkpoint to the register of a rank and force it to the disk.

    ``path`` is kept absolute where it is a local one, as it is where it names a scheme
    (``s3://``). Raises ``OSError``.
    """
    text = os.fspath(path)
    place = text if "://" in text else str(Path(text).absolute())
    entry = {"attempt": attempt, "step": step, "path": place, "time": time.time()}
    file = run / FOLDER / f"rank-{rank:05d}.jsonl"
    file.parent.mkdir(exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        # A line torn by a kill must not swallow this one.
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        line = json.dumps(entry).encode() + b"\n"
        os.write(descriptor, b"\n" + line if torn else line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
