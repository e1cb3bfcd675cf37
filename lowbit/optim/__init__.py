"""What the optimizers of `lowbit.optim.rules` share; `stats()` and its warnings; groups of
parameters.
"""

import sys
from typing import NoReturn

from lowbit.config.hints import no_attribute


def _missing(name: str) -> NoReturn:
    """Says where an optimizer is for which someone looks here,
    where torch, bitsandbytes and torchao have theirs.
    """
    if name in getattr(sys.modules["lowbit"], "__all__", ()):
        no_attribute(f"lowbit.optim has no {name}: write lowbit.{name}")
    raise AttributeError(f"module 'lowbit.optim' has no attribute {name!r}")


globals()["__getattr__"] = _missing  # a type checker that saw it would take every name for one
