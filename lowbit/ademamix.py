"""AdEMAMix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lowbit import options
from lowbit.optim import LowbitOptimizer


class AdEMAMix(LowbitOptimizer):
    """AdEMAMix (arXiv:2409.03137): AdamW with a second, slow mean of the gradient.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, eps, weight_decay: as in AdamW.
        betas: decay of the fast mean, of the second moment, and of the slow mean.
        alpha: weight of the slow mean.
        t_alpha, t_beta3: steps over which alpha grows from 0, and the slow decay from the fast one; None: from the start.
        maximize, foreach, state_format, param_format, wide, seed, overrides, min_numel, state_memory: as in `AdamW`.

    Raises:
        ValueError: an argument out of range, in torch's words.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        state_format: str | Mapping[str, Any] = "8bit",
        param_format: str = "auto",
        wide: bool | Sequence[str] = (),
        seed: int = 0,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        min_numel: int | None = None,
        state_memory: str = "device",
    ) -> None:
        defaults = options.shared(
            lr, maximize=maximize, foreach=foreach, state_format=state_format, param_format=param_format,
            wide=wide, seed=seed, overrides=overrides, min_numel=min_numel,
            state_memory=state_memory,
        )  # fmt: skip
        options.check_betas(betas, 3)
        options.check_least(epsilon=eps, weight_decay=weight_decay, alpha=alpha)
        options.check_least(1, t_alpha=t_alpha or 1, t_beta3=t_beta3 or 1)
        defaults |= {
            "betas": betas, "alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3, "eps": eps,
            "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "ademamix"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [
            options.number(group["lr"]), *group["betas"], group["alpha"], float(group["t_alpha"] or 0),
            float(group["t_beta3"] or 0), group["eps"], group["weight_decay"],
        ]  # fmt: skip
