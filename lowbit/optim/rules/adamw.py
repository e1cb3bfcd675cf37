"""AdamW."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import Options
from lowbit.optim.rules.adam import Adam


class AdamW(Adam):
    """AdamW (arXiv:1711.05101): `Adam` with decoupled weight decay.

    Args:
        weight_decay: applied to the weights before the update (decoupled); 1e-2 by default.
        params, lr, betas, eps, amsgrad, maximize, foreach, capturable, differentiable, fused,
            cautious, state_format, param_format, full_precision, seed, overrides, min_numel,
            state_memory: as in `Adam`, with its defaults.
    """

    @arguments.documents_options(Options)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        cautious: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            cautious=cautious,
            **options,
        )
