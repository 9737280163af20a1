"""The flight recorder for LLM training data.

    loader = AuditedSampler(loader, run="run/")
    monitor = GradeMonitor(model, run="run/", every=200, probe=held_out_batch)
    ...
    monitor.step(loss, optimizer=optimizer)  # after backward

Then ``auditor report run/`` and ``auditor dedupe run/ --out cleaned/``.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from auditor.clean.manifest import load_manifest
    from auditor.record.documents import DocumentIndex
    from auditor.record.identity import Located
    from auditor.record.monitor import GradeMonitor
    from auditor.record.sampler import AuditedSampler
    from auditor.replaying import replay
    from auditor.run import Run

__all__ = [
    "AuditedSampler",
    "DocumentIndex",
    "GradeMonitor",
    "Located",
    "Run",
    "load_manifest",
    "replay",
]
__version__ = _version("auditor")

_HOMES = {
    "AuditedSampler": "auditor.record.sampler",
    "DocumentIndex": "auditor.record.documents",
    "GradeMonitor": "auditor.record.monitor",
    "Located": "auditor.record.identity",
    "Run": "auditor.run",
    "load_manifest": "auditor.clean.manifest",
    # A module of the same name would hide the function as soon as it was imported.
    "replay": "auditor.replaying",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: ``import auditor`` loads neither torch nor polars."""
    if name not in _HOMES:
        raise AttributeError(f"module 'auditor' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
