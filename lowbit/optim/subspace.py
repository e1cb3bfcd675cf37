"""Adam in a subspace of each matrix: what APOLLO and Fira share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.config import arguments
from lowbit.optim.lowrank import LowRankOptimizer, check_subspace
from lowbit.state import lowrank_layout
from lowbit.state.layout import Layout
from lowbit.step import lowrank, lowrank_cuda


class SubspaceOptimizer(LowRankOptimizer):
    """The base of APOLLO and Fira: matrices larger than `rank` on both sides step in a subspace,
    all else by AdamW.
    """

    _fira = False

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_least(epsilon=group["eps"])
        arguments.check_betas(group["betas"])
        arguments.check_least(weight_decay=group["weight_decay"])
        check_subspace(group["rank"], group["update_proj_gap"])
        if not arguments.real("gamma", group["gamma"]) >= 1.0:
            raise ValueError(f"gamma should be >= 1 but is: {group['gamma']}")

    def subspace_of(
        self, group: Mapping[str, Any], p: Tensor, name: str | None, index: int, rank: int
    ) -> Layout:
        return lowrank_layout.layout_of(group, p, name, index, rank, fira=self._fira)

    def work_on(self, device: torch.device) -> Any:
        return lowrank_cuda.CudaWork if device.type == "cuda" else lowrank.Work

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        moments = [float(beta1), float(beta2), group["eps"]]
        if rule == lowrank_layout.INNER:
            return [1.0, *moments]  # it has no learning rate, but 0 would keep it from writing N
        return [arguments.number(lr), *moments, group["weight_decay"]]
