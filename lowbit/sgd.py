"""SGD, Lion, RMSprop and Adagrad: one or two state tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lowbit import options
from lowbit.optim import LowbitOptimizer


class SGD(LowbitOptimizer):
    """torch.optim.SGD with its momentum in few bits.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.
        foreach, differentiable, fused: accepted as torch has them; differentiable=True raises.
        decoupled: decay is applied to the weights (SGDW) instead of being added to the gradient.
        dampen_first: dampening in the first step as well (FlashOptim), where torch takes the whole gradient.
        state_format, param_format, wide, seed, overrides, min_numel, state_memory: as in `AdamW`.

    Raises:
        ValueError: an argument out of range, in torch's words.
    """

    def __init__(
        self,
        params: Any,
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
        state_format: str | Mapping[str, Any] = "8bit",
        param_format: str = "auto",
        wide: bool | Sequence[str] = (),
        seed: int = 0,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        min_numel: int | None = None,
        state_memory: str = "device",
    ) -> None:
        defaults = options.shared(
            lr, maximize=maximize, foreach=foreach, differentiable=differentiable,
            fused=fused, state_format=state_format, param_format=param_format, wide=wide, seed=seed, overrides=overrides, min_numel=min_numel,
            state_memory=state_memory,
        )  # fmt: skip
        options.check_least(momentum=momentum, weight_decay=float(weight_decay))
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults |= {
            "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "decoupled": decoupled, "dampen_first": dampen_first,
        }  # fmt: skip
        super().__init__(params, defaults)

    decides = ("momentum",)

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "sgd_momentum" if group["momentum"] else "sgd"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [
            options.number(group["lr"]), group["momentum"], group["dampening"], float(group["nesterov"]),
            float(group["weight_decay"]), float(group["decoupled"]), float(group["dampen_first"]),
        ]  # fmt: skip


class Lion(LowbitOptimizer):
    """Lion (arXiv:2302.06675): the sign of an interpolated momentum, which is the only state.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr: learning rate; about a tenth of AdamW's.
        betas: weight of the momentum in the step, and its decay.
        weight_decay: decoupled; about ten times AdamW's.
        maximize, foreach, state_format, param_format, wide, seed, overrides, min_numel, state_memory: as in `AdamW`.

    Raises:
        ValueError: an argument out of range, in torch's words.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
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
        options.check_betas(betas)
        options.check_least(weight_decay=weight_decay)
        super().__init__(params, defaults | {"betas": betas, "weight_decay": weight_decay})

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "lion"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [options.number(group["lr"]), *group["betas"], group["weight_decay"]]


class RMSprop(LowbitOptimizer):
    """torch.optim.RMSprop with its state in few bits.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, alpha, eps, weight_decay, momentum, centered, maximize: as in torch.optim.RMSprop.
        capturable, foreach, differentiable: accepted as torch has them; differentiable=True raises.
        state_format, param_format, wide, seed, overrides, min_numel, state_memory: as in `AdamW`. With centered=True the variance is the difference of two
            numbers that few bits cannot tell apart, so it is at least 1/8 of square_avg (1/64 in bfloat16, 0 in float32): steps are at most
            2.8 times as long as without centering.

    Raises:
        ValueError: an argument out of range, in torch's words.
    """

    def __init__(
        self,
        params: Any,
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
        *,
        state_format: str | Mapping[str, Any] = "8bit",
        param_format: str = "auto",
        wide: bool | Sequence[str] = (),
        seed: int = 0,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        min_numel: int | None = None,
        state_memory: str = "device",
    ) -> None:
        defaults = options.shared(
            lr, maximize=maximize, foreach=foreach, capturable=capturable, differentiable=differentiable,
            state_format=state_format, param_format=param_format, wide=wide, seed=seed, overrides=overrides, min_numel=min_numel,
            state_memory=state_memory,
        )  # fmt: skip
        options.check_least(epsilon=eps, momentum=momentum, weight_decay=weight_decay, alpha=alpha)
        defaults |= {
            "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
            "centered": centered,
        }  # fmt: skip
        super().__init__(params, defaults)

    decides = ("momentum", "centered")

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        kind = "rmsprop_centered" if group["centered"] else "rmsprop"
        return kind + ("_momentum" if group["momentum"] > 0 else "")

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        names = ("alpha", "eps", "weight_decay", "momentum")
        format = "float32" if group["wide"] is True else group["state_format"]
        known = {"float32": 0.0, "bfloat16": 2**-6}
        least = known.get(format, 2**-3) if isinstance(format, str) else 2**-3
        return [options.number(group["lr"]), *(group[name] for name in names), least]


class Adagrad(LowbitOptimizer):
    """torch.optim.Adagrad with its state in few bits.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.optim.Adagrad.
        foreach, differentiable, fused: accepted as torch has them; differentiable=True raises.
        state_format, param_format, wide, seed, overrides, min_numel, state_memory: as in `AdamW`.

    Raises:
        ValueError: an argument out of range, in torch's words.
    """

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
        state_format: str | Mapping[str, Any] = "8bit",
        param_format: str = "auto",
        wide: bool | Sequence[str] = (),
        seed: int = 0,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        min_numel: int | None = None,
        state_memory: str = "device",
    ) -> None:
        defaults = options.shared(
            lr, maximize=maximize, foreach=foreach, differentiable=differentiable,
            fused=fused, state_format=state_format, param_format=param_format, wide=wide, seed=seed, overrides=overrides, min_numel=min_numel,
            state_memory=state_memory,
        )  # fmt: skip
        options.check_least(lr_decay=lr_decay, weight_decay=weight_decay)
        options.check_least(initial_accumulator_value=initial_accumulator_value, epsilon=eps)
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
        return [options.number(group["lr"]), group["lr_decay"], group["weight_decay"], group["eps"]]
