"""The part of a matrix that each rank holds, where a mesh cuts its rows, its columns or both."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowbit.sharding.part import Part
from lowbit.sharding.placement import parts_of_dimension, row_range
from lowbit.sharding.tensor import is_dtensor

Range = tuple[int, int]  # [begin, end)

# Process groups over several mesh dimensions, which a mesh does not make itself: global ranks -> group.
_made: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Boxes:
    """Of a matrix, or of each matrix of a batch: the process group of all ranks that hold it or replicas of it."""

    group: Any
    of: tuple[tuple[Range, Range], ...]  # the rows and columns of each rank of the group
    replicas: tuple[int, ...]  # of each rank; the ranks of one replica hold the matrix once

    def numel(self, rank: int) -> int:
        (top, bottom), (left, right) = self.of[rank]
        return (bottom - top) * (right - left)

    def of_one_replica(self, a: int, b: int) -> bool:
        return self.replicas[a] == self.replicas[b]


@dataclass(frozen=True)
class ByColumns:
    """A batch [n, rows, columns] whose columns one mesh dimension shards. The state of whole matrices is spread over its ranks."""

    own: Part  # of the parameter
    state: Part  # the matrices whose state is here
    boxes: Boxes
    owners: tuple[int, ...]  # the rank that has each matrix's state


def by_columns(p: Any, what: str) -> ByColumns | None:
    """How such a batch lies; None of other parameters.

    Raises:
        ValueError: other mesh dimensions shard it too.
    """
    if not is_dtensor(p) or p.ndim != 3:
        return None
    mesh, cuts = p.device_mesh, [getattr(placement, "dim", None) for placement in p.placements]
    if 2 not in cuts:
        return None
    shape = tuple(p.shape)
    if any(cut is not None and mesh.size(i) > 1 for i, cut in enumerate(cuts) if i != cuts.index(2)):  # fmt: skip
        raise ValueError(
            f"{what} of shape {shape} is sharded on dimension 2 and by other mesh dimensions too, by {tuple(p.placements)} over {tuple(mesh.shape)}; Muon takes "
            "dimension 2 alone, or dimensions 0 and 1: shard its rows in place of its columns, or use AdamW for it"
        )
    i = cuts.index(2)
    group, here, ranks = mesh.get_group(i), mesh.get_local_rank(i), mesh.size(i)
    columns = _ranges(p, 2)
    matrices = [row_range(shape[0], rank, ranks) for rank in range(ranks)]
    owners = tuple(rank for rank, (begin, end) in enumerate(matrices) for _ in range(begin, end))
    (left, right), (first, last) = columns[here], matrices[here]
    own = Part(shape, (shape[0], shape[1], right - left), (0, 0, left))
    state = Part(
        shape, (last - first, *shape[1:]), (first, 0, 0),
        ((0, group),) if ranks > 1 else (), (2, -1, -1),
    )  # fmt: skip
    spread = Boxes(group, tuple(((0, shape[1]), of) for of in columns), (0,) * ranks)
    return ByColumns(own, state, spread, owners)


def boxes(p: Any) -> Boxes | None:
    """The boxes of a parameter's last two dimensions; None if no other rank has parts of the matrices here.

    Mesh dimensions that shard dimension 0 of a batch [n, rows, columns] give every rank matrices of its own.
    It is a collective of the ranks that hold the parameter's matrices, if those span several mesh dimensions.
    """
    if not is_dtensor(p):
        return None
    mesh, dims = p.device_mesh, (p.ndim - 2, p.ndim - 1)
    cuts = [getattr(placement, "dim", None) for placement in p.placements]
    large = [i for i in range(mesh.ndim) if mesh.size(i) > 1]
    if not any(cuts[i] in dims for i in large):
        return None
    over = [i for i in large if cuts[i] is None or cuts[i] in dims]
    here = mesh.get_coordinate()
    assert here is not None
    coordinates = list(itertools.product(*(range(mesh.size(i)) if i in over else (here[i],) for i in range(mesh.ndim))))  # fmt: skip
    ranks = [int(mesh.mesh[coordinate]) for coordinate in coordinates]
    group = mesh.get_group(over[0]) if len(over) == 1 else _group(ranks)
    made: dict[int, tuple[int, tuple[Range, Range]]] = {}
    ranges = [_ranges(p, dim) for dim in dims]
    for rank, coordinate in zip(ranks, coordinates, strict=True):
        rows, cols = (
            of_dim[_index(p, dim, cuts, coordinate)]
            for dim, of_dim in zip(dims, ranges, strict=True)
        )
        replica = 0
        for i in over:
            if cuts[i] is None:
                replica = replica * mesh.size(i) + coordinate[i]
        made[_rank_in(group, rank)] = (replica, (rows, cols))
    ordered = [made[rank] for rank in range(len(ranks))]
    return Boxes(group, tuple(box for _, box in ordered), tuple(replica for replica, _ in ordered))


def _ranges(p: Tensor, dim: int) -> list[Range]:
    """Every part of a dimension in mesh order: one run each, as `part` has checked."""
    length = p.shape[dim]
    return [runs[0] if runs else (length, length) for runs in parts_of_dimension(p, dim, length)[0]]


def _index(p: Any, dim: int, cuts: Sequence[int | None], coordinate: Sequence[int]) -> int:
    """The number of the part of a dimension that the rank of this mesh coordinate has."""
    index = 0
    for i, cut in enumerate(cuts):
        if cut == dim:
            index = index * p.device_mesh.size(i) + coordinate[i]
    return index


def _rank_in(group: Any, rank: int) -> int:
    import torch.distributed as dist

    return dist.get_group_rank(group, rank)


def _group(ranks: Sequence[int]) -> Any:
    """The process group of these global ranks, which all call this; the default one if they are all."""
    import torch.distributed as dist

    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    known = tuple(sorted(ranks))
    group = _made.get(known)
    if group is not None:
        try:
            dist.get_group_rank(group, known[0])
        except (ValueError, RuntimeError):  # destroyed with the default process group
            group = None
    if group is None:
        group = _made[known] = dist.new_group(list(known), use_local_synchronization=True)
    return group
