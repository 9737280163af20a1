"""Arrow arrays of Python strings and of NumPy arrays, by their buffers.

``pa.array`` makes the same, and imports pandas for it: on a small corpus that takes longer than to
clean it, and every worker pays it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def strings(values: Sequence[str]) -> pa.Array:
    """A string array of these."""
    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    buffers = pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))
    return pa.LargeStringArray.from_buffers(len(encoded), *buffers).cast(pa.string())


def numbers(
    values: NDArray[np.int64] | NDArray[np.float32], there: NDArray[np.bool_] | None = None
) -> pa.Array:
    """An array of the same type, null where it is not ``there`` (bool, as long)."""
    kind = {"i": pa.int64(), "f": pa.float32()}[values.dtype.kind]
    valid = None if there is None else pa.py_buffer(np.packbits(there, bitorder="little"))
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [valid, data])


def chosen(names: Sequence[str], codes: NDArray[np.int64]) -> pa.Array:
    """The name of each code, a string array; null where the code is negative."""
    return strings(names).take(numbers(codes, codes >= 0))
