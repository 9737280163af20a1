"""Where the stages of cleaning run, as the options say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from auditor.clean.engine import Engine
    from auditor.clean.shards import Shard

_IN_PROCESS_BYTES: Final = 32 << 20
"""Inputs up to this size are cleaned in this process: to start others takes seconds."""


@contextmanager
def engine_for(
    shards: Sequence[Shard], *, name: str, address: str | None, workers: int | None
) -> Iterator[Engine]:
    """The engine of the options; its workers go when the block ends.

    Without ``workers`` there is one for each core, and at most one for each shard.
    """
    engine = _engine(shards, name, address, workers)
    try:
        yield engine
    finally:
        engine.close()


def _engine(shards: Sequence[Shard], name: str, address: str | None, workers: int | None) -> Engine:
    if name == "ray":
        from auditor.clean.ray import Ray

        return Ray(address)
    from auditor.clean.engine import InProcess, Processes

    if workers is None:
        workers = 1 if _is_small(shards) else _n_cores()
    workers = min(workers, len(shards))
    return InProcess() if workers == 1 else Processes(workers)


def _n_cores() -> int:
    """Cores that this process may use; not every system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_small(shards: Sequence[Shard]) -> bool:
    if any(isinstance(shard.path, str) for shard in shards):
        return False  # what lies behind a URL is not known yet
    total = 0
    for shard in shards:
        total += sum(file.stat().st_size for file in shard.files())
        if total > _IN_PROCESS_BYTES:
            return False
    return True
