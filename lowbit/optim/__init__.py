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
    package = sys.modules["lowbit"]
    if name in getattr(package, "__all__", ()):
        no_attribute(f"lowbit.optim has no {name}: write lowbit.{name}")
    message = f"module 'lowbit.optim' has no attribute {name!r}"
    if hasattr(package, "__all__") and not name.startswith("_"):  # all is imported
        try:
            getattr(package, name)  # which knows the names of other libraries
        except AttributeError as error:
            if str(error) != message.replace(".optim", ""):
                no_attribute(str(error))
    raise AttributeError(message)


globals()["__getattr__"] = _missing  # a type checker that saw it would take every name for one
