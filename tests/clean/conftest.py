"""Corpora that the cleaning tests read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora, which is no part of the repository."""
    beside = Path(__file__).resolve().parents[3] / "shared"
    root = Path(os.environ.get("AUDITOR_SHARED", beside)) / "data"
    if not root.is_dir():
        pytest.skip("no corpora: set AUDITOR_SHARED to the folder that holds data/B_neardup")
    return root
