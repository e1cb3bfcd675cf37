"""LAMB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import AllOptions
from lowbit.optim.optimizer import LowbitOptimizer


class LAMB(LowbitOptimizer):
    """LAMB (arXiv:1904.00962): AdamW's direction,
    with each tensor's step scaled to the norm of its weights.

    Norms cover the whole tensor and come from exact sums, however it is sharded.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, betas, eps: as in `Adam`, with its defaults.
        weight_decay: added to the direction before its norm is taken; 0 by default.
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
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[AllOptions],
    ) -> None:
        defaults = arguments.group_defaults(self, lr, **options)
        defaults |= {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_least(epsilon=group["eps"])
        arguments.check_betas(group["betas"])
        arguments.check_least(weight_decay=group["weight_decay"])

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "lamb"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [arguments.number(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]]
