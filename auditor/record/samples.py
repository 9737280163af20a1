"""Which samples those were: written once each, by the process that read them.

Descriptions do not travel with the batch: a loader worker writes those of the samples it read to a
ledger of its own beside the recorder's, before it hands the batch on; readers take them together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import njit

from auditor.ledger import NULL, Frame, LedgerWriter
from auditor.record.identity import Described, preview_of

PREVIEWS: Final = 5_000
PREVIEWS_PER_S: Final = 2.0
PREVIEWS_PER_BATCH: Final = 16
"""Previews kept at once, more as time goes by, and of one batch at most: enough to look at, not a
copy of the corpus."""

_SEEN_BITS: Final = 20
_SEEN_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)


class SeenKeys:
    """Which keys were met, in bounded memory: 2**20 places, the later of two keys at one place.

    A key that lost its place counts as new again, never the other way round.
    """

    def __init__(self) -> None:
        self._keys = np.full(2**_SEEN_BITS, -1, np.int64)
        self.add(np.zeros(0, np.int64))  # compiled now, or loaded from numba's cache on disk

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Remember keys i64 [n]; returns the positions of those not met before, each once."""
        new = np.empty(len(keys), np.int64)
        return new[: _add(keys, self._keys, new)]


@njit(nogil=True, cache=True)
def _add(keys, seen, new):  # type: ignore[no-untyped-def]
    """Enter the keys; positions of the new ones go into ``new``, their number is returned."""
    n_new = 0
    for i in range(len(keys)):
        place = (np.uint64(keys[i]) * _SEEN_FACTOR) >> np.uint64(64 - _SEEN_BITS)
        if seen[place] != keys[i]:
            seen[place] = keys[i]
            new[n_new] = i
            n_new += 1
    return n_new


class SampleLedger:
    """The samples ledger of one process, opened when the first sample is noted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: LedgerWriter | None = None
        self._seen = SeenKeys()
        self._started = time.monotonic()
        self._n_previews = 0
        self._waiting: list[dict[str, Any]] = []

    def note(self, described: Described) -> None:
        """Keep those of the samples that were not met before, to be written by :meth:`flush`."""
        if all(
            column is None
            for column in (
                described.sample_id,
                described.source,
                described.shard,
                described.row,
                described.n_tokens,
            )
        ):
            return  # nothing is known of them but their keys
        new = self._seen.add(described.keys)
        if len(new):
            self._waiting.append(self._columns(described, new))

    def flush(self) -> None:
        """Write what waits. Raises OSError when the disk refuses it; it is lost then."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if self._writer is None:
            self._writer = LedgerWriter(self.path)
        self._writer.append(
            Frame(
                "samples",
                {},
                {
                    name: np.concatenate([part[name] for part in waiting])
                    for name in ("key", "row", "n_tokens")
                },
                {
                    name: [value for part in waiting for value in part[name] or _nones(part)]
                    for name in ("sample_id", "source", "shard", "columns", "preview")
                    if any(part[name] for part in waiting)
                },
            )
        )

    def drop(self) -> None:
        """Forget what waits."""
        self._waiting = []

    def sync(self) -> None:
        if self._writer is not None:
            self._writer.sync()

    def close(self) -> None:
        self.flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _columns(self, described: Described, new: np.ndarray) -> dict[str, Any]:
        def strings(values: Sequence[str | None] | None) -> list[str | None] | None:
            return None if values is None else [values[i] for i in new]

        def integers(values: Any) -> np.ndarray:
            if values is None:
                return np.full(len(new), NULL, np.int64)
            if isinstance(values, np.ndarray):
                return values[new]
            return np.asarray([NULL if values[i] is None else values[i] for i in new], np.int64)

        return {
            "key": described.keys[new],
            "row": integers(described.row),
            "n_tokens": integers(described.n_tokens),
            "sample_id": strings(described.sample_id),
            "source": strings(described.source),
            "shard": strings(described.shard),
            "columns": strings(described.columns),
            "preview": self._previews(described, new),
        }

    def _previews(self, described: Described, new: np.ndarray) -> list[str | None] | None:
        allowed = int(PREVIEWS + PREVIEWS_PER_S * (time.monotonic() - self._started))
        n = max(0, min(len(new), PREVIEWS_PER_BATCH, allowed - self._n_previews))
        if n == 0:
            return None
        self._n_previews += n
        previews: list[str | None] = [preview_of(described.contents[i]) for i in new[:n]]
        return previews + [None] * (len(new) - n)


def _nones(part: dict[str, Any]) -> list[None]:
    return [None] * len(part["key"])
