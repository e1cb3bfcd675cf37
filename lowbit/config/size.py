"""Sizes of memory as people write them."""

from __future__ import annotations

import re

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def parsed(memory: str | int) -> int:
    """Bytes of a size such as "24GiB", "80 GB" or 1 << 30.

    Raises:
        ValueError: it is not positive, or no size.
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([a-z]*)\s*", str(memory).lower())
    try:
        size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f'a size of memory is a number of bytes or "24GiB", not {memory!r}')
    return size


def readable(size: int, decimals: int = 2) -> str:
    """A number of bytes in the largest unit of which it has one: "1.50 GiB"."""
    power = 0
    while power + 1 < len(BINARY) and size >= 1024 ** (power + 1):
        power += 1
    if power == 0:
        return f"{size} bytes"
    return f"{size / 1024**power:,.{decimals}f} {BINARY[power]}"
