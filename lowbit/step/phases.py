"""The phases of a step: what rules and scales measure is reduced over ranks before the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowbit import sharding
from lowbit.step.flat_shards import FlatShardReducer
from lowbit.step.group import StepGroup


def run_phases(step_groups: Sequence[StepGroup], reducer: FlatShardReducer | None = None) -> None:
    """Measures, reduces and updates, all groups phase by phase, so that one phase takes one
    collective for each kind of number.

    Args:
        reducer: of flat shards, on which ranks agree even where nothing is here.
    """
    workspaces: dict[int, dict[str, Tensor]] = {}
    phases = max((step_group.phases for step_group in step_groups), default=0)
    for phase in range(1 + max(phases, reducer.phases if reducer else 0)):
        shared = reducer.begin(phase) if reducer else None
        wanted: list[tuple[Tensor, Any, str]] = []
        for i, step_group in enumerate(step_groups):
            if phase > step_group.phases:
                continue
            if step_group.phases == 0:
                step_group.call()
            else:
                if phase == 0:
                    workspaces[i] = step_group.workspace()
                step_group.call(phase=phase, workspace=workspaces[i])
            if phase >= step_group.phases:
                step_group.write_back()
            elif step_group.flat_shards:  # a shard that one rank has whole needs no reduction
                if shared:
                    shared.put(step_group, workspaces[i])
            else:
                wanted += step_group.measured(phase, workspaces[i])
        if shared:
            wanted += shared.wanted()
        if wanted:
            sharding.reduce_over(wanted)
        if shared:
            shared.get()
