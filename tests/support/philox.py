"""Random bits by the paper, in numpy (Salmon et al., SC11): Philox4x32 with 7 rounds, and the 16
bits of an element as csrc/core/random.h says.
"""

from __future__ import annotations

import numpy as np

M32 = 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32 with 7 rounds, in numpy's 64-bit integers."""
    x0, x1, x2, x3 = (np.asarray(x, np.uint64) for x in counter)
    k0, k1 = key
    low, shift = np.uint64(M32), np.uint64(32)
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        x0, x1, x2, x3 = (
            (b >> shift) ^ x1 ^ np.uint64(k0),
            b & low,
            (a >> shift) ^ x3 ^ np.uint64(k1),
            a & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return np.stack(np.broadcast_arrays(x0, x1, x2, x3), axis=-1)


def random16(index, seed, step, stream):
    """The 16 bits of each global element in `index`, uint64 [...]."""
    group = index >> np.uint64(3)
    words = philox(
        (group & np.uint64(M32), group >> np.uint64(32), stream, seed >> 32), (seed & M32, step)
    )
    place = (index & np.uint64(7)).astype(np.int64)
    word = np.take_along_axis(words, (place >> 1)[..., None], axis=-1)[..., 0]
    return word >> (16 * (place & 1)).astype(np.uint64) & np.uint64(0xFFFF)
