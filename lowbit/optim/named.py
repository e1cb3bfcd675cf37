"""The public optimizers by their names, which configurations give, and the groups of each."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from lowbit.config.hints import did_you_mean
from lowbit.optim.optimizer import LowbitOptimizer
from lowbit.optim.param_groups import muon_param_groups, param_groups
from lowbit.optim.rules.muon_with_adamw import MuonWithAdamW


def optimizer_named(name: str) -> type[LowbitOptimizer] | None:
    """The class of that name that `import lowbit` exports; None if there is none."""
    public = sys.modules["lowbit"]  # a room below cannot import it
    cls = getattr(public, name) if name in public.__all__ else None
    made = isinstance(cls, type) and issubclass(cls, LowbitOptimizer)
    return cls if made and cls is not LowbitOptimizer else None


def optimizer_names() -> list[str]:
    """The names of all of them, sorted."""
    return sorted(name for name in sys.modules["lowbit"].__all__ if optimizer_named(name))


def groups_for(make: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    """What makes an optimizer's groups: `lowbit.muon_param_groups` for MuonWithAdamW, else
    `lowbit.param_groups`.
    """
    muon = isinstance(make, type) and issubclass(make, MuonWithAdamW)
    return muon_param_groups if muon else param_groups


# Words in transformers' `optim` names that say who wrote the code, not which rule it is.
_ORIGINS = {"torch", "fused", "bnb", "apex", "xla", "npu", "anyprecision", "hf"}
_OPTIONS = {"paged": "state_memory='managed'", "32bit": "state_format='float32'"}


def no_optimizer(name: str) -> str:
    """What an error adds about a name that no optimizer has: the one that is meant, such as
    LAMB8bit by "lamb_8bit" and AdamW8bit with managed memory by "paged_adamw_8bit", or an example.
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word not in _ORIGINS]
    key = "".join(word for word in words if word not in _OPTIONS)
    names = {known.lower(): known for known in optimizer_names()}
    if key not in names:
        return did_you_mean(name, names.values()) or "; lowbit.AdamW is one"
    options = " and ".join(_OPTIONS[word] for word in words if word in _OPTIONS)
    return f"; did you mean {names[key]!r}{' with ' * bool(options)}{options}?"
