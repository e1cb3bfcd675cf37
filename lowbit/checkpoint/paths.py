"""Paths as callers give them, and as C++ takes them."""

from __future__ import annotations

import os

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def bytes_of(path: Path) -> bytes:
    return os.fsencode(path)  # a file's name need not be text
