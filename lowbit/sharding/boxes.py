"""The part of a matrix that each rank holds, where a mesh cuts its rows, its columns or both."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.sharding.collective import device_of, host_device, reduce_over
from lowbit.sharding.placement import parts_of_dimension
from lowbit.sharding.tensor import is_dtensor

Range = tuple[int, int]  # [begin, end)

# Process groups over several mesh dimensions,
# which a mesh does not make itself: global ranks -> group.
_made: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Boxes:
    """Of a matrix, or of each matrix of a batch: the process group of all ranks that hold it or
    replicas of it.
    """

    group: Any
    of: tuple[tuple[Range, Range], ...]  # the rows and columns of each rank of the group
    replicas: tuple[int, ...]  # of each rank; the ranks of one replica hold the matrix once

    def numel(self, rank: int) -> int:
        (top, bottom), (left, right) = self.of[rank]
        return (bottom - top) * (right - left)

    def of_one_replica(self, a: int, b: int) -> bool:
        return self.replicas[a] == self.replicas[b]


def boxes(p: Any) -> Boxes | None:
    """The boxes of a parameter's last two dimensions;
    None if no other rank has parts of the matrices here.

    Mesh dimensions that shard dimension 0 of a batch [n, rows, columns] give every rank matrices of
    its own. It is a collective of the ranks that hold the parameter's matrices, if those span
    several mesh dimensions.
    """
    if not is_dtensor(p):
        return None
    mesh, dims = p.device_mesh, (p.ndim - 2, p.ndim - 1)
    cuts = [dimension_of(placement) for placement in p.placements]
    large = [i for i in range(mesh.ndim) if mesh.size(i) > 1]
    if not any(cuts[i] in dims for i in large):
        return None
    over = [i for i in large if cuts[i] is None or cuts[i] in dims]
    here = mesh.get_coordinate()
    assert here is not None
    coordinates = list(
        itertools.product(
            *(range(mesh.size(i)) if i in over else (here[i],) for i in range(mesh.ndim))
        )
    )
    held = mesh.mesh[tuple(slice(None) if i in over else at for i, at in enumerate(here))]
    ranks = held.flatten().tolist()  # in the order of the coordinates
    of_dimensions = [mesh.get_group(i) for i in over]
    group = of_dimensions[0] if len(over) == 1 else _group(ranks, of_dimensions)
    made: dict[int, tuple[int, tuple[Range, Range]]] = {}
    of_dims = [ranges(p, dim) for dim in dims]
    for rank, coordinate in zip(ranks, coordinates, strict=True):
        rows, cols = (
            of_dim[index_on(p, dim, cuts, coordinate)]
            for dim, of_dim in zip(dims, of_dims, strict=True)
        )
        replica = 0
        for i in over:
            if cuts[i] is None:
                replica = replica * mesh.size(i) + coordinate[i]
        made[rank_in(group, rank)] = (replica, (rows, cols))
    ordered = [made[rank] for rank in range(len(ranks))]
    return Boxes(group, tuple(box for _, box in ordered), tuple(replica for replica, _ in ordered))


def dimension_of(placement: Any) -> Any:
    """The dimension that a placement cuts, or None."""
    return getattr(placement, "dim", None)


def ranges(p: Tensor, dim: int) -> list[Range]:
    """Every part of a dimension in mesh order: one run each, as `part` has checked."""
    length = p.shape[dim]
    return [runs[0] if runs else (length, length) for runs in parts_of_dimension(p, dim, length)[0]]


def index_on(p: Any, dim: int, cuts: Sequence[int | None], coordinate: Sequence[int]) -> int:
    """The number of the part of a dimension that the rank of this mesh coordinate has."""
    index = 0
    for i, cut in enumerate(cuts):
        if cut == dim:
            index = index * p.device_mesh.size(i) + coordinate[i]
    return index


def rank_in(group: Any, rank: int) -> int:
    import torch.distributed as dist

    return dist.get_group_rank(group, rank)


def _group(ranks: Sequence[int], of_dimensions: Sequence[Any]) -> Any:
    """The process group of these global ranks, which all call this;
    the default one if they are all.

    Args:
        of_dimensions: the groups over each mesh dimension, which together join the ranks.
    """
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
        _even_out(of_dimensions)
        group = _made[known] = dist.new_group(list(known), use_local_synchronization=True)
    return group


def _even_out(of_dimensions: Sequence[Any]) -> None:
    """Gives all ranks that these groups join the same number of process groups, by groups of one
    rank. torch names a group that only its ranks make after that number, and ranks with different
    names would wait for each other.
    """
    import torch.distributed as dist

    count = len(dist.distributed_c10d._world.pg_names)
    most = torch.tensor([count], dtype=torch.int64, device="cpu")
    for group in of_dimensions:
        most = most.to(host_device([group], device_of(group)))
        reduce_over([(most, group, "max")])
    for _ in range(int(most) - count):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
