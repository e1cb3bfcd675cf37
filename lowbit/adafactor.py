"""Adafactor and CAME: second moments as means of rows and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import options
from lowbit.optim import LowbitOptimizer

_DECAY_BY = ("lr", "rho", "alpha")


class Adafactor(LowbitOptimizer):
    """Adafactor (arXiv:1804.04235) as torch.optim.Adafactor has it, with the options of adafactor-8bit and transformers.

    Parameters of two or more dimensions keep the second moment as means of rows and of columns over the last two dimensions, float32; vectors keep it
    element by element. Sums over the tensor are exact, so results do not depend on how it is sharded.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr: upper bound of the relative step, or the step itself.
        beta2_decay: the new sample's weight is step ** beta2_decay.
        eps: (eps1, eps2): floor of the second moment's root, None for float32's machine epsilon whatever the parameter's dtype (torch takes
            bfloat16's, 7.8e-3, there: no second moment is that large); and floor of the parameter's root mean square.
        d: the update's root mean square is at most this. None: no clipping.
        weight_decay: decoupled.
        maximize: ascend instead.
        foreach: accepted as torch has it and ignored.
        beta1: keep a first moment, in `state_format`; None: none.
        beta2: a fixed decay in the place of beta2_decay.
        relative_step: the step is at most 1 / sqrt(step).
        scale_parameter: steps are relative to the parameter's root mean square.
        decay_by: what weight decay is multiplied by: "lr" (torch), "rho" (the relative step) or "alpha" (that times the parameter's scale).
        fira_margin: Fira's norm-growth limiter: an update's norm grows by no more than this share. None: no limiter.
        factored: False keeps every second moment element by element.
        add_eps: eps1 is added to the squared gradient.
        state_format, param_format, wide, seed, overrides, min_numel, state_memory: as in `AdamW`.

    Raises:
        ValueError: an argument out of range, in torch's words.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float | None = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        beta1: float | None = None,
        beta2: float | None = None,
        relative_step: bool = True,
        scale_parameter: bool = True,
        decay_by: str = "lr",
        fira_margin: float | None = None,
        factored: bool = True,
        add_eps: bool = False,
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
        if not beta2_decay <= 0.0:
            raise ValueError(f"beta2_decay should be <= 0 but is: {beta2_decay}")
        if eps[0] is not None and not eps[0] >= 0.0:
            raise ValueError(f"epsilon1 should be >= 0 but is: {eps[0]}")
        if not eps[1] >= 0.0:
            raise ValueError(f"epsilon2 should be >= 0 but is: {eps[1]}")
        if d is not None and not d >= 1.0:
            raise ValueError(f"Clipping threshold d should be >= 1 but is: {d}")
        if not weight_decay >= 0.0:
            raise ValueError(f"weight_decay should be >= 0 but is: {weight_decay}")
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if beta is not None and not 0.0 <= beta < 1.0:
                raise ValueError(f"{name} should be in [0, 1) or None but is: {beta}")
        if decay_by not in _DECAY_BY:
            raise ValueError(f"decay_by should be one of {', '.join(_DECAY_BY)} but is: {decay_by}")
        if fira_margin is not None and not fira_margin >= 0.0:
            raise ValueError(f"fira_margin should be >= 0 or None but is: {fira_margin}")
        defaults |= {
            "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay,
            "beta1": beta1, "beta2": beta2, "relative_step": relative_step,
            "scale_parameter": scale_parameter, "decay_by": decay_by, "fira_margin": fira_margin,
            "factored": factored, "add_eps": add_eps,
        }  # fmt: skip
        super().__init__(params, defaults)

    decides = ("beta1", "factored")

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        kind = "adafactor" if group["factored"] and len(shape) > 1 else "adafactor_full"
        return kind + ("" if group["beta1"] is None else "_momentum")

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        eps1, eps2 = group["eps"]

        def given(value: float | None) -> float:
            return -1.0 if value is None else float(value)

        return [
            options.number(group["lr"]),
            group["beta2_decay"],
            given(group["beta2"]),
            given(group["beta1"]),
            torch.finfo(torch.float32).eps if eps1 is None else eps1,
            eps2,
            given(group["d"]),
            group["weight_decay"],
            float(_DECAY_BY.index(group["decay_by"])),
            float(group["relative_step"]),
            float(group["scale_parameter"]),
            given(group["fira_margin"]),
            float(group["add_eps"]),
        ]


class CAME(LowbitOptimizer):
    """CAME (arXiv:2307.02047): Adafactor with momentum, its steps divided by the confidence in them.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr: learning rate.
        eps: added to the squared gradient, and to the squared distance between update and momentum.
        clip_threshold: the direction's root mean square is at most this.
        betas: decay of the momentum, of the second moment, and of the confidence.
        weight_decay: decoupled.
        maximize, foreach, state_format, param_format, wide, seed, overrides, min_numel, state_memory: as in `AdamW`; the momentum is what `state_format` is about.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2e-4,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
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
        if not (eps[0] >= 0.0 and eps[1] >= 0.0):
            raise ValueError(f"Invalid epsilon values: {eps}")
        if not clip_threshold > 0.0:
            raise ValueError(f"Invalid clip_threshold value: {clip_threshold}")
        options.check_betas(betas, 3)
        options.check_least(weight_decay=weight_decay)
        defaults |= {
            "eps": eps, "clip_threshold": clip_threshold, "betas": betas, "weight_decay": weight_decay
        }  # fmt: skip
        super().__init__(params, defaults)

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "came" if len(shape) > 1 else "came_full"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [
            options.number(group["lr"]),
            *group["betas"],
            *group["eps"],
            group["clip_threshold"],
            group["weight_decay"],
        ]
