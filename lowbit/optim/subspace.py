"""Adam in a subspace of each matrix: what APOLLO and Fira share."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import sharding
from lowbit.config import arguments
from lowbit.optim.matrices import MatrixOptimizer
from lowbit.state import lowrank_layout
from lowbit.state.layout import Layout
from lowbit.step import lowrank, lowrank_cuda
from lowbit.step.group import StepGroup
from lowbit.step.numbers import on_device


class SubspaceOptimizer(MatrixOptimizer):
    """The base of APOLLO and Fira: matrices larger than `rank` on both sides step in a subspace, all else by AdamW."""

    _fira = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        arguments.check_least(epsilon=defaults["eps"])
        arguments.check_betas(defaults["betas"])
        arguments.check_least(weight_decay=defaults["weight_decay"])
        rank = defaults["rank"]
        if not (rank is None or rank == "quarter" or (isinstance(rank, int) and rank >= 1)):
            raise ValueError(f"rank should be a positive int, 'quarter' or None but is: {rank}")
        if not defaults["update_proj_gap"] >= 1:
            raise ValueError(f"update_proj_gap should be >= 1 but is: {defaults['update_proj_gap']}")  # fmt: skip
        if not defaults["gamma"] >= 1.0:
            raise ValueError(f"gamma should be >= 1 but is: {defaults['gamma']}")
        super().__init__(params, defaults)

    def layout_of(
        self, group: Mapping[str, Any], p: Tensor, name: str | None, index: int
    ) -> Layout:
        rank = lowrank_layout.rank_of(group, tuple(p.shape), name)
        if rank == 0:
            return super().layout_of(group, p, name, index)
        return lowrank_layout.layout_of(group, p, name, index, rank, self._fira)

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        moments = [float(beta1), float(beta2), group["eps"]]
        if rule == lowrank_layout.INNER:
            return [1.0, *moments]  # it has no learning rate, but 0 would keep it from writing N
        return [arguments.number(lr), *moments, group["weight_decay"]]

    def _update_matrices(
        self,
        params: Iterable[tuple[int, Tensor]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        here: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, p in params:
            here.setdefault(sharding.local(p).device, []).append((number, p))
        for device, members in here.items():
            kind = lowrank_cuda.CudaWork if device.type == "cuda" else lowrank.Work
            scale, skip = on_device(grad_scale, device), on_device(found_inf, device)
            groups = [(self.param_groups[number], p, self._layouts[p]) for number, p in members]
            looks = any(kind.looks(group, lay) for group, _, lay in groups)  # type: ignore[arg-type]
            if skip is not None and looks and float(skip) != 0.0:
                continue
            works = [kind(group, p, lay, self.state[p], scale, skip) for group, p, lay in groups]  # type: ignore[arg-type]
            numbers = {id(work): number for work, (number, _) in zip(works, members, strict=True)}
            lowrank.run(works, functools.partial(self._inner, numbers, skip))

    def _inner(
        self,
        numbers: Mapping[int, int],
        found_inf: Tensor | None,
        works: Sequence[lowrank.AnyWork],
    ) -> list[StepGroup]:
        step_groups: dict[Any, StepGroup] = {}
        for work in works:
            where = lowrank.inner_place(numbers[id(work)], work)
            if where not in step_groups:
                step_groups[where] = StepGroup(work.group, work.lay)
            lowrank.add_inner(step_groups[where], work)
        for where, step_group in step_groups.items():
            table = self._plan((where, id(step_group.rows[0][1])), step_group)
            hyper = self.hyper(step_group.group, step_group.rule)
            step_group.bind(table, hyper, found_inf=found_inf, seed=step_group.group["seed"])
        return list(step_groups.values())
