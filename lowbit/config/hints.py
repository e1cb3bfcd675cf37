"""What an error or warning adds about a mistake: the word that was meant, and the caller's line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.7) -> str:
    """The text "; did you mean 'x'?" for the closest known word, or "" if none is close.

    Args:
        cutoff: the least similarity, from 0 to 1; 0.7 by default.
    """
    import difflib

    found = difflib.get_close_matches(word, list(known), 1, cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""


def outside() -> int:
    """The stacklevel of the first caller that is neither lowbit nor torch,
    for a warning of the function that asks.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "lowbit",
        "torch",
    ):
        level, frame = level + 1, frame.f_back
    return level


def warn_once(warned: set[str], key: str, message: str) -> None:
    """Warns at the caller's line unless `key` is in `warned`, and adds it."""
    if key not in warned:
        warned.add(key)
        warnings.warn(message, stacklevel=outside())
