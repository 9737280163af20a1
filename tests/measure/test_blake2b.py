"""BLAKE2b of the kernels, against hashlib."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from auditor.measure.blake2b import blake2b_64


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=600))
@example(b"")
@example(b"x" * 128)
@example(b"x" * 129)
@example(b"x" * 256)
def test_blake2b_equals_hashlib(content: bytes) -> None:
    around = np.frombuffer(b"before" + content + b"behind it", np.uint8)
    found = blake2b_64(around, 6, 6 + len(content), np.empty(8, np.uint64), np.empty(16, np.uint64))
    digest = hashlib.blake2b(content, digest_size=8).digest()
    assert int(found) == int.from_bytes(digest, "little")
