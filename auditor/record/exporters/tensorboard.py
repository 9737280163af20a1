"""Metrics to TensorBoard event files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from auditor.record.exporting import required

FLUSH_S: Final = 5
"""How often event files are flushed: what a killed process loses at most."""


class TensorBoard:
    """Write metrics as scalars of their names, by ``torch.utils.tensorboard``.

    Args:
        logdir: the folder of the event files, made at the first point.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        self._tensorboard = required("torch.utils.tensorboard", extra="tensorboard")
        self._logdir = Path(logdir).absolute()
        self._writer: Any = None

    def export(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._tensorboard.SummaryWriter(str(self._logdir), flush_secs=FLUSH_S)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
