"""Kernels where numba finds no folder for what it compiled."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_A_FOLDER = """
from numba.core import caching
caching.CacheImpl._locator_classes = []
import numpy as np
from auditor.measure import sketch
print(sketch.jaccard(np.array([1, 2]), np.array([2])))
"""


def test_kernels_work_without_a_folder_to_be_kept_in() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_FOLDER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0.5\n"
