"""APOLLO-Mini."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.optim.apollo import APOLLO


class APOLLOMini(APOLLO):
    """APOLLO-Mini (arXiv:2412.05270): `APOLLO` with rank 1, one step length per tensor, and `scale=128`."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int | str | None = 1,
        scale: float = 128.0,
        scale_type: str = "tensor",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay,
            rank=rank, scale=scale, scale_type=scale_type, **kwargs,
        )  # fmt: skip
