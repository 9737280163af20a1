"""Tests of the stacks share the data and the loops of the recording tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "record"))
