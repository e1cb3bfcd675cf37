"""What an error or warning adds about a mistake: the word that was meant, what replaces an argument
of another library, and the caller's line.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import NoReturn

# bitsandbytes' own keywords and their replacements.
_BITSANDBYTES = {
    "optim_bits": 'state_format="8bit" or "float32"',
    "min_8bit_size": "min_numel=",
    "percentile_clipping": "lowbit.clip_grad_norm_ before the step",
    "block_wise": "nothing: scales cover blocks, unless lowbit.scaled() says otherwise",
    "is_paged": 'state_memory="managed", or "pinned", of the whole optimizer',
    "args": "nothing",
}


def refuse_keywords(name: str, options: Iterable[str], *, group: bool = False) -> None:
    """Raises TypeError for bitsandbytes' keywords that have another name here, or none.

    Args:
        name: of the optimizer that was given them.
        group: True if the options are a group's, where `args` is the program's own.
    """
    if found := [key for key in options if key in _BITSANDBYTES and not (group and key == "args")]:
        instead = "; ".join(f"in place of {key} write {_BITSANDBYTES[key]}" for key in found)
        raise TypeError(
            f"{'a parameter group of ' if group else ''}lowbit.{name} takes the arguments of "
            f"lowbit, not bitsandbytes' {', '.join(found)}: {instead}"
        )


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.7) -> str:
    """The text "; did you mean 'x'?" for the closest known word, or "" if none is close.

    Args:
        cutoff: the least similarity, from 0 to 1; 0.7 by default.
    """
    import difflib

    found = difflib.get_close_matches(word, list(known), 1, cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""


def no_attribute(message: str) -> NoReturn:
    """Raises AttributeError for a name that a module lacks, or ImportError where the name is
    imported: `from MODULE import NAME` says nothing of what an AttributeError said. A module's
    `__getattr__` calls it.
    """
    asking = sys._getframe(2)
    if asking.f_globals.get("__name__") == "importlib._bootstrap":
        raise ImportError(message)
    raise AttributeError(message)


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
