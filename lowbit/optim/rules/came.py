"""CAME: Adafactor with momentum and confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import AllOptions
from lowbit.optim.optimizer import LowbitOptimizer


class CAME(LowbitOptimizer):
    """CAME (arXiv:2307.02047): Adafactor with momentum,
    whose steps are scaled by the confidence in them.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr: learning rate; 2e-4 by default.
        eps: added to the squared gradient, and to the squared distance of update and momentum;
            (1e-30, 1e-16) by default.
        clip_threshold: upper bound of the direction's root mean square; 1 by default.
        betas: decay of the momentum, the second moment and the confidence;
            (0.9, 0.999, 0.9999) by default.
        weight_decay: decoupled; 0 by default.
        state_format: of the momentum: "8bit" by default, another preset, a format,
            or a `lowbit.scaled(...)`.
        maximize, foreach, param_format, full_precision, seed, overrides, min_numel,
            state_memory: as in `Adam`.

    Raises:
        ValueError: an argument is out of range.
    """

    @arguments.documents_options(AllOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-4,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        **options: Unpack[AllOptions],
    ) -> None:
        defaults = arguments.group_defaults(self, lr, **options)
        defaults |= {
            "eps": eps,
            "clip_threshold": clip_threshold,
            "betas": betas,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        eps = arguments.pair("eps", group["eps"])
        if not (eps[0] >= 0.0 and eps[1] >= 0.0):
            raise ValueError(f"Invalid epsilon values: {eps}")
        arguments.check_above(clip_threshold=group["clip_threshold"])
        arguments.check_betas(group["betas"], 3)
        arguments.check_least(weight_decay=group["weight_decay"])

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "came" if len(shape) > 1 else "came_full"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [
            arguments.number(group["lr"]),
            *group["betas"],
            *group["eps"],
            group["clip_threshold"],
            group["weight_decay"],
        ]
