"""torchastic's name for gradient accumulation."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit import sharding
from lowbit.gradients.accumulate import accumulate


class StochasticAccumulator:
    """`accumulate(model)` under the names of torchastic's StochasticAccumulator: bfloat16 buffers,
    stochastic rounding.

    After each backward pass the gradient is in its buffer and `p.grad` is None, until
    `reassign_grad_buffer`. It does not support DDP: use `accumulate`.
    """

    @staticmethod
    def assign_hooks(model: nn.Module) -> None:
        """Installs a hook on every parameter. Call it once, on the model as it is trained.

        Raises:
            ValueError: the model is wrapped in DDP, whose reducer would find no gradients;
                or as in `accumulate`.
        """
        if sharding.is_ddp(model):
            raise ValueError(
                "assign_hooks would move gradients before DistributedDataParallel reduces them; "
                "use lowbit.accumulate(model) and run each micro-batch in `with "
                "accumulator.micro(last=...)`"
            )
        model._lowbit_accumulator = accumulate(model)  # type: ignore[assignment]

    @staticmethod
    def reassign_grad_buffer(model: nn.Module) -> None:
        """Sets every `p.grad` to its accumulated sum. Call it before the optimizer's step.

        Raises:
            ValueError: `assign_hooks` was not called on this model.
        """
        accumulator: Any = getattr(model, "_lowbit_accumulator", None)
        if accumulator is None:
            raise ValueError(
                "assign_hooks was not called on this model; call it before the first backward pass"
            )
        accumulator.finish()
