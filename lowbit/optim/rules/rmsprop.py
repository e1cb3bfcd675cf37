"""RMSprop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import Options
from lowbit.optim.optimizer import LowbitOptimizer


class RMSprop(LowbitOptimizer):
    """torch.optim.RMSprop with low-bit state.

    With centered=True the variance is a difference of two numbers that few bits cannot tell apart.
    It is therefore at least 1/8 of square_avg, so steps are at most 2.8 times as long as without
    centering; 1/64 in groups whose `state_format` is "bfloat16", and 0 where it is "float32" or
    `full_precision` is True. The group decides, for its parameters in float32 too.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr: learning rate, a float or a tensor of one element; 1e-2 by default.
        alpha: decay of the running average of the squared gradient; 0.99 by default.
        eps: added to the denominator; 1e-8 by default.
        weight_decay: added to the gradient (L2); 0 by default.
        momentum: decay of a running sum of updates, in a state tensor of its own;
            0 (default) keeps none.
        centered: True divides by the estimated standard deviation, and keeps the mean gradient;
            False by default.
        capturable, foreach: accepted for torch's signature and ignored.
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
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = arguments.group_defaults(
            self,
            lr,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            **options,
        )
        defaults |= {
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_flags(group, "centered")
        arguments.check_least(epsilon=group["eps"], momentum=group["momentum"])
        arguments.check_least(weight_decay=group["weight_decay"], alpha=group["alpha"])

    decides = ("momentum", "centered")

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        kind = "rmsprop_centered" if group["centered"] else "rmsprop"
        return kind + ("_momentum" if group["momentum"] > 0 else "")

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        names = ("alpha", "eps", "weight_decay", "momentum")
        format = "float32" if group["full_precision"] is True else group["state_format"]
        known = {"float32": 0.0, "bfloat16": 2**-6}
        least = known.get(format, 2**-3) if isinstance(format, str) else 2**-3
        return [arguments.number(group["lr"]), *(group[name] for name in names), least]
