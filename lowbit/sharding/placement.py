"""The position of a DTensor's local part in the whole tensor, and tensors placed like another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.sharding.flat_shard import FlatShard, is_flat
from lowbit.sharding.part import Part
from lowbit.sharding.tensor import check_on_mesh, is_dtensor


def part(p: Any, what: str) -> Part:
    """The local part of a parameter: plain, DTensor or flat shard.

    Args:
        p: the parameter.
        what: its name in errors.

    Raises:
        ValueError: state cannot follow the placement;
            the message names the placement and what to do.
    """
    shape = tuple(p.shape)
    if isinstance(p, FlatShard):
        return p.part
    if is_flat(p):
        raise ValueError(
            f"{what} is a flat shard of FSDP1 (FullyShardedDataParallel), which hides the shape "
            "that the layout of state needs: call lowbit.fsdp1.bind(model, opt) before the first "
            "step (with Accelerate, between prepare(model) and prepare(opt))"
        )
    if not is_dtensor(p):
        return Part(shape, shape, (0,) * len(shape))
    check_on_mesh(p, what)
    for placement in p.placements:
        if placement.is_partial():
            raise ValueError(
                f"{what} has the placement {placement}; a parameter must be sharded or replicated"
            )
    local_shape, offset, begins = list(shape), [0] * len(shape), ()
    for dim in {placement.dim for placement in p.placements if hasattr(placement, "dim")}:
        (offset[dim], local_shape[dim]), starts = _held(p, dim, what)
        if dim == 1:
            inner = math.prod(shape[2:])
            begins = tuple(start * inner for start in starts)
    if p._local_tensor.shape != torch.Size(local_shape) and not p.is_meta:
        raise ValueError(
            f"{what} has the local shape {tuple(p._local_tensor.shape)}, but its placements "
            f"{p.placements} give {tuple(local_shape)}"
        )
    cuts = tuple(
        (placement.dim, p.device_mesh.get_group(i))
        for i, placement in enumerate(p.placements)
        if hasattr(placement, "dim") and p.device_mesh.size(i) > 1
    )
    return Part(shape, tuple(local_shape), tuple(offset), cuts, begins=begins)


Runs = list[tuple[int, int]]  # of indices, [begin, end)


def parts_of_dimension(p: Tensor, dim: int, length: int) -> tuple[list[Runs], int]:
    """Every rank's part of a dimension of this length, in mesh order,
    and the index of this rank's part.

    The dimension is split like dimension `dim` of the DTensor p.
    """
    assert is_dtensor(p)
    mesh, here = p.device_mesh, 0
    everyone: list[Runs] = [[(0, length)]]
    for i, placement in enumerate(p.placements):
        if getattr(placement, "dim", None) == dim:
            here = here * mesh.size(i) + mesh.get_local_rank(i)
            everyone = [
                part for runs in everyone for part in _shards(runs, placement, mesh.size(i))
            ]
    return everyone, here


def follows_columns(p: Any, width: Callable[[int], int]) -> bool:
    """Whether placements like p's split the columns of a state tensor where they split p's columns.

    A state tensor has the columns of a row in one dimension: `width(n)` of its own for the first n
    of p. Placements split that dimension into equal parts. These match the parts of p's dimension 1
    only if all but the last of those are equal too. The answer is the same on every rank.
    """
    if not is_dtensor(p) or p.ndim < 2:
        return True
    inner = math.prod(p.shape[2:])
    wanted = [
        [(width(begin * inner), width(end * inner)) for begin, end in runs]
        for runs in parts_of_dimension(p, 1, p.shape[1])[0]
    ]
    return parts_of_dimension(p, 1, width(p.shape[1] * inner))[0] == wanted


def row_range(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows [begin, end) of a rank where `fully_shard` splits so many rows over `ranks`."""
    size = -(-rows // ranks)
    begin = min(rank * size, rows)
    return begin, min(begin + size, rows)


def row_shards(p: Any, what: str) -> int:
    """The number of parts into which placements split dimension 0: 1 for a plain tensor.

    Raises:
        ValueError: they split another dimension too, or instead.
    """
    if not is_dtensor(p):
        return 1
    count = 1
    for i, placement in enumerate(p.placements):
        dim, size = getattr(placement, "dim", None), p.device_mesh.size(i)
        if dim and size > 1:
            raise ValueError(
                f"{what} is sharded on dimension {dim}; pass the model before it is sharded, or "
                "the number of ranks that split dimension 0"
            )
        count *= 1 if dim is None else size
    return count


def _held(p: Tensor, dim: int, what: str) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The local part of a DTensor's dimension, (offset, length), and where the other parts begin,
    without 0.
    """
    assert is_dtensor(p)
    everyone, here = parts_of_dimension(p, dim, p.shape[dim])
    mine, mesh = everyone[here], p.device_mesh
    if any(len(runs) > 1 for runs in everyone):
        raise ValueError(
            f"{what} has the placements {p.placements} over {tuple(mesh.shape)}, which give one "
            f"rank several runs of dimension {dim}; state needs one run, which FSDP over tensor "
            "parallelism gives by a pair of such placements"
        )
    starts = {begin for runs in everyone for begin, end in runs if begin > 0}
    begin, end = mine[0] if mine else (p.shape[dim], p.shape[dim])
    return (begin, end - begin), tuple(sorted(starts))


def _shards(runs: Runs, placement: Any, count: int) -> list[Runs]:
    """The parts of one mesh dimension: of _StridedShard each takes one of every chunk."""
    chunks = _chunks(runs, getattr(placement, "split_factor", 1))
    several = [_chunks(chunk, count) for chunk in chunks]
    return [_joined([run for parts in several for run in parts[i]]) for i in range(count)]


def _chunks(runs: Runs, count: int) -> list[Runs]:
    """torch.chunk of a list of runs, padded with empty parts."""
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
    """The local part of a state tensor, placed like p: unchanged if p is a plain tensor,
    else as a DTensor.

    Args:
        p: the parameter.
        value: the local part.
        shape: the global shape of the state tensor.
        dims: the dimension of p that each of its own follows; the same ones by default. The tensor
            is replicated over a mesh dimension that shards any other dimension.
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
    """The local part of a loaded state tensor.

    Args:
        value: the loaded tensor: placed like p, placed otherwise, whole, or already the local part.
        p: the parameter.
        shape: the global shape of the state tensor.
        local, offset: the shape and position of the local part.
        dims: as in `like`.
        what: the tensor's name in errors.

    Raises:
        ValueError: the shape of `value` is neither `shape` nor `local`.
    """
    fitting = {tuple(shape)} if is_dtensor(value) else {tuple(shape), tuple(local)}
    if tuple(value.shape) not in fitting:
        raise ValueError(
            f"{what} has the shape {tuple(value.shape)}, which is neither the whole {tuple(shape)} "
            f"nor this rank's part {tuple(local)}"
        )
    if is_dtensor(value):
        wanted = _placements(p, dims) if is_dtensor(p) else None
        if is_dtensor(p) and value.device_mesh == p.device_mesh:
            strided = any(hasattr(x, "split_factor") for x in (*value.placements, *p.placements))
            if list(value.placements) == wanted:
                return value.to_local()
            if not strided:  # torch does not redistribute every strided placement
                return value.redistribute(p.device_mesh, wanted).to_local()
        value = value.full_tensor()
    if tuple(value.shape) == tuple(local):
        return value
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
