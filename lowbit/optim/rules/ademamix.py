"""AdEMAMix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import AllOptions
from lowbit.optim.optimizer import LowbitOptimizer


class AdEMAMix(LowbitOptimizer):
    """AdEMAMix (arXiv:2409.03137): AdamW with a second, slow average of the gradient.

    The slow average is `exp_avg_slow` in the state. A step moves it by a ten-thousandth of the
    gradient, which 8-bit codes lose (docs/loss/drift.md), so it is bfloat16, rounded
    stochastically, under every preset but "float32": 2 bytes per parameter. Parameters in full
    precision have it in float32. `state_format={"exp_avg_slow": ..., ...}` chooses another format,
    and warns if it loses the average.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, eps, weight_decay: as in `AdamW`, with its defaults.
        betas: decay of the fast average, the second moment and the slow average;
            (0.9, 0.999, 0.9999) by default.
        alpha: weight of the slow average; 5 by default.
        t_alpha: steps over which alpha grows from 0; None (default) starts with alpha.
        t_beta3: steps over which the slow decay grows from the fast one;
            None (default) starts with the slow decay.
        maximize, foreach, state_format, param_format, full_precision, seed, overrides, min_numel,
            state_memory: as in `Adam`.

    Raises:
        ValueError: an argument is out of range; the messages are torch's.

    Warns:
        UserWarning: once, if `state_format` names a format for `exp_avg_slow` that loses it.
    """

    @arguments.documents_options(AllOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[AllOptions],
    ) -> None:
        defaults = arguments.group_defaults(self, lr, **options)
        defaults |= {
            "betas": betas,
            "alpha": alpha,
            "t_alpha": t_alpha,
            "t_beta3": t_beta3,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_betas(group["betas"], 3)
        arguments.check_least(
            epsilon=group["eps"], weight_decay=group["weight_decay"], alpha=group["alpha"]
        )
        arguments.check_least(1, t_alpha=group["t_alpha"] or 1, t_beta3=group["t_beta3"] or 1)

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "ademamix"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [
            arguments.number(group["lr"]),
            *group["betas"],
            group["alpha"],
            float(group["t_alpha"] or 0),
            float(group["t_beta3"] or 0),
            group["eps"],
            group["weight_decay"],
        ]
