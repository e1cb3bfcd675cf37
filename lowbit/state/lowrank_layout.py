"""How the state of a matrix that is stepped in a subspace is laid out
(docs/definitions/lowrank.md).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lowbit import sharding
from lowbit.config.overrides import clean_name, effective
from lowbit.state import choose, plan
from lowbit.state.layout import Layout, kept_whole, stream_of
from lowbit.state.slot import StateTensor

INNER = "apollo_inner"  # the rule of the step inside the subspace
ADAFACTOR = "apollo_adafactor"  # that of Adafactor
_NOWHERE = sharding.Part((), (), ())


class StepCount:
    """The step count of a parameter on another device,
    read once and then counted here until its tensor changes.
    """

    def __init__(self) -> None:
        self.known: tuple[Tensor, int, int] | None = None  # the tensor, its version, its value

    def next(self, step: Tensor) -> int:
        """The number of the step that begins. It is unknown again until `stepped` records it."""
        known, self.known = self.known, None
        if known is not None and known[0] is step and known[1] == step._version:
            return known[2] + 1
        return round(float(step)) + 1

    def stepped(self, step: Tensor, count: int) -> None:
        self.known = (step, step._version, count)


@dataclass(frozen=True)
class LowRankLayout(Layout):
    """The layout of a matrix [R, C] that is stepped in a subspace.

    `part` is the local part of the low-rank gradient L: [R, rank] if R >= C (tall), else [rank, C].
    `own` is the matrix's.
    """

    own: sharding.Part = _NOWHERE
    rank: int = 0
    fira: bool = False
    number_of: int = 0  # which projection="torch" draws from: the authors' number of the parameter
    steps: StepCount = field(default_factory=StepCount, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        keys = tuple(e.key for slot in self.slots for e in self.of_slots[slot.name])
        object.__setattr__(self, "keys", keys)  # of the inner step's tensors

    @property
    def in_passes(self) -> bool:
        return True

    @property
    def param_part(self) -> sharding.Part:
        return self.own

    @property
    def shape(self) -> tuple[int, ...]:
        return self.own.shape

    @property
    def cut_groups(self) -> tuple[Any, ...]:
        return tuple(group for _, group in self.own.cuts)

    @property
    def exchanges(self) -> bool:
        return True

    @functools.cached_property
    def tall(self) -> bool:
        return self.own.global_rows >= self.own.global_cols

    def at_rows(self, begin: int, end: int) -> LowRankLayout:
        part = self.part.take_rows(begin, end) if self.tall else self.part
        return replace(self, part=part, own=self.own.take_rows(begin, end))

    @functools.cached_property
    def compensation(self) -> StateTensor | None:  # type: ignore[override]
        own = Layout(self.rule, self.own, (), self.param_format, 0)
        return own.compensation

    @functools.cached_property
    def projection(self) -> StateTensor:
        """P, float32 [min(R, C), rank]: whole if tall,
        else the rows that match the parameter's local rows.
        """
        own, f32 = self.own, torch.float32
        if self.tall:
            shape = (own.global_cols, self.rank)
            return StateTensor("projection", f32, shape, shape, (0, 0), (-1, -1))
        return StateTensor(
            "projection",
            f32,
            (own.global_rows, self.rank),
            (own.rows, self.rank),
            (own.row_offset, 0),
            (0, -1),
        )

    @property
    def auxiliary(self) -> list[StateTensor]:
        norm = StateTensor("update_norm", torch.float32, (), (), (), ())
        return [norm, self.projection] if self.fira else [norm]

    @functools.cached_property
    def _plan_row(self) -> list[int]:
        """As `Layout._plan_row`, but it is N, in float32, that is written."""
        return plan.row(self.part, self.slots, bool(self.factors), "float32")


def rank_of(group: Mapping[str, Any], shape: Sequence[int], name: str | None, index: int) -> int:
    """The rank of the subspace in which a parameter of this global shape is stepped; 0 for a step
    without one, as where `full_precision` or `overrides` keeps full precision.
    """
    rank = group.get("rank")  # an Adafactor that was pickled before it had a rank has none
    if (
        rank is None
        or len(shape) != 2
        or choose.names_full_precision(name, effective(group, name, index)["full_precision"])
    ):
        return 0
    if rank == "quarter":
        rank = max(1, min(shape) // 4)
    return rank if min(shape) > rank else 0


def layout_of(
    group: Mapping[str, Any],
    p: Tensor,
    name: str | None,
    index: int,
    rank: int,
    *,
    rule: str = INNER,
    fira: bool = False,
    number: int | None = None,
) -> LowRankLayout:
    """The layout of a matrix that is stepped in a subspace.

    Args:
        rule: of the inner step.
        number: the authors' number of the parameter; None (default) counts from 1 over all groups,
            as APOLLO's do.

    Raises:
        ValueError: the parameter is a flat shard, or its columns are split.
    """
    name = None if name is None else clean_name(name)
    what = f"parameter {name!r}" if name else f"parameter {index}"
    own, options = sharding.part(p, what), effective(group, name, index)
    if isinstance(p, sharding.FlatShard):
        raise ValueError(
            f"{what} lies in flat shards, and rank {rank} of it needs whole rows; use fully_shard, "
            f"or step it without a subspace by {kept_whole(name)} or a group with rank=None"
        )
    if not own.whole_rows or any(dim != 0 for dim, _ in own.cuts):
        raise ValueError(
            f"{what} of {own.global_cols} columns is cut at columns "
            f"{own.col_offset}..{own.col_offset + own.cols}, and rank {rank} of it needs whole "
            "rows; shard it on dimension 0, or step it without a subspace by "
            f"{kept_whole(name)} or a group with rank=None"
        )
    if own.global_rows >= own.global_cols:
        low = sharding.Part(
            (own.global_rows, rank), (own.rows, rank), (own.row_offset, 0), own.cuts, (0, -1)
        )
    else:
        shape = (rank, own.global_cols)
        low = sharding.Part(shape, shape, (0, 0), (), (-1, 1))
    chosen, full_precision = choose.chosen_of(rule, low, options, name)
    slots = choose.slots_of(rule, chosen, full_precision)
    return LowRankLayout(
        rule,
        low,
        slots,
        choose.param_format_of(p, options["param_format"], what),
        stream_of(name, index),
        own=own,
        rank=rank,
        fira=fira,
        number_of=index + 1 if number is None else number,
    )
