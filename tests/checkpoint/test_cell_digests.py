"""Digests of a chunk and its cells stay those that older saves have,
however the writer walks a chunk.
"""

import hashlib
import math

import pytest
import torch

from lowbit.checkpoint.native import native

# Rows of cells from 257 bytes to 150 KB: shorter ones are gathered. Sizes that no piece or cell
# divides. From the writer of 0.1.0 of November 2026, which hashed every row of a cell by itself:
# the chunk's digest, and SHA-256 of those of its 4 by 4 cells.
KNOWN = [
    ("uint8", (521, 1029), "4da2be69", "c77de08146c45c0d"),
    ("uint8", (70, 4100), "196ccb50", "f9fe3c9b4ea8ef1f"),
    ("uint8", (4099, 1100), "d4d9ea95", "0bd05a671e98181c"),
    ("uint8", (300, 3, 401), "f079865e", "15c1ae2d418b8684"),
    ("uint8", (40, 300000), "c7c5a171", "38948a043f3aa788"),
    ("bfloat16", (521, 1029), "3d028bce", "8a0f8b23b5e8a2a8"),
    ("bfloat16", (16, 9001), "cdffc0dd", "e7c796b72c77a838"),
]


@pytest.mark.parametrize(("dtype", "shape", "whole", "cells"), KNOWN)
def test_digests_stay(tmp_path, dtype, shape, whole, cells):
    numbers = torch.arange(math.prod(shape))
    t = (numbers * 2654435761 >> 13) if dtype == "uint8" else numbers % 251
    t = t.to(getattr(torch, dtype)).view(shape)
    file = native().RankFile(bytes(tmp_path), b"file", False)
    # What lies before it moves the places in the file where pieces end.
    zeros = torch.zeros(100, dtype=torch.uint8)
    before = ("a", "uint8", (100,), zeros.data_ptr())
    _, said = file.write([before, ("t", dtype, shape, t.data_ptr())], 1, None)
    _, _, digest, down, across, tiles = said
    assert (down, across) == (4, 4)
    assert digest.startswith(whole)
    assert hashlib.sha256(tiles.encode()).hexdigest().startswith(cells)
