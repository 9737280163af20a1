"""What all tests share."""

from __future__ import annotations

import os

import pytest

# One thread each: the suite's small matrices gain nothing from more, and its runs stay repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest.register_assert_rewrite("sources")
