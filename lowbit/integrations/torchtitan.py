"""torchtitan: an `OptimizersContainer` whose groups may name lowbit's optimizers.

In a model's configuration write `optimizer=lowbit.integrations.torchtitan.adamw(lr=3e-4)`. Or write
`LowbitOptimizers.Config(param_groups=[...])` with
`ParamGroupConfig(optimizer_name="lowbit.AdamW", optimizer_kwargs={"lr": 3e-4, "state_format":
"4bit"})`. torchtitan's own names keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from lowbit.optim.named import no_optimizer, optimizer_named
from lowbit.optim.param_groups import HEAD_NAMES

# FQNs of torchtitan's embedding and the output heads, for `full_precision=` of `adamw`.
EMBEDDINGS_AND_HEADS = r"(^|\.)(tok_embeddings|" + "|".join(HEAD_NAMES) + r")\.weight$"

# The options of `lowbit.AdamW` that torchtitan passes by `optimizer_factory_kwargs_by_name`: a
# group's `optimizer_kwargs` do not take them.
OF_THE_OPTIMIZER = ("state_memory",)


class LowbitOptimizers(OptimizersContainer):
    """torchtitan's container, in which "lowbit.X" names class X of lowbit."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Like `OptimizersContainer.Config`; lowbit's optimizers ignore `implementation`."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if not name.startswith("lowbit."):
            return OptimizersContainer._resolve_optimizer_factory(name)
        own = name.removeprefix("lowbit.")
        cls = optimizer_named(own)
        if cls is None:
            raise ValueError(f"there is no optimizer {name}{no_optimizer(own)}")
        return cls


def adamw(
    lr: float = 8e-4, *, full_precision: str | None = None, **options: Any
) -> LowbitOptimizers.Config:
    """A configuration with `lowbit.AdamW` for all parameters,
    and torchtitan's betas (0.9, 0.95) and weight decay 0.1.

    Args:
        lr: learning rate; 8e-4 by default.
        full_precision: a regular expression; parameters whose name it matches keep float32 state.
            It must match some parameter. `EMBEDDINGS_AND_HEADS` matches the embedding and output
            heads. None (default) makes no such group.
        options: further arguments of `lowbit.AdamW`; `state_memory`, which no group has, goes to
            the whole optimizer.
    """
    whole = {key: options.pop(key) for key in OF_THE_OPTIMIZER if key in options}
    given = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **options}
    groups = [
        ParamGroupConfig(pattern=r".*", optimizer_name="lowbit.AdamW", optimizer_kwargs=given)
    ]
    if full_precision is not None:
        own = {**given, "full_precision": True}
        groups.insert(
            0,
            ParamGroupConfig(
                pattern=full_precision, optimizer_name="lowbit.AdamW", optimizer_kwargs=own
            ),
        )
    return LowbitOptimizers.Config(
        param_groups=groups,
        optimizer_factory_kwargs_by_name={"lowbit.AdamW": whole} if whole else {},
    )
