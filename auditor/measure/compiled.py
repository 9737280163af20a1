"""How kernels are compiled: without the GIL, and kept on disk for the next process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function on its first call, without the GIL.

    The code is kept beside the module, or where that cannot be written in the user's cache folder,
    or in ``NUMBA_CACHE_DIR``. Where there is no such folder, each process compiles it anew.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba's, for want of a folder
        return njit(nogil=True)(function)
