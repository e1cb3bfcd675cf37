"""Vectors that are bound to other elements than before,
whose state cannot follow once it has stepped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lowbit.sharding import FlatShard
from lowbit.state.replaced import steps_of


def cut_anew(opt: Any, flat_shards: Mapping[Tensor, Sequence[FlatShard]]) -> list[Tensor]:
    """The tensors of an optimizer's groups that hold other flat shards than those that are bound.

    Raises:
        RuntimeError: some of them have been stepped.
    """
    before, here = opt.flat_shards, {p for group in opt.param_groups for p in group["params"]}
    changed = [
        p
        for p in dict.fromkeys((*flat_shards, *before))
        if p in here and not _alike(before.get(p, ()), flat_shards.get(p, ()))
    ]
    stepped = [p for p in changed if steps_of(opt.state.get(p, {})) > 0]
    if again := [p for p in stepped if p in before]:
        raise RuntimeError(
            f"the vector of {before[again[0]][0].name!r} is cut otherwise than when it was bound "
            f"({len(again)} such vectors), and it has been stepped: its state cannot follow. Build "
            "another optimizer, bind that, and load by lowbit.flat.set_state_dict"
        )
    if stepped:
        raise RuntimeError(
            f"{sum(len(flat_shards[p]) for p in changed if p not in before)} parameters became "
            "flat shards after the optimizer had been stepped, and its state cannot follow; wrap "
            "the model first, then load the checkpoint"
        )
    return changed


def _alike(before: Sequence[FlatShard], now: Sequence[FlatShard]) -> bool:
    """Whether a vector holds the same elements of the same parameters,
    and other ranks the same others.
    """
    first, second = (
        {(p.name, p.shape, tuple(p.ranges), p.flat.rank, p.start, p.alone) for p in some}
        for some in (before, now)
    )
    return first == second
