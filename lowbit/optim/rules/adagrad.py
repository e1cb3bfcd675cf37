"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import Options
from lowbit.optim.optimizer import LowbitOptimizer


class Adagrad(LowbitOptimizer):
    """torch.optim.Adagrad with low-bit state.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr: learning rate, a float or a tensor of one element; 1e-2 by default.
        lr_decay: the learning rate of step t is lr / (1 + (t - 1) * lr_decay); 0 by default.
        weight_decay: added to the gradient (L2); 0 by default.
        initial_accumulator_value: the sum of squared gradients to begin with; 0 by default.
        eps: added to the denominator; 1e-10 by default.
        foreach, fused: accepted for torch's signature and ignored.
        maximize: maximizes the objective instead; False by default.
        differentiable: not supported; True raises.
        state_format, param_format, full_precision, seed, overrides, min_numel, state_memory: as in
            `Adam`.

    Raises:
        ValueError: an argument is out of range; the messages are torch's.
    """

    @arguments.documents_options(Options)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        defaults = arguments.group_defaults(
            self,
            lr,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            **options,
        )
        defaults |= {
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_least(lr_decay=group["lr_decay"], weight_decay=group["weight_decay"])
        first = group["initial_accumulator_value"]
        arguments.check_least(initial_accumulator_value=first, epsilon=group["eps"])

    def share_memory(self) -> None:
        """torch's: moves the state to shared memory, for training by several processes."""
        for _, p, lay in self.laid_out():
            kept = self.state_of(p)
            for key in ("step", *lay.keys) if kept else ():
                kept[key].share_memory_()

    def initial(self, group: Mapping[str, Any], name: str) -> float:
        return group["initial_accumulator_value"]

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "adagrad"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [
            arguments.number(group["lr"]),
            group["lr_decay"],
            group["weight_decay"],
            group["eps"],
        ]
