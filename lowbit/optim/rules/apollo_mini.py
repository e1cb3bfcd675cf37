"""APOLLO-Mini."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import AllOptions
from lowbit.optim.rules.apollo import APOLLO


class APOLLOMini(APOLLO):
    """APOLLO-Mini (arXiv:2412.05270): `APOLLO` with rank 1, one step length per tensor,
    and `scale=128`.

    Args:
        rank: of the projection; 1 by default.
        scale: the update is multiplied by its square root; 128 by default.
        scale_type: one step length for each "channel" (a row if R >= C, else a column) or for the
            "tensor" (default).
        params, lr, betas, eps, weight_decay, update_proj_gap, scale_front, disable_nl, gamma,
            projection: as in `APOLLO`, with its defaults.
        maximize, foreach, state_format, param_format, full_precision, seed, overrides, min_numel,
            state_memory: as in `Adam`.
    """

    @arguments.documents_options(AllOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int | str | None = 1,
        scale: float = 128.0,
        scale_type: str = "tensor",
        update_proj_gap: int = 200,
        scale_front: bool = False,
        disable_nl: bool = False,
        gamma: float = 1.01,
        projection: str = "philox",
        **options: Unpack[AllOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            rank=rank,
            scale=scale,
            scale_type=scale_type,
            update_proj_gap=update_proj_gap,
            scale_front=scale_front,
            disable_nl=disable_nl,
            gamma=gamma,
            projection=projection,
            **options,
        )
