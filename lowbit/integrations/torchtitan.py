"""torchtitan: `OptimizersContainer` whose groups may name lowbit's optimizers.

In a model's configuration, `optimizer=lowbit.integrations.torchtitan.adamw(lr=3e-4)`; or `LowbitOptimizers.Config(param_groups=[...])` with
`ParamGroupConfig(optimizer_name="lowbit.AdamW", optimizer_kwargs={"lr": 3e-4, "state_format": "4bit"})`. torchtitan's own names keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

import lowbit
from lowbit.groups import HEAD_NAMES
from lowbit.optim import LowbitOptimizer

# FQNs whose state stays wide: torchtitan's name of embeddings, and those of output heads.
WIDE = r"(^|\.)(tok_embeddings|" + "|".join(HEAD_NAMES) + r")\.weight$"


class LowbitOptimizers(OptimizersContainer):
    """torchtitan's container; "lowbit.X" names class X of lowbit."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As of `OptimizersContainer`; `implementation` is ignored by lowbit's optimizers."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if not name.startswith("lowbit."):
            return OptimizersContainer._resolve_optimizer_factory(name)
        cls = getattr(lowbit, name.removeprefix("lowbit."), None)
        if not (isinstance(cls, type) and issubclass(cls, LowbitOptimizer)):
            raise ValueError(f"there is no optimizer {name}; lowbit.AdamW is one")
        return cls


def adamw(lr: float = 8e-4, *, wide: str | None = WIDE, **options: Any) -> LowbitOptimizers.Config:
    """A configuration with `lowbit.AdamW` for everything, torchtitan's betas and weight decay.

    Args:
        lr: learning rate.
        wide: pattern of names whose parameters keep float32 state; it must match some. None: no such group.
        options: more of `lowbit.AdamW`'s arguments.
    """
    given = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **options}
    groups = [
        ParamGroupConfig(pattern=r".*", optimizer_name="lowbit.AdamW", optimizer_kwargs=given)
    ]
    if wide is not None:
        own = {**given, "wide": True}
        groups.insert(0, ParamGroupConfig(pattern=wide, optimizer_name="lowbit.AdamW", optimizer_kwargs=own))  # fmt: skip
    return LowbitOptimizers.Config(param_groups=groups)
