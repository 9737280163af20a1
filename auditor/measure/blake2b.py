"""BLAKE2b (RFC 7693) of many contents without a Python call each, first 8 bytes of the digest.

Equal to ``hashlib.blake2b(content, digest_size=8)``, for kernels that hold no GIL.
"""

from __future__ import annotations

import numpy as np

from auditor.measure.compiled import kernel
from auditor.measure.vector import load_u64

_IV = np.array(
    [
        0x6A09E667F3BCC908,
        0xBB67AE8584CAA73B,
        0x3C6EF372FE94F82B,
        0xA54FF53A5F1D36F1,
        0x510E527FADE682D1,
        0x9B05688C2B3E6C1F,
        0x1F83D9ABFB41BD6B,
        0x5BE0CD19137E2179,
    ],
    np.uint64,
)
_PARAMETERS = np.uint64(0x0101_0008)  # fan-out 1, depth 1, no key, digest of 8 bytes
_SIGMA = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
    ],
    np.uint64,
)


@kernel
def _turned(x, bits):  # type: ignore[no-untyped-def]
    return (x >> np.uint64(bits)) | (x << np.uint64(64 - bits))


@kernel
def _mixed(a, b, c, d, x, y):  # type: ignore[no-untyped-def]
    a = a + b + x
    d = _turned(d ^ a, 32)
    c = c + d
    b = _turned(b ^ c, 24)
    a = a + b + y
    d = _turned(d ^ a, 16)
    c = c + d
    b = _turned(b ^ c, 63)
    return a, b, c, d


@kernel
def _compress(h, m, counter, last):  # type: ignore[no-untyped-def]
    v0, v1, v2, v3, v4, v5, v6, v7 = h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]
    v8, v9, v10, v11 = _IV[0], _IV[1], _IV[2], _IV[3]
    v12, v13, v14, v15 = _IV[4] ^ counter, _IV[5], _IV[6], _IV[7]
    if last:
        v14 = ~v14
    for r in range(12):
        s = _SIGMA[r]
        v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, m[s[0]], m[s[1]])
        v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, m[s[2]], m[s[3]])
        v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, m[s[4]], m[s[5]])
        v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, m[s[6]], m[s[7]])
        v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, m[s[8]], m[s[9]])
        v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, m[s[10]], m[s[11]])
        v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, m[s[12]], m[s[13]])
        v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, m[s[14]], m[s[15]])
    h[0] ^= v0 ^ v8
    h[1] ^= v1 ^ v9
    h[2] ^= v2 ^ v10
    h[3] ^= v3 ^ v11
    h[4] ^= v4 ^ v12
    h[5] ^= v5 ^ v13
    h[6] ^= v6 ^ v14
    h[7] ^= v7 ^ v15


@kernel
def blake2b_64(content, start, stop, h, m):  # type: ignore[no-untyped-def]
    """First 8 bytes of the 8-byte BLAKE2b digest of content[start:stop] u8, as u64.

    ``content`` has 8 bytes more; ``h`` u64 [8] and ``m`` u64 [16] are scratch.
    """
    h[:] = _IV
    h[0] ^= _PARAMETERS
    at = start
    while stop - at > 128:
        for k in range(16):
            m[k] = load_u64(content, at + 8 * k)
        at += 128
        _compress(h, m, np.uint64(at - start), False)
    m[:] = 0
    left = stop - at
    for k in range((left + 7) >> 3):
        bits = np.uint64(64 - 8 * min(8, left - 8 * k))
        m[k] = load_u64(content, at + 8 * k) & (np.uint64(0xFFFF_FFFF_FFFF_FFFF) >> bits)
    _compress(h, m, np.uint64(stop - start), True)
    return h[0]
