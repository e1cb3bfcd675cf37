"""The home of state that cannot lie where its parameter lies: the same mesh,
cut along another dimension.

Codes lie in rows of all elements of an index of dimension 0, so no placement of theirs follows
dimension 2. Their home has dimension 0 cut instead, or dimension 1, by the same ranks. In a
step the parameter's parts go there and come back, by one all-to-all each way over the ranks of the
mesh dimension that differs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.sharding.boxes import Boxes, dimension_of, index_on, ranges, rank_in
from lowbit.sharding.exchange import Matrices, Whole, from_owners, to_owners
from lowbit.sharding.part import Part
from lowbit.sharding.placement import part, row_range, strides
from lowbit.sharding.tensor import is_dtensor


@dataclass(frozen=True)
class Home:
    """Where the state of one parameter lies.

    Dimensions up to the one that the mesh cuts are the rows of matrices, that one and those after
    it their columns. The parameter's ranks have columns of the same matrices. At home, each has
    some of them whole.
    """

    placed: Any  # a DTensor without memory: state is placed like it
    own: Part  # of the parameter
    part: Part  # at home
    boxes: Boxes  # what the ranks of the differing mesh dimension have of each matrix
    owners: tuple[int, ...]  # the rank that has each matrix at home

    @property
    def group(self) -> Any:
        """The process group of the mesh dimension along which the two differ."""
        return self.boxes.group

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """Of a matrix."""
        (_, rows), _ = self.boxes.of[0]
        return rows, max(right for _, (_, right) in self.boxes.of)

    def matrices(self, here: Tensor) -> Matrices:
        """The local part of a tensor that lies like the parameter, which may have dimensions of its
        own after the parameter's.
        """
        n = math.prod(here.shape[len(self.own.local) :])  # values of each element
        (rows, cols), here = self.shape, here.contiguous()
        box = tuple((of_rows, (n * left, n * right)) for of_rows, (left, right) in self.boxes.of)
        boxes = self.boxes if n == 1 else replace(self.boxes, of=box)
        mine = self.own.local
        local = math.prod(mine) // max(1, rows * len(self.owners)) if math.prod(mine) else 0
        return Matrices(
            here.view(len(self.owners), rows, local * n), boxes, (rows, cols * n), self.owners
        )

    def whole(self, here: Tensor, arrived: Whole | None) -> Tensor:
        """The part of such a tensor that lies at home."""
        shape = (*self.part.local, *here.shape[len(self.own.local) :])
        return here.new_empty(shape) if arrived is None else arrived.matrices.view(shape)


class Sent(NamedTuple):
    """A tensor that goes home or returns."""

    home: Home
    here: Tensor  # the local part of it where the parameter lies


def to_homes(several: Sequence[Sent]) -> list[Tensor]:
    """What is at home of each tensor: a copy. One all-to-all for each process group,
    whose ranks all call this alike.
    """
    made: list[Tensor] = [one.here for one in several]
    for group, numbers in _by_group(several):
        parts = [several[i].home.matrices(several[i].here) for i in numbers]
        arrived = to_owners(group, parts)()
        for k, i in enumerate(numbers):
            made[i] = several[i].home.whole(several[i].here, arrived.get(k))
    return made


def from_homes(several: Sequence[Sent], at_home: Sequence[Tensor]) -> None:
    """Writes what is at home of each tensor to its parts where the parameter lies.
    Collectives as in `to_homes`.
    """
    for group, numbers in _by_group(several):
        parts = [several[i].home.matrices(several[i].here) for i in numbers]
        whole = {
            k: Whole(at_home[i].contiguous().view(count, *parts[k].shape), None)
            for k, i in enumerate(numbers)
            if (count := several[i].home.part.local[0])  # the matrices that it has
        }
        from_owners(group, parts, whole)()
        for k, i in enumerate(numbers):
            here = several[i].here
            if not here.is_contiguous():  # then a copy was sent
                here.copy_(parts[k].here.view(here.shape))


def returned(home: Home, values: Tensor) -> Tensor:
    """The local part, where the parameter lies, of values at home. A collective."""
    here = values.new_empty(home.own.local)
    from_homes([Sent(home, here)], [values])
    return here


def _by_group(several: Sequence[Sent]) -> Iterator[tuple[Any, list[int]]]:
    """The numbers of what each process group exchanges: one at a time,
    since NCCL may hang where groups overlap.
    """
    made: dict[Any, list[int]] = {}
    for i, one in enumerate(several):
        made.setdefault(one.home.group, []).append(i)
    yield from made.items()


def homes(p: Any) -> Iterator[Home]:
    """The homes that a parameter of three or more dimensions may have, the best first,
    the same on every rank.

    One mesh dimension moves: that which cuts a dimension beyond the second, or else that which cuts
    the second. It cuts dimension 0 instead if that has an index for each of the ranks that
    share it. Otherwise dimension 1, if it can be cut in equal parts, comes before dimension 0, of
    which some ranks then have nothing.
    """
    if not is_dtensor(p) or p.ndim < 3:
        return
    mesh, cuts = p.device_mesh, [dimension_of(placement) for placement in p.placements]
    large = [i for i, cut in enumerate(cuts) if cut is not None and mesh.size(i) > 1]
    moved = [i for i in large if cuts[i] > 1] or [i for i in large if cuts[i] == 1]
    if len(moved) != 1 or hasattr(p.placements[moved[0]], "split_factor"):
        return
    moving = moved[0]
    sharing = [
        math.prod(mesh.size(i) for i in large if cuts[i] == to or i == moving) for to in (0, 1)
    ]
    evenly = p.shape[1] and p.shape[1] % sharing[1] == 0 and cuts[moving] > 1
    order = [0] if not evenly else [0, 1] if p.shape[0] >= sharing[0] else [1, 0]
    for to in order:
        # Mesh dimensions that come later cut first, and this one cuts what they leave.
        later = math.prod(mesh.size(i) for i in large if cuts[i] == to and i > moving)
        if later == 1 or p.shape[to] % sharing[to] == 0:
            yield _home(p, moving, to, later)


def _home(p: Any, moving: int, to: int, later: int) -> Home:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, what = p.device_mesh, "a parameter"
    cuts, placements = [dimension_of(placement) for placement in p.placements], list(p.placements)
    dim, ranks = cuts[moving], mesh.size(moving)
    placements[moving] = Shard(to) if later == 1 else _StridedShard(to, split_factor=later)
    own = part(p, what)
    nothing = torch.empty(0, dtype=p.dtype, device="meta")
    placed = DTensor.from_local(
        nothing, mesh, placements, run_check=False, shape=p.shape, stride=strides(p.shape)
    )
    inner = math.prod(p.shape[dim + 1 :])
    of_dim = ranges(p, dim)
    here = mesh.get_coordinate()
    assert here is not None
    group = mesh.get_group(moving)
    all_ranks = mesh.mesh  # made anew by each call
    of: dict[int, tuple[int, int]] = {}  # by rank of the group
    number: dict[int, int] = {}  # the rank of each place on the mesh dimension
    for i in range(ranks):
        at = (*here[:moving], i, *here[moving + 1 :])
        rank = rank_in(group, int(all_ranks[at]))
        begin, end = of_dim[index_on(p, dim, cuts, at)]
        of[rank], number[i] = (begin * inner, end * inner), rank
    if to == 0:
        split, rows = 1, math.prod(own.local[1:dim])
        of_each = [row_range(own.local[0], i, ranks) for i in range(ranks)]
        owners = [number[i] for i, (begin, end) in enumerate(of_each) for _ in range(begin, end)]
    else:
        split, rows = ranks, math.prod(own.local[1:dim]) // ranks
        owners = [number[i] for _ in range(own.local[0]) for i in range(split)]
    boxes = Boxes(group, tuple(((0, rows), of[rank]) for rank in range(ranks)), (0,) * ranks)
    return Home(placed, own, part(placed, what), boxes, tuple(owners))
