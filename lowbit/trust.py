"""LAMB and LARS: steps as long as the weights are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lowbit import options
from lowbit.optim import LowbitOptimizer


class LAMB(LowbitOptimizer):
    """LAMB (arXiv:1904.00962): AdamW's direction, each tensor's step scaled to the length of its weights.

    The ratio of norms is taken over the whole tensor, from exact sums, however it is sharded.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, betas, eps: as in Adam.
        weight_decay: added to the direction before its length is taken.
        maximize, foreach, state_format, param_format, wide, seed, overrides, min_numel, state_memory: as in `AdamW`.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
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
        options.check_least(epsilon=eps)
        options.check_betas(betas)
        options.check_least(weight_decay=weight_decay)
        defaults |= {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "lamb"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [options.number(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]]


class LARS(LowbitOptimizer):
    """LARS (arXiv:1708.03888): SGD with momentum, each tensor's gradient scaled to the length of its weights.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, momentum, dampening, weight_decay, nesterov: as in SGD.
        trust_coefficient: the length of a step relative to that of the weights.
        eps: added to the length of the gradient.
        maximize, foreach, state_format, param_format, wide, seed, overrides, min_numel, state_memory: as in `AdamW`.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
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
        options.check_least(momentum=momentum, weight_decay=weight_decay, epsilon=eps)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        if not trust_coefficient > 0.0:
            raise ValueError(f"Invalid trust_coefficient value: {trust_coefficient}")
        defaults |= {
            "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "trust_coefficient": trust_coefficient, "eps": eps,
        }  # fmt: skip
        super().__init__(params, defaults)

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "lars"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [
            options.number(group["lr"]), group["momentum"], group["dampening"], float(group["nesterov"]),
            group["weight_decay"], group["trust_coefficient"], group["eps"],
        ]  # fmt: skip
