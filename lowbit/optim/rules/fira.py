"""Fira."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import AllOptions
from lowbit.optim.subspace import SubspaceOptimizer


class Fira(SubspaceOptimizer):
    """Fira (arXiv:2410.01623): Adam in the gradient's leading subspace,
    and the rest of the gradient scaled alike.

    Every `update_proj_gap` steps the subspace is computed from the whole gradient, which sharded
    parameters gather for it. The subspace is part of the state. In all else it is like `APOLLO`.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, betas, eps, weight_decay, update_proj_gap: as in `APOLLO`, with its defaults.
        disable_nl: True lets the norm of the gradient outside the subspace grow by more than the
            factor gamma per step; False by default.
        gamma: largest growth factor of that norm; 1.01 by default, at least 1.
        rank: of the subspace; 128 by default. "quarter" is a quarter of the shorter side; None uses
            no subspace in this group. AdamW steps parameters that are not matrices, are not larger
            than `rank` on both sides, or are kept in full precision.
        alpha: the factor of the update inside the subspace; 1 by default.
        maximize, foreach, state_format, param_format, full_precision, seed, overrides, min_numel,
            state_memory: as in `Adam`.

    Raises:
        ValueError: an argument is out of range, or a matrix has sharded columns.
    """

    _fira = True

    @arguments.documents_options(AllOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int | str | None = 128,
        update_proj_gap: int = 200,
        alpha: float = 1.0,
        disable_nl: bool = False,
        gamma: float = 1.01,
        **options: Unpack[AllOptions],
    ) -> None:
        defaults = arguments.group_defaults(self, lr, **options)
        defaults |= {
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rank": rank,
            "update_proj_gap": update_proj_gap,
            "alpha": alpha,
            "disable_nl": disable_nl,
            "gamma": gamma,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_flags(group, "disable_nl")
        if not arguments.real("alpha", group["alpha"]) >= 0.0:
            raise ValueError(f"alpha should be >= 0 but is: {group['alpha']}")
