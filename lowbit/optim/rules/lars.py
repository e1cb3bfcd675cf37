"""LARS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import AllOptions
from lowbit.optim.optimizer import LowbitOptimizer


class LARS(LowbitOptimizer):
    """LARS (arXiv:1708.03888): SGD with momentum,
    with each tensor's gradient scaled to the norm of its weights.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, dampening, weight_decay, nesterov: as in `SGD`, with its defaults.
        momentum: decay of the running sum of gradients; 0.9 by default.
        trust_coefficient: the step's norm relative to the weights'; 1e-3 by default.
        eps: added to the gradient's norm; 1e-8 by default.
        maximize, foreach, state_format, param_format, full_precision, seed, overrides, min_numel,
            state_memory: as in `Adam`.

    Raises:
        ValueError: an argument is out of range.
    """

    @arguments.documents_options(AllOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        **options: Unpack[AllOptions],
    ) -> None:
        defaults = arguments.group_defaults(self, lr, **options)
        defaults |= {
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_flags(group, "nesterov")
        arguments.check_least(
            momentum=group["momentum"], weight_decay=group["weight_decay"], epsilon=group["eps"]
        )
        arguments.check_nesterov(group)
        arguments.check_above(trust_coefficient=group["trust_coefficient"])

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "lars"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [
            arguments.number(group["lr"]),
            group["momentum"],
            group["dampening"],
            float(bool(group["nesterov"])),
            group["weight_decay"],
            group["trust_coefficient"],
            group["eps"],
        ]
