"""Muon and AdamW in one optimizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.muon import DEFAULTS, QUINTIC, Coefficients, MuonOptions
from lowbit.optim.orthogonal import OrthogonalOptimizer


class MuonWithAdamW(OrthogonalOptimizer):
    """Muon for groups with `use_muon=True` and AdamW for those with `use_muon=False`,
    in one optimizer.

    `lowbit.muon_param_groups(model)` makes such groups. Every parameter is stepped as `Muon` or
    `AdamW` would step it. NorMuon and cautious weight decay are of Muon's groups.

    Args:
        params: group dicts, each with `use_muon`. A group may have its own values of all arguments;
            those of AdamW are called lr, weight_decay, betas and eps there.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn,
            orthogonalize, split, normuon_beta2, cautious_weight_decay: as in `Muon`.
        adamw_lr: learning rate of AdamW's groups; None (default) is `lr`.
        adamw_betas: decay of AdamW's running means; (0.9, 0.95) by default.
        adamw_eps: added to the root of AdamW's second moment; 1e-8 by default.
        adamw_weight_decay: of AdamW's groups; None (default) is `weight_decay`.
        foreach, maximize, state_format, param_format, full_precision, seed, overrides, min_numel,
            state_memory: as in `Adam`.

    Raises:
        ValueError: an argument is out of range, a group has no `use_muon`, or as `Muon` raises it.
    """

    @arguments.documents_options(MuonOptions, DEFAULTS)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        **options: Unpack[MuonOptions],
    ) -> None:
        self._adamw = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "eps": adamw_eps,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
        }
        arguments.check_betas(adamw_betas)
        least: dict[str, Any] = {
            "learning rate": self._adamw["lr"],
            "epsilon": adamw_eps,
            "weight_decay": self._adamw["weight_decay"],
        }
        arguments.check_least(**least)
        rule = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": True,
            "betas": adamw_betas,
        }
        super().__init__(params, rule, options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_adamw": self._adamw}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            if "use_muon" not in param_group:
                raise ValueError(
                    "a parameter group has no use_muon, which says whether Muon (True) or AdamW "
                    "(False) steps it; lowbit.muon_param_groups(model) makes groups that have it"
                )
            for key in ("lr", "betas", "eps", "weight_decay"):
                if (own := f"adamw_{key}") in param_group:
                    raise ValueError(
                        f"{own} is for a whole optimizer, not for a group of it: write {key} in a "
                        f"group with use_muon=False, or pass {own} to the optimizer"
                    )
            if not param_group["use_muon"]:
                for key, value in self._adamw.items():
                    param_group.setdefault(key, value)
        super().add_param_group(param_group)

    add_param_group.__doc__ = OrthogonalOptimizer.add_param_group.__doc__
