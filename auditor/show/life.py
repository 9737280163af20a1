"""Whether a training that is watched goes on, and how fast; the times come from the caller."""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from auditor.attempt import STALE_S

QUIET_S: Final = 30.0
QUIET_INTERVALS: Final = 10
"""A run is stalled when nothing came for so long, and for so many times the usual interval."""

GONE_S: Final = 15.0
"""A process that is not there is believed to be gone after this: its last facts may be on their
way, and it may live in a container with numbers of its own, where it still writes."""

RATE_S: Final = 60.0
"""Steps per second are taken over this long."""


class Pace:
    """How often news came and how fast steps were made, while it was watched.

    Moments are seconds of a monotonic clock; ``began``: the moment of the first look.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._looked = False
        self._seen: float | None = None  # when news was last found, except at the first look
        self._intervals: deque[float] = deque(maxlen=50)
        self._steps: deque[tuple[float, int]] = deque()

    def look(self, now: float, *, news: bool, step: int | None) -> None:
        """One look at the run: whether anything was new, and the latest step."""
        if news and self._looked:
            if self._seen is not None:
                self._intervals.append(now - self._seen)
            self._seen = now
        self._looked = True
        if step is not None:
            if self._steps and step < self._steps[-1][1]:
                self._steps.clear()
            self._steps.append((now, step))
            while len(self._steps) > 2 and now - self._steps[1][0] >= RATE_S:
                self._steps.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """Over the last minute, None before two steps were seen."""
        if len(self._steps) < 2 or self._steps[-1][1] == self._steps[0][1]:
            return None
        (begin, first), (end, last) = self._steps[0], self._steps[-1]
        return (last - first) / (end - begin)

    def stalled_after(self, mean_steps_per_s: float | None) -> float:
        """Seconds of silence that are unusual for this run."""
        if len(self._intervals) >= 3:
            usual = median(self._intervals)
        else:
            usual = 1 / mean_steps_per_s if mean_steps_per_s else 0.0
        return max(QUIET_S, QUIET_INTERVALS * usual)

    def quiet_s(self, now: float, by_disk: float) -> float:
        """Seconds since the newest fact.

        ``by_disk``: its age by the clock of the disk, which may be another than ours: negative
        ages are not believed, and nothing is older than the moment it was seen to be new.
        """
        if self._seen is not None:
            return now - self._seen if by_disk < 0 else min(now - self._seen, by_disk)
        return now - self._began if by_disk < 0 else by_disk


def state_of(
    attempts: Iterable[Mapping[str, Any]],
    *,
    quiet_s: float | None,
    stalled_after: float,
    all_gone: bool,
    silent_s: float,
) -> tuple[str, str]:
    """State and reason, as in ``following.Situation``.

    ``attempts``: what the latest attempt of each rank noted. ``all_gone``: no rank has a process
    any more; ``silent_s``: seconds since any of them gave a sign of life.
    """
    notes = list(attempts)
    if all("closed" in note for note in notes):
        complete = all(note.get("complete", True) for note in notes)
        return "ended", "" if complete else "not everything could be written"
    if quiet_s is None:
        return "starting", ""
    if all_gone and quiet_s >= GONE_S:
        return "stalled", "its process is gone"
    if silent_s > STALE_S and quiet_s > STALE_S:
        return "stalled", "its process gives no sign of life"
    return ("stalled" if quiet_s > stalled_after else "running"), ""


def is_gone(claim: Path) -> bool:
    """Whether the process that holds this claim is one of this host and does not exist any more."""
    try:
        holder = json.loads(claim.read_text(encoding="utf-8"))
        if holder["host"] != socket.gethostname():
            return False
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return False
