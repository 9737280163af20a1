"""Metrics to a local Trackio project."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from auditor.record.exporting import required

REMOTE: Final = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Variables that make Trackio send what is logged to another machine."""


class Trackio:
    """Log metrics to a run of a local Trackio project; nothing is sent over a network.

    Args:
        project: the project.
        name: the run's name; by default Trackio makes one.
        group: the group that the run is shown in.

    Raises:
        ImportError: trackio is not installed.
        ValueError: the environment directs Trackio to a Space or a server.
    """

    def __init__(self, project: str, *, name: str | None = None, group: str | None = None) -> None:
        directed = [variable for variable in REMOTE if os.environ.get(variable)]
        if directed:
            raise ValueError(f"Trackio exports locally only, and {', '.join(directed)} is set")
        self._trackio = required("trackio", extra="trackio")
        self._init = {"project": project, "name": name, "group": group}
        self._run: Any = None

    def export(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._trackio.init(
                **self._init, embed=False, auto_log_gpu=False, auto_log_cpu=False
            )
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
