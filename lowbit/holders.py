"""What the holders of a flattened parameter's shards agree on in a step: sums and maxima of what they share, and who steps at all.

Every original parameter that lies on several ranks has places for its shared numbers in a vector that is as long on all ranks, whatever has a
gradient or is empty here; the vectors of a phase are reduced, and what is here takes its numbers from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import layout, ops, shard
from lowbit.batch import Batch

WORDS, TOTALS = 18, 2  # of an exact sum, and of them in a round: csrc/core


class _Region:
    """Consecutive numbers of a parameter in one tensor of the workspace: all of them are shared, or those of the rows that are cut."""

    def __init__(self, scratch: int, unit: int, rows: str = "") -> None:
        """
        Args:
            unit: numbers of each row, or in all.
            rows: "" where all are shared, "all" where the workspace has every row here, "cut" where it has those that are cut.
        """
        self.scratch, self.unit, self.rows = scratch, unit, rows


def _regions(lay: layout.Layout, phase: int, cut_here: bool) -> list[_Region]:
    """What a phase measures of a parameter, as csrc/ops_scratch.cpp lays it out."""
    part = lay.part
    rule = ops.rule(lay.rule)
    if phase < lay.rounds:
        made = [_Region(0, TOTALS * WORDS)]
        if rule["grids"][phase] >= 0:
            shape = part.shape
            made.append(_Region(1, math.prod(shape[1:-1]) * WORDS, "all"))
            cols = math.prod(shape[1:-2]) * (shape[-1] + 1) * WORDS
            made.append(_Region(2, cols, "" if len(shape) == 2 else "all"))
        return made
    made = []
    for slot in lay.slots:
        if slot.scale == "block":
            numbers = 2 * -(-part.global_cols // slot.block)
            made.append(_Region(5, numbers, "cut" if cut_here else "elsewhere"))
        if slot.scale in ("row", "rank1"):
            made.append(_Region(3, 1, "all"))
        if slot.scale == "tensor":
            made.append(_Region(3, 1))
        if slot.scale in ("column", "rank1"):
            made.append(_Region(4, part.global_cols))
    return made


class Holders:
    """The pieces of an optimizer, in the order that all ranks have them in."""

    def __init__(self, pieces: Sequence[tuple[shard.Piece, layout.Layout]]) -> None:
        self.pieces = [(p, lay) for p, lay in pieces if len(p.holders) > 1 or len(p.holders) < p.flat.ranks]  # fmt: skip
        self._stepping: set[shard.Piece] = set()
        self._stepped: set[shard.Piece] = set()
        # Places of a piece's numbers, by (operation, phase): its first one.
        self.begins: list[dict[shard.Piece, int]] = []
        self.sizes: list[dict[tuple[Any, str], int]] = []
        self.flags = [p for p, _ in self.pieces if len(p.holders) < p.flat.ranks]
        self.devices = {p.flat.group: p.owner.device for p, _ in self.pieces}
        last = max((self._phases(p, lay) for p, lay in self.pieces), default=0)
        self.phases = max(last, 1 if self.flags else 0)
        for phase in range(self.phases):
            begins: dict[shard.Piece, int] = {}
            sizes: dict[tuple[Any, str], int] = {}
            for p, lay in self.pieces:
                if len(p.holders) > 1 and phase < self._phases(p, lay):
                    key = (p.flat.group, "sum" if phase < lay.rounds else "max")
                    begins[p] = sizes.get(key, 0)
                    sizes[key] = begins[p] + sum(self._shared(p, r) for r in _regions(lay, phase, True))  # fmt: skip
            for p in self.flags if phase == 0 else ():
                key = (p.flat.group, "max")
                sizes[key] = sizes.get(key, 0) + 1
            self.begins.append(begins)
            self.sizes.append(sizes)
        self._plans: dict[Any, Any] = {}

    @staticmethod
    def _phases(p: shard.Piece, lay: layout.Layout) -> int:
        """Those in which something is measured, by any holder of it."""
        if len(p.holders) < 2:
            return 0
        blocks = bool(p.cut_rows) and any(slot.scale == "block" for slot in lay.slots)
        return lay.rounds + (blocks or any(slot.measured for slot in lay.slots))

    @staticmethod
    def _shared(p: shard.Piece, region: _Region) -> int:
        return region.unit * (len(p.cut_rows) if region.rows else 1)

    # A step

    def start(self) -> None:
        """Forgets what a step that raised has left behind."""
        self._stepping, self._stepped = set(), set()

    def steps(self, p: shard.Piece) -> None:
        """Says that a piece has a gradient here."""
        self._stepping.add(p)

    def begin(self, phase: int) -> Shared | None:
        if phase >= self.phases:
            return None
        if phase == 0:
            self._here, self._stepping = self._stepping, set()
        return Shared(self, phase)

    def stepped_elsewhere(self) -> list[shard.Piece]:
        """The pieces that others stepped and that nothing is of here."""
        made = [p for p in self.flags if p in self._stepped and not p.value.numel()]
        self._stepped = set()
        return made

    def places(self, batch: Batch, phase: int) -> list[tuple[Any, str, int, Tensor, Tensor]]:
        """For each tensor of a batch's workspace: (group, operation, tensor, places in it, places in the shared vector)."""
        key = (phase, *map(id, batch.pieces))
        kept = self._plans.get(key)
        if kept is None:
            if len(self._plans) > 64:  # such as for gradients that come and go
                self._plans.clear()
            # with the pieces, so that ids are not given again
            kept = self._plans[key] = (list(batch.pieces), self._places(batch, phase))
        return kept[1]

    def _places(self, batch: Batch, phase: int) -> list[tuple[Any, str, int, Tensor, Tensor]]:
        made: dict[tuple[Any, str, int], tuple[list[Tensor], list[Tensor]]] = {}
        at = [0] * 7
        device = batch.params[0].device
        for p, (lay, stream) in zip(batch.pieces, batch.rows, strict=True):
            plan = layout.plan_tensor([lay.plan_row(int(stream))])
            sizes = ops.scratch_sizes(lay.rule, plan)
            if p in self.begins[phase]:
                shared = self.begins[phase][p]
                here = list(at)
                here[0] += phase * TOTALS * WORDS
                rows = p.cut_rows
                mine = range(*p.rows[p.flat.rank])
                for region in _regions(lay, phase, lay.part.cut == shard.CUT_ENDS):
                    unit = torch.arange(region.unit)
                    pairs = []
                    if not region.rows:
                        pairs, length = [(0, 0)], 1
                    elif region.rows == "all":
                        pairs, length = [(r - mine.start, rows.index(r)) for r in rows if r in mine], len(mine)  # fmt: skip
                    elif region.rows == "cut":
                        cut = [r for r in rows if r in mine]
                        pairs, length = [(i, rows.index(r)) for i, r in enumerate(cut)], len(cut)
                    else:
                        length = 0
                    operation = "sum" if phase < lay.rounds else "max"
                    local, there = made.setdefault(
                        (p.flat.group, operation, region.scratch), ([], [])
                    )
                    for i, k in pairs:
                        local.append(here[region.scratch] + i * region.unit + unit)
                        there.append(shared + k * region.unit + unit)
                    here[region.scratch] += length * region.unit
                    shared += self._shared(p, region)
            at = [a + size for a, size in zip(at, sizes, strict=True)]
        return [
            (group, operation, which, torch.cat(local).to(device), torch.cat(there).to(device))
            for (group, operation, which), (local, there) in made.items()
            if local
        ]


class Shared:
    """The vectors of one phase."""

    def __init__(self, holders: Holders, phase: int) -> None:
        self.holders, self.phase = holders, phase
        self.put_in: list[tuple[Any, list[Tensor]]] = []
        self.vectors: dict[tuple[Any, str], Tensor] = {
            key: torch.zeros(
                size,
                dtype=torch.int64 if key[1] == "sum" else torch.int32,
                device=holders.devices[key[0]],  # where its process group reduces
            )
            for key, size in holders.sizes[phase].items()
        }
        for vector, pieces in self._flags():
            here = torch.tensor(
                [p in holders._here for p in pieces], dtype=vector.dtype, device=vector.device
            )
            vector[-len(pieces) :] = here.to(vector.device)

    def _flags(self) -> list[tuple[Tensor, list[shard.Piece]]]:
        """The vectors that say whether pieces are stepped, behind all else, and which."""
        pieces: dict[tuple[Any, str], list[shard.Piece]] = {}
        for p in self.holders.flags if self.phase == 0 else ():
            pieces.setdefault((p.flat.group, "max"), []).append(p)
        return [(self.vectors[key], of) for key, of in pieces.items()]

    def put(self, batch: Batch, scratch: list[Tensor]) -> None:
        places = self.holders.places(batch, self.phase)
        for group, operation, which, local, there in places:
            vector = self.vectors[group, operation]
            vector[there] = scratch[which][local].to(vector.device)
        self.put_in.append((places, scratch))

    def wanted(self) -> list[tuple[Tensor, Any, str]]:
        return [(vector, group, operation) for (group, operation), vector in self.vectors.items()]

    def get(self) -> None:
        for places, scratch in self.put_in:
            for group, operation, which, local, there in places:
                taken = self.vectors[group, operation][there]
                scratch[which][local] = taken.to(scratch[which].device)
        for vector, pieces in self._flags():
            stepped = vector[-len(pieces) :].tolist()
            self.holders._stepped |= {p for p, yes in zip(pieces, stepped, strict=True) if yes}
