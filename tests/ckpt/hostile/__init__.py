"""Hostile and odd checkpoints, one function each, with what the checkpoint tool must say of them.

`CASES` has them all. `python -m tests.ckpt.hostile FOLDER` writes them as files: seeds for fuzzers.
Nothing here needs torch, since most of it is what torch cannot be made to write.
"""

from . import (  # noqa: F401
    claims,
    directories,
    legacy,
    metadata,
    odd,
    pickles,
    safetensors_files,
    tensors,
    values,
    zip_ends,
    zips,
    zstd,
)
from .case import BAD, CASES, FINE, PROOF, VALUES, Case

__all__ = ["BAD", "CASES", "FINE", "PROOF", "VALUES", "Case"]
