"""How the state of a matrix that Muon steps is laid out (docs/muon.md)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from lowbit import sharding
from lowbit.config import muon
from lowbit.state import layout, plan
from lowbit.state.layout import Layout

MOMENTUM = "muon_momentum"  # the rule that writes the update
STEP = "muon"  # the rule that steps by the orthogonalized update
UPDATE = "bfloat16"  # the format in which the update is kept in between


@dataclass(frozen=True)
class MuonLayout(Layout):
    """The layout of a matrix, or of a batch of matrices [n, rows, cols], whose momentum is orthogonalized."""

    pieces: tuple[int, ...] = ()  # rows of the matrices that each of them is made of

    def __post_init__(self) -> None:
        super().__post_init__()
        keys = tuple(e.key for slot in self.slots for e in self.of_slots[slot.name])
        object.__setattr__(self, "keys", keys)  # of the momentum's tensors

    @property
    def in_passes(self) -> bool:
        return True

    @functools.cached_property
    def step(self) -> Layout:
        """Of the second rule, which keeps nothing but the parameter's compensation."""
        return Layout(STEP, self.part, (), self.param_format, self.stream)

    @functools.cached_property
    def _plan_row(self) -> list[int]:
        """As `Layout._plan_row`, but it is the update that is written."""
        return plan.row(self.part, self.slots, False, UPDATE)


def layout_of(group: Mapping[str, Any], p: Tensor, name: str | None, index: int) -> MuonLayout:
    """The layout of a parameter that Muon steps.

    Raises:
        ValueError: the parameter is no matrix and no batch of matrices, options do not fit it, or it is sharded.
    """
    what = f"parameter {name!r}" if name else f"parameter {index}"
    if isinstance(p, sharding.FlatShard):
        raise ValueError(
            f"{what} lies in flat shards of FSDP1, and Muon needs whole matrices; use fully_shard, or AdamW for it"
        )
    if p.dim() not in (2, 3):
        raise ValueError(
            f"{what} has the shape {tuple(p.shape)}, and Muon only supports matrices and batches of them, [n, rows, columns]; use "
            "lowbit.MuonWithAdamW(lowbit.muon_param_groups(model)), which steps all others by AdamW"
        )
    muon.schedule(group["ns_coefficients"], group["ns_steps"])
    pieces = muon.pieces(group["split"], tuple(p.shape), name, index, what)
    base = layout.layout_of(MOMENTUM, group, p, name, index)
    check_whole(base.part, what)
    same = {f.name: getattr(base, f.name) for f in fields(Layout)}
    return MuonLayout(**same, pieces=pieces)


def check_whole(part: sharding.Part, what: str) -> None:
    """Raises ValueError if a rank holds parts of matrices."""
    if part.local[-2:] != part.shape[-2:] or (len(part.shape) == 2 and part.cuts):
        raise ValueError(
            f"{what} of shape {part.shape} is sharded, and this rank has {part.local} of it; Muon steps matrices that a rank has whole, as on one "
            "process, under DistributedDataParallel, or in a batch [n, rows, columns] sharded on dimension 0. Use lowbit.AdamW for sharded matrices"
        )
