"""The public optimizers by their names, which configurations give."""

from __future__ import annotations

import sys

from lowbit.optim.optimizer import LowbitOptimizer


def optimizer_named(name: str) -> type[LowbitOptimizer] | None:
    """The class of that name that `import lowbit` exports; None if there is none."""
    public = sys.modules["lowbit"]  # a room below cannot import it
    cls = getattr(public, name) if name in public.__all__ else None
    made = isinstance(cls, type) and issubclass(cls, LowbitOptimizer)
    return cls if made and cls is not LowbitOptimizer else None


def optimizer_names() -> list[str]:
    """The names of all of them, sorted."""
    return sorted(name for name in sys.modules["lowbit"].__all__ if optimizer_named(name))
