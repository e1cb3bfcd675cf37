"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import Options
from lowbit.optim.optimizer import LowbitOptimizer


class Adagrad(LowbitOptimizer):
    """torch.optim.Adagrad with low-bit state.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.optim.Adagrad, with its
            defaults.
        foreach, differentiable, fused: accepted for torch's signature; differentiable=True raises.
        state_format, param_format, full_precision, seed, overrides, min_numel, state_memory: as in `Adam`.

    Raises:
        ValueError: an argument is out of range; the messages are torch's.
    """

    @arguments.lists(Options)
    def __init__(
        self,
        params: Any,
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
        defaults = arguments.shared(
            self,
            lr,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            **options,
        )
        arguments.check_least(lr_decay=lr_decay, weight_decay=weight_decay)
        arguments.check_least(initial_accumulator_value=initial_accumulator_value, epsilon=eps)
        defaults |= {
            "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }  # fmt: skip
        super().__init__(params, defaults)

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
