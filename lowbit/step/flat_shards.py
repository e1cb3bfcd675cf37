"""What ranks agree on in a step about flat shards of one parameter: sums and maxima of what they
share, and who steps at all.

Every original parameter on several ranks has places for its shared numbers in a vector. The vector
has the same length on all ranks, whichever gradients exist and whichever shards are empty. Each
phase reduces its vectors, and every shard reads its numbers from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.state.layout import Layout
from lowbit.state.plan import plan_tensor
from lowbit.step.group import StepGroup


class _Place(NamedTuple):
    """Where the shared numbers of one tensor of the workspace lie,
    in it and in the vector that ranks reduce.
    """

    group: Any  # process group
    operation: str  # "sum" or "max"
    tensor: str  # its name
    local: Tensor  # indices in it
    shared: Tensor  # indices in the vector


def _regions(lay: Layout, phase: int) -> list[ops.Region]:
    """What a phase measures of a parameter that ranks share."""
    return ops.workspace_regions(lay.rule, plan_tensor([lay.plan_row(0)]), phase)


class FlatShardReducer:
    """The flat shards of an optimizer, in the same order on all ranks,
    and what they reduce in a step.
    """

    def __init__(self, flat_shards: Sequence[tuple[sharding.FlatShard, Layout]]) -> None:
        self.flat_shards = [
            (p, lay)
            for p, lay in flat_shards
            if len(p.holding_ranks) > 1 or len(p.holding_ranks) < p.flat.ranks
        ]
        self._stepping: set[sharding.FlatShard] = set()
        self._stepped: set[sharding.FlatShard] = set()
        # By phase: flat shard -> the first place of its numbers in the vector,
        # and the vectors' sizes.
        self.begins: list[dict[sharding.FlatShard, int]] = []
        self.sizes: list[dict[tuple[Any, str], int]] = []
        self.flags = [p for p, _ in self.flat_shards if len(p.holding_ranks) < p.flat.ranks]
        self.devices = {p.flat.group: p.owner.device for p, _ in self.flat_shards}
        last = max((self._phases(p, lay) for p, lay in self.flat_shards), default=0)
        self.phases = max(last, 1 if self.flags else 0)
        for phase in range(self.phases):
            begins: dict[sharding.FlatShard, int] = {}
            sizes: dict[tuple[Any, str], int] = {}
            for p, lay in self.flat_shards:
                if len(p.holding_ranks) > 1 and phase < self._phases(p, lay):
                    key = (p.flat.group, "sum" if phase < lay.rounds else "max")
                    begins[p] = sizes.get(key, 0)
                    sizes[key] = begins[p] + sum(self._shared(p, r) for r in _regions(lay, phase))
            for p in self.flags if phase == 0 else ():
                key = (p.flat.group, "max")
                sizes[key] = sizes.get(key, 0) + 1
            self.begins.append(begins)
            self.sizes.append(sizes)
        self._plans: dict[Any, Any] = {}

    @staticmethod
    def _phases(p: sharding.FlatShard, lay: Layout) -> int:
        """Those in which something is measured, by any rank that holds some of it."""
        if len(p.holding_ranks) < 2:
            return 0
        blocks = bool(p.cut_rows) and any(slot.scale == "block" for slot in lay.slots)
        return lay.rounds + (blocks or any(slot.cross_tile for slot in lay.slots))

    @staticmethod
    def _shared(p: sharding.FlatShard, region: ops.Region) -> int:
        return region.width * (1 if region.rows == "none" else len(p.cut_rows))

    # A step

    def start(self) -> None:
        """Clears what a step that raised has left."""
        self._stepping, self._stepped = set(), set()

    def steps(self, p: sharding.FlatShard) -> None:
        """Records that a flat shard has a gradient on this rank."""
        self._stepping.add(p)

    def begin(self, phase: int) -> Shared | None:
        if phase >= self.phases:
            return None
        if phase == 0:
            self._here, self._stepping = self._stepping, set()
        return Shared(self, phase)

    def stepped_elsewhere(self) -> list[sharding.FlatShard]:
        """The flat shards that other ranks stepped and that are empty on this rank."""
        made = [p for p in self.flags if p in self._stepped and not p.value.numel()]
        self._stepped = set()
        return made

    def places(self, step_group: StepGroup, phase: int) -> list[_Place]:
        """For each tensor of a step group's workspace where its shared numbers lie."""
        key = (phase, *map(id, step_group.flat_shards))
        kept = self._plans.get(key)
        if kept is None:
            if len(self._plans) > 64:  # gradients that come and go make new ones
                self._plans.clear()
            # with the flat shards, so that ids are not given again
            kept = self._plans[key] = (
                list(step_group.flat_shards),
                self._places(step_group, phase),
            )
        return kept[1]

    def _places(self, step_group: StepGroup, phase: int) -> list[_Place]:
        made: dict[tuple[Any, str, str], tuple[list[Tensor], list[Tensor]]] = {}
        # Where the parameter's numbers begin in each tensor.
        at = dict.fromkeys((info["name"] for info in ops.workspace_tensors()), 0)
        device = step_group.params[0].device
        for p, (lay, stream) in zip(step_group.flat_shards, step_group.rows, strict=True):
            sizes = ops.workspace_sizes(lay.rule, plan_tensor([lay.plan_row(int(stream))]))
            if p in self.begins[phase]:
                shared = self.begins[phase][p]
                operation = "sum" if phase < lay.rounds else "max"
                for region in _regions(lay, phase):
                    width = torch.arange(region.width, device="cpu")
                    key = (p.flat.group, operation, region.tensor)
                    local, there = made.setdefault(key, ([], []))
                    begin = at[region.tensor] + region.begin
                    for i, k in _shared_rows(p, region, lay):
                        local.append(begin + i * region.width + width)
                        there.append(shared + k * region.width + width)
                    shared += self._shared(p, region)
            at = {name: begin + sizes[name] for name, begin in at.items()}
        return [
            _Place(*key, torch.cat(local).to(device), torch.cat(there).to(device))
            for key, (local, there) in made.items()
            if local
        ]


def _shared_rows(p: sharding.FlatShard, region: ops.Region, lay: Layout) -> list[tuple[int, int]]:
    """The shared rows of a region on this rank: (number in the workspace, number among the rows
    that are cut).
    """
    if region.rows == "none":
        return [(0, 0)]
    rows, mine = p.cut_rows, range(*p.rows[p.flat.rank])
    cut = [row for row in rows if row in mine]
    if region.rows == "each":
        return [(row - mine.start, rows.index(row)) for row in cut]
    if lay.part.cut == sharding.CUT_ENDS:
        return [(i, rows.index(row)) for i, row in enumerate(cut)]
    return []  # cut on other ranks only


class Shared:
    """The shared vectors of one phase."""

    def __init__(self, reducer: FlatShardReducer, phase: int) -> None:
        self.reducer, self.phase = reducer, phase
        self.put_in: list[tuple[list[_Place], dict[str, Tensor]]] = []
        self.vectors: dict[tuple[Any, str], Tensor] = {
            key: torch.zeros(
                size,
                dtype=torch.int64 if key[1] == "sum" else torch.int32,
                device=reducer.devices[key[0]],  # where its process group reduces
            )
            for key, size in reducer.sizes[phase].items()
        }
        for vector, flat_shards in self._flags():
            here = torch.tensor(
                [p in reducer._here for p in flat_shards], dtype=vector.dtype, device=vector.device
            )
            vector[-len(flat_shards) :] = here.to(vector.device)

    def _flags(self) -> list[tuple[Tensor, list[sharding.FlatShard]]]:
        """The vectors whose last numbers tell whether flat shards step, and those shards."""
        flat_shards: dict[tuple[Any, str], list[sharding.FlatShard]] = {}
        for p in self.reducer.flags if self.phase == 0 else ():
            flat_shards.setdefault((p.flat.group, "max"), []).append(p)
        return [(self.vectors[key], of) for key, of in flat_shards.items()]

    def put(self, step_group: StepGroup, workspace: dict[str, Tensor]) -> None:
        places = self.reducer.places(step_group, self.phase)
        for place in places:
            vector = self.vectors[place.group, place.operation]
            vector[place.shared] = workspace[place.tensor][place.local].to(vector.device)
        self.put_in.append((places, workspace))

    def wanted(self) -> list[tuple[Tensor, Any, str]]:
        return [(vector, group, operation) for (group, operation), vector in self.vectors.items()]

    def get(self) -> None:
        for places, workspace in self.put_in:
            for place in places:
                taken = self.vectors[place.group, place.operation][place.shared]
                into = workspace[place.tensor]
                into[place.local] = taken.to(into.device)
        for vector, flat_shards in self._flags():
            stepped = vector[-len(flat_shards) :].tolist()
            self.reducer._stepped |= {p for p, yes in zip(flat_shards, stepped, strict=True) if yes}
