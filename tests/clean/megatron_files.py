"""Megatron's indexed datasets, written and read from the description of the format alone."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np

CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
Documents = list[list[list[int]]]  # of sequences of ids


def write_megatron(prefix: Path, documents: Documents, code: int) -> Path:
    """As Megatron's IndexedDatasetBuilder writes them."""
    sequences = [np.array(ids, CODES[code]) for document in documents for ids in document]
    sizes = [ids.nbytes for ids in sequences]
    path = prefix.with_suffix(".idx")
    with path.open("wb") as file:
        ends = np.cumsum([0, *map(len, documents)])
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, code))
        file.write(struct.pack("<QQ", len(sequences), len(ends)))
        file.write(np.array([len(ids) for ids in sequences], np.int32).tobytes())
        file.write(np.cumsum([0, *sizes])[:-1].astype(np.int64).tobytes())
        file.write(ends.astype(np.int64).tobytes())
    prefix.with_suffix(".bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    return path


def read_megatron(path: Path) -> tuple[int, Documents]:
    """Type code and documents, read from the description of the format alone."""
    with path.open("rb") as file:
        assert file.read(9) == b"MMIDIDX\x00\x00"
        version, code, n, n_documents = struct.unpack("<QBQQ", file.read(25))
        lengths = struct.unpack(f"<{n}i", file.read(4 * n))
        pointers = struct.unpack(f"<{n}q", file.read(8 * n))
        ends = struct.unpack(f"<{n_documents}q", file.read(8 * n_documents))
        assert (version, file.read()) == (1, b"")
    data = path.with_suffix(".bin").read_bytes()
    width = np.dtype(CODES[code]).itemsize
    assert sum(lengths) * width == len(data)
    sequences = [
        np.frombuffer(data[p : p + length * width], CODES[code]).tolist()
        for p, length in zip(pointers, lengths, strict=True)
    ]
    return code, [sequences[a:b] for a, b in pairwise(ends)]
