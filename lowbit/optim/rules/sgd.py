"""SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import Options
from lowbit.optim.optimizer import LowbitOptimizer


class SGD(LowbitOptimizer):
    """torch.optim.SGD with low-bit momentum.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr: learning rate, a float or a tensor of one element; 1e-3 by default.
        momentum: decay of the running sum of gradients; 0 (default) keeps no state.
        dampening: the share of the gradient that momentum leaves out, except in the first step;
            0 by default. A momentum that is switched on later leaves it out in its first step too,
            whereas torch's begins with the whole gradient.
        weight_decay: added to the gradient (L2); 0 by default.
        nesterov: True steps by Nesterov's momentum, which needs momentum and no dampening;
            False by default.
        maximize: maximizes the objective instead; False by default.
        foreach, fused: accepted for torch's signature and ignored.
        differentiable: not supported; True raises.
        decoupled: True applies weight decay to the weights (SGDW) and not to the gradient;
            False by default.
        dampen_first: True dampens the first step too (FlashOptim), where torch uses the whole
            gradient; False by default.
        cautious: True moves only weights whose step agrees in sign with the gradient, and these
            further, by 1 over their share (arXiv:2411.16085); needs momentum. False by default.
        state_format, param_format, full_precision, seed, overrides, min_numel, state_memory: as in
            `Adam`.

    Raises:
        ValueError: an argument is out of range; the messages are torch's.
    """

    @arguments.documents_options(Options)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled: bool = False,
        dampen_first: bool = False,
        cautious: bool = False,
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
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "decoupled": decoupled,
            "dampen_first": dampen_first,
            "cautious": cautious,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_flags(group, "nesterov", "decoupled", "dampen_first", "cautious")
        arguments.check_least(momentum=group["momentum"], weight_decay=group["weight_decay"])
        arguments.check_nesterov(group)

    decides = ("momentum", "cautious")

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        if group.get("cautious"):
            if not group["momentum"]:
                raise ValueError(
                    "cautious=True compares the momentum with the gradient, and momentum is 0; "
                    "give a momentum, or leave cautious out"
                )
            return "cautious_sgd_momentum"
        return "sgd_momentum" if group["momentum"] else "sgd"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [
            arguments.number(group["lr"]),
            group["momentum"],
            group["dampening"],
            float(bool(group["nesterov"])),
            float(group["weight_decay"]),
            float(bool(group["decoupled"])),
            float(bool(group["dampen_first"])),
        ]
