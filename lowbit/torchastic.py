"""The names of torchastic."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit import shard
from lowbit.gradients import accumulate


class StochasticAccumulator:
    """The names of torchastic's StochasticAccumulator for `accumulate(model)` with bfloat16 buffers and stochastic rounding.

    A gradient is in its buffer behind each backward pass, and `p.grad` is None, until `reassign_grad_buffer`. Not for DDP: see `accumulate`.
    """

    @staticmethod
    def assign_hooks(model: nn.Module) -> None:
        """Hooks on every parameter; call it once, on the model as it is trained.

        Raises:
            ValueError: the model is wrapped in DDP, where the reducer would find no gradients.
        """
        if shard.is_ddp(model):
            raise ValueError(
                "assign_hooks would take gradients away before DistributedDataParallel reduces them; use "
                "lowbit.accumulate(model) and run each micro-batch in `with accumulator.micro(last=...)`"
            )
        model._lowbit_accumulator = accumulate(model)  # type: ignore[assignment]

    @staticmethod
    def reassign_grad_buffer(model: nn.Module) -> None:
        """Before the optimizer's step: every `p.grad` is what was added up."""
        accumulator: Any = getattr(model, "_lowbit_accumulator", None)
        if accumulator is None:
            raise ValueError("assign_hooks was not called on this model")
        accumulator.finish()
