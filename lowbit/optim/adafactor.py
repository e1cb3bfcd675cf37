"""Adafactor: second moments as means of rows and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import Options
from lowbit.optim.optimizer import LowbitOptimizer

_DECAY_BY = ("lr", "rho", "alpha")


class Adafactor(LowbitOptimizer):
    """Adafactor (arXiv:1804.04235) as in torch.optim.Adafactor, with the options of adafactor-8bit and transformers.

    Parameters of two or more dimensions keep the second moment as float32 means of rows and columns over the last two
    dimensions; vectors keep it element by element. Sums over a tensor are exact, so results do not depend on sharding.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr: upper bound of the relative step, or the step itself if relative_step is False; 1e-2 by default.
        beta2_decay: the weight of the new squared gradient is step ** beta2_decay; -0.8 by default.
        eps: (eps1, eps2), (None, 1e-3) by default. eps1 is the floor of the second moment's root. None means float32's
            machine epsilon for every dtype; torch takes bfloat16's (7.8e-3), above every second moment. eps2 is the
            floor of the parameter's root mean square.
        d: upper bound of the update's root mean square; 1 by default. None disables it.
        weight_decay: decoupled; 0 by default.
        maximize: maximizes the objective instead; False by default.
        foreach: accepted for torch's signature and ignored.
        beta1: decay of a first moment, which is kept in `state_format`; None (default) keeps none.
        beta2: a fixed decay instead of beta2_decay; None by default.
        relative_step: limits the step to 1 / sqrt(step); True by default.
        scale_parameter: makes steps relative to the parameter's root mean square; True by default.
        decay_by: the factor of weight decay: "lr" (default, as in torch), "rho" (the relative step) or "alpha" (that
            times the parameter's scale).
        fira_margin: Fira's norm-growth limiter: an update's norm grows by at most this share. None (default) disables
            it.
        factored: False keeps every second moment element by element; True by default.
        add_eps: adds eps1 to the squared gradient; False by default.
        state_format, param_format, full_precision, seed, overrides, min_numel, state_memory: as in `Adam`.

    Raises:
        ValueError: an argument is out of range; the messages are torch's.
    """

    @arguments.lists(Options)
    def __init__(
        self,
        params: ParamsT,
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
        **options: Unpack[Options],
    ) -> None:
        defaults = arguments.shared(self, lr, maximize=maximize, foreach=foreach, **options)
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
            arguments.number(group["lr"]),
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
