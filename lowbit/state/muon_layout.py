"""How the state of a matrix that Muon steps is laid out (docs/definitions/muon-design.md)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lowbit import sharding
from lowbit.config import muon
from lowbit.state import layout, plan
from lowbit.state.layout import Layout
from lowbit.state.slot import StateTensor

MOMENTUM = "muon_momentum"  # the rule that writes the update
STEP = "muon"  # the rule that steps by the orthogonalized update
ROW_MOMENTS = "second_momentum_buffer"
UPDATE = "bfloat16"  # the format in which the update is kept in between


@dataclass(frozen=True)
class MuonLayout(Layout):
    """The layout of a matrix, or of a batch of matrices [n, rows, cols],
    whose momentum is orthogonalized.
    """

    pieces: tuple[int, ...] = ()  # rows of the matrices that each of them is made of
    spread: sharding.Boxes | None = None  # if several ranks have parts of each matrix
    row_moments: bool = False  # NorMuon's

    @functools.cached_property
    def compensation(self) -> StateTensor | None:  # type: ignore[override]
        return Layout(STEP, self.param_part, (), self.param_format, 0).compensation

    @functools.cached_property
    def momentum_keys(self) -> tuple[str, ...]:
        return tuple(e.key for slot in self.slots for e in self.of_slots[slot.name])

    @property
    def auxiliary(self) -> list[StateTensor]:
        """NorMuon's second moment: a number for each row of each matrix,
        on all ranks that have a part of the row.
        """
        if not self.row_moments:
            return []
        part, dims = self.part, tuple(range(len(self.part.shape) - 1))
        return [
            StateTensor(
                ROW_MOMENTS, torch.float32, part.shape[:-1], part.local[:-1], part.offset[:-1], dims
            )
        ]

    @property
    def in_passes(self) -> bool:
        return True

    @property
    def cut_groups(self) -> tuple[Any, ...]:
        if not self.spread:
            return super().cut_groups
        batches = len(self.shape) - 2  # dimensions whose ranks exchange nothing
        groups = (self.group, *(group for dim, group in self.part.cuts if dim < batches))
        return tuple(dict.fromkeys(groups))

    @property
    def exchanges(self) -> bool:
        return self.home is not None or self.spread is not None

    @property
    def group(self) -> Any:
        """The process group over which matrices are spread."""
        assert self.spread
        return self.spread.group

    @property
    def count(self) -> int:
        """The matrices of which this rank has at least a part: the local ones of a batch."""
        return self.part.local[0] if len(self.part.shape) == 3 else 1

    @property
    def cost(self) -> float:
        """Multiply-adds of a Newton-Schulz step of one matrix."""
        cols = self.part.shape[-1]
        made = ((min(rows, cols), max(rows, cols)) for rows in self.pieces)
        return sum(4.0 * n * n * m + 2.0 * n**3 for n, m in made)

    @functools.cached_property
    def step(self) -> Layout:
        """Of the second rule, which keeps nothing but the parameter's compensation."""
        part = replace(self.param_part, cut=sharding.CUT_NONE)  # there are no blocks
        return Layout(STEP, part, (), self.param_format, self.stream)

    @functools.cached_property
    def _plan_row(self) -> list[int]:
        """As `Layout._plan_row`, but it is the update that is written."""
        return plan.row(self.part, self.slots, False, UPDATE)


def refuse_flat(p: Any, what: str) -> None:
    """
    Raises:
        ValueError: a flat shard has a part of the parameter, which is not a matrix; or DeepSpeed's
            ZeRO 3 has emptied it, and steps such a part.
    """
    if hasattr(p, "ds_shape"):
        raise ValueError(
            f"{what} was partitioned by DeepSpeed's ZeRO 3, as under zero.Init, and Muon needs "
            "whole matrices; use fully_shard, or lowbit.AdamW for it"
        )
    if isinstance(p, sharding.FlatShard) or sharding.is_flat(p):
        raise ValueError(
            f"{what} lies in flat shards, such as those of FSDP1 (FullyShardedDataParallel), and "
            "Muon needs whole matrices; use fully_shard, or lowbit.AdamW for it"
        )


def layout_of(group: Mapping[str, Any], p: Tensor, name: str | None, index: int) -> MuonLayout:
    """The layout of a parameter that Muon steps.

    Raises:
        ValueError: the parameter is neither a matrix nor a batch of matrices, options do not fit
            it, or state cannot follow its sharding.
    """
    what = f"parameter {name!r}" if name else f"parameter {index}"
    refuse_flat(p, what)
    if p.dim() not in (2, 3):
        raise ValueError(
            f"{what} has the shape {tuple(p.shape)}, and Muon only supports matrices and batches "
            "of them, [n, rows, columns]; use "
            "lowbit.MuonWithAdamW(lowbit.muon_param_groups(model)), "
            "which steps all others by AdamW"
        )
    pieces = muon.pieces(group["split"], tuple(p.shape), name, index, what)
    base = layout.layout_of(MOMENTUM, group, p, name, index, _places(p, what))
    same = {f.name: getattr(base, f.name) for f in fields(Layout)}
    row_moments = group["normuon_beta2"] is not None
    made: dict[str, Any] = {**same, "pieces": pieces, "row_moments": row_moments}
    if base.home:
        return MuonLayout(**made, spread=base.home.boxes)
    return MuonLayout(**made, spread=sharding.boxes(p))


def _places(p: Any, what: str) -> Iterator[sharding.Home | None]:
    """Where state may lie: the home of whole matrices if columns of a batch are sharded, or if
    codes cannot be cut where rows are.

    Raises:
        ValueError: columns are sharded, and rows as well.
    """
    homes = (home for home in sharding.homes(p) if all(dim == 0 for dim, _ in home.part.cuts))
    if all(dim != 2 for dim, _ in sharding.part(p, what).cuts):
        yield None
        yield from itertools.islice(homes, 1)
        return
    home = next(homes, None)
    if home is None:
        raise ValueError(
            f"{what} of shape {tuple(p.shape)} is sharded by {tuple(p.placements)} over "
            f"{tuple(p.device_mesh.shape)}; Muon takes dimension 2 alone or with dimension 0, or "
            "dimensions 0 and 1: shard its rows in place of its columns, or use AdamW for it"
        )
    yield home
