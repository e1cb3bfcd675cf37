"""What is here of a tensor, of any kind that it may be: plain, DTensor, or a piece of a flattened parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.shard.piece import Piece, flats, is_flat

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch built without distributed
    DTensor = ()  # type: ignore[assignment,misc]


def is_sharded(t: Any) -> bool:
    """Whether t is a DTensor (replicated ones too), or a piece of a flattened parameter."""
    return isinstance(t, DTensor | Piece)


def local(t: Any) -> Tensor:
    """The local tensor of a DTensor or a piece, t itself otherwise. Writes to it are writes to t."""
    if isinstance(t, Piece):
        return t.value
    if not isinstance(t, DTensor):
        return t
    # to_local() builds an autograd view each time; inside a compiled region it is what the compiler knows.
    return t.to_local() if torch.compiler.is_compiling() else t._local_tensor


def whole(t: Tensor) -> Tensor:
    """All of t; of a DTensor gathered, which every rank must ask for at once."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def gradient(p: Any) -> Tensor:
    """The local part of p's gradient, placed as p is: tensor parallelism leaves sums over ranks undone, and other placements."""
    grad = p.grad
    assert grad is not None
    if not isinstance(grad, DTensor) or not isinstance(p, DTensor):
        return local(grad)
    if grad.device_mesh != p.device_mesh or tuple(grad.placements) != tuple(p.placements):
        grad = grad.redistribute(p.device_mesh, p.placements)
    return local(grad)


def holders(t: Tensor) -> tuple[Any, ...]:
    """The process groups over which the parts of t are spread, one for each mesh dimension that shards it; none where it is whole here.

    Raises:
        ValueError: t is a flat shard of FSDP1 that nothing was said about.
    """
    if is_flat(t):
        flat = flats.get(t)
        if flat is None:
            raise ValueError(
                "a parameter is a flat shard of FSDP1 (FullyShardedDataParallel), which does not know the others: call "
                "lowbit.fsdp1.bind(model, opt) first, or use the wrapped model's own clip_grad_norm_"
            )
        return (flat.group,) if flat.ranks > 1 else ()
    if not isinstance(t, DTensor):
        return ()
    return tuple(
        t.device_mesh.get_group(i)
        for i, placement in enumerate(t.placements)
        if hasattr(placement, "dim") and t.device_mesh.size(i) > 1
    )
