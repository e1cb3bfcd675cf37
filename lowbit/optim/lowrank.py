"""Steps of matrices in a subspace, whatever the rule: what APOLLO,
Fira and Adafactor with a rank share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import sharding
from lowbit.optim.matrices import MatrixOptimizer
from lowbit.state import lowrank_layout
from lowbit.state.layout import Layout
from lowbit.step import lowrank
from lowbit.step.group import StepGroup
from lowbit.step.numbers import on_device


def check_subspace(rank: Any, update_proj_gap: Any) -> None:
    """Checks the options of a subspace.

    Raises:
        ValueError: one is out of range.
    """
    if not (rank is None or rank == "quarter" or _counts(rank)):
        raise ValueError(f"rank should be a positive int, 'quarter' or None but is: {rank}")
    if not _counts(update_proj_gap):
        raise ValueError(f"update_proj_gap should be an int >= 1 but is: {update_proj_gap}")


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class LowRankOptimizer(MatrixOptimizer):
    """The base of optimizers with `rank`: matrices larger than that on both sides step in a
    subspace.
    """

    def layout_of(
        self, group: Mapping[str, Any], p: Tensor, name: str | None, index: int
    ) -> Layout:
        rank = lowrank_layout.rank_of(group, tuple(p.shape), name, index)
        if rank == 0:
            return super().layout_of(group, p, name, index)
        check_subspace(group["rank"], group["update_proj_gap"])
        return self.subspace_of(group, p, name, index, rank)

    def subspace_of(
        self, group: Mapping[str, Any], p: Tensor, name: str | None, index: int, rank: int
    ) -> Layout:
        """The layout of a matrix that is stepped in a subspace of this rank."""
        raise NotImplementedError

    def work_on(self, device: torch.device) -> Any:
        """The class of what steps one parameter there."""
        raise NotImplementedError

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
            kind = self.work_on(device)
            scale, skip = on_device(grad_scale, device), on_device(found_inf, device)
            groups = [(self.param_groups[number], p, self.layouts[p]) for number, p in members]
            reads = any(kind.reads_found_inf(group, lay) for group, _, lay in groups)
            if skip is not None and reads and float(skip) != 0.0:
                continue
            works = [kind(group, p, lay, self.state[p], scale, skip) for group, p, lay in groups]
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
            table = self.plan_of((where, id(step_group.rows[0][1])), step_group)
            hyper = self.hyper(step_group.group, step_group.rule)
            step_group.bind(table, hyper, found_inf=found_inf, seed=step_group.group["seed"])
        return list(step_groups.values())
