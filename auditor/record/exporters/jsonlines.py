"""Metrics to a file, one JSON object per line."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO


class JSONLines:
    """Append each point to a file as a JSON object: ``step``, ``time`` and the metrics.

    ``time`` is in seconds since the epoch. A value that is not finite is ``null``. A line is handed
    to the operating system at once, so that a killed process loses none; a line that was cut off,
    by a full disk for instance, is left to itself and the next begins after it.

    Args:
        path: the file; it and its folder are made at the first point.

    Raises (as counted failures): OSError when the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._file: BinaryIO | None = None

    def export(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, "time": time.time(), **finite}, allow_nan=False)
        if self._file is None:
            self._file = self._opened()
        data = line.encode() + b"\n"
        try:
            if self._file.write(data) < len(data):
                raise OSError(f"{self._path}: a line was written in part")
        except OSError:
            self.close()  # opened again, it begins a new line
            raise

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _opened(self) -> BinaryIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("ab+", buffering=0)
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return file
