"""Where the part of a DTensor lies in the whole, and tensors placed as another is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.shard.part import Part
from lowbit.shard.piece import Piece, is_flat
from lowbit.shard.tensor import is_dtensor


def part(p: Any, what: str) -> Part:
    """The local part of a parameter. `what` names it in errors.

    Raises:
        ValueError: the placement is one that state cannot follow yet, with the placement and what to do.
    """
    shape = tuple(p.shape)
    if isinstance(p, Piece):
        return p.part
    if is_flat(p):
        raise ValueError(
            f"{what} is a flat shard of FSDP1 (FullyShardedDataParallel), which hides the shapes that state is laid out by: call "
            "lowbit.fsdp1.bind(model, opt) before the first step (with Accelerate, between prepare(model) and prepare(opt))"
        )
    if not is_dtensor(p):
        return Part(shape, shape, (0,) * len(shape))
    for placement in p.placements:
        dim = getattr(placement, "dim", None)
        if placement.is_partial():
            raise ValueError(
                f"{what} has the placement {placement}; a parameter must be sharded or replicated"
            )
        if dim is not None and dim > 1:
            raise ValueError(
                f"{what} is sharded on dimension {dim}; state follows dimensions 0 and 1"
            )
    local_shape, offset, begins = list(shape), [0] * len(shape), ()
    for dim in {placement.dim for placement in p.placements if hasattr(placement, "dim")}:
        (offset[dim], local_shape[dim]), starts = _held(p, dim, what)
        if dim == 1:
            inner = math.prod(shape[2:])
            begins = tuple(start * inner for start in starts)
    if p._local_tensor.shape != torch.Size(local_shape) and not p.is_meta:
        raise ValueError(
            f"{what} has {tuple(p._local_tensor.shape)} here, and {tuple(local_shape)} by its placements {p.placements}"
        )
    cuts = tuple(
        (placement.dim, p.device_mesh.get_group(i))
        for i, placement in enumerate(p.placements)
        if hasattr(placement, "dim") and p.device_mesh.size(i) > 1
    )
    return Part(shape, tuple(local_shape), tuple(offset), cuts, begins=begins)


Runs = list[tuple[int, int]]  # of indices, [begin, end)


def _held(p: Tensor, dim: int, what: str) -> tuple[tuple[int, int], tuple[int, ...]]:
    """What is here of a DTensor's dimension, (offset, length), and where the other parts of it begin, but for 0."""
    assert is_dtensor(p)
    mesh, mine = p.device_mesh, [(0, p.shape[dim])]
    everyone: list[Runs] = [mine]
    for i, placement in enumerate(p.placements):
        if getattr(placement, "dim", None) == dim:
            several = [_shards(runs, placement, mesh.size(i)) for runs in everyone]
            mine = several[everyone.index(mine)][mesh.get_local_rank(i)]
            everyone = [runs for shards in several for runs in shards]
    if any(len(runs) > 1 for runs in everyone):
        raise ValueError(
            f"{what} has the placements {p.placements} over {tuple(mesh.shape)}, by which a part is several runs of dimension {dim}; "
            "FSDP over tensor parallelism makes such placements only in pairs that give one run"
        )
    starts = {begin for runs in everyone for begin, end in runs if begin > 0}
    begin, end = mine[0] if mine else (p.shape[dim], p.shape[dim])
    return (begin, end - begin), tuple(sorted(starts))


def _shards(runs: Runs, placement: Any, count: int) -> list[Runs]:
    """The parts of one mesh dimension: of _StridedShard each takes one of every piece."""
    pieces = _chunks(runs, getattr(placement, "split_factor", 1))
    several = [_chunks(piece, count) for piece in pieces]
    return [_joined([run for parts in several for run in parts[i]]) for i in range(count)]


def _chunks(runs: Runs, count: int) -> list[Runs]:
    """torch.chunk of a list of runs, with empty parts at the end."""
    size = -(-sum(end - begin for begin, end in runs) // count)
    made: list[Runs] = [[] for _ in range(count)]
    at = 0
    for begin, end in runs:
        while begin < end:
            take = min(end - begin, size - at % size)
            made[at // size].append((begin, begin + take))
            begin, at = begin + take, at + take
    return made


def _joined(runs: Runs) -> Runs:
    made: Runs = []
    for begin, end in runs:
        if made and made[-1][1] == begin:
            made[-1] = (made[-1][0], end)
        else:
            made.append((begin, end))
    return made


def like(
    p: Tensor, value: Tensor, shape: Sequence[int], dims: Sequence[int] | None = None
) -> Tensor:
    """`value`, the local part of a state tensor of global `shape`, placed as p is: plain beside a plain parameter, else a DTensor.

    Args:
        dims: the dimension of p that each of the tensor's own follows; the same ones by default. Over a mesh dimension that shards another one
            the tensor is replicated.
    """
    if not is_dtensor(p):
        return value
    from torch.distributed.tensor import DTensor

    follows = range(len(shape)) if dims is None else dims
    return DTensor.from_local(
        value,
        p.device_mesh,
        _placements(p, follows),
        run_check=False,
        shape=torch.Size(shape),
        stride=strides(shape),
    )


def _placements(p: Tensor, dims: Sequence[int]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Any] = []
    for placement in p.placements:  # type: ignore[attr-defined]
        dim = getattr(placement, "dim", None)
        if dim is None:
            placements.append(placement)
        elif dim not in dims:
            placements.append(Replicate())
        elif hasattr(placement, "split_factor"):
            at = list(dims).index(dim)
            placements.append(type(placement)(at, split_factor=placement.split_factor))
        else:
            placements.append(Shard(list(dims).index(dim)))
    return placements


def take(
    value: Tensor,
    p: Tensor,
    shape: Sequence[int],
    local: Sequence[int],
    offset: Sequence[int],
    dims: Sequence[int],
    what: str,
) -> Tensor:
    """The part here of a loaded state tensor of global `shape`: `value` may be placed as p is, placed otherwise, whole, or that part.

    Args:
        local, offset: of the part here. dims: as in `like`.
    """
    if is_dtensor(value):
        wanted = _placements(p, dims) if is_dtensor(p) else None
        if is_dtensor(p) and value.device_mesh == p.device_mesh:
            strided = any(hasattr(x, "split_factor") for x in (*value.placements, *p.placements))
            if list(value.placements) == wanted:
                return value.to_local()
            if not strided:  # which torch does not redistribute everywhere
                return value.redistribute(p.device_mesh, wanted).to_local()
        value = value.full_tensor()
    if tuple(value.shape) == tuple(local):
        return value
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"{what} has the shape {tuple(value.shape)}, which is neither the whole {tuple(shape)} nor this rank's part {tuple(local)}"
        )
    for dim, (start, length) in enumerate(zip(offset, local, strict=True)):
        value = value.narrow(dim, start, length)
    return value


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    stride: list[int] = []
    run = 1
    for size in reversed(shape):
        stride.insert(0, run)
        run *= size
    return tuple(stride)
