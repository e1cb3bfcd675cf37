"""What is here of a tensor, of any kind that it may be: plain, DTensor, or a piece of a flattened parameter."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from lowbit.shard.piece import Piece, flats, is_flat

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(t: Any) -> TypeGuard[DTensor]:
    """Whether t is a DTensor. Its module takes half a second to import, and where nobody has, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def is_sharded(t: Any) -> bool:
    """Whether t is a DTensor (replicated ones too), or a piece of a flattened parameter."""
    return isinstance(t, Piece) or is_dtensor(t)


def local(t: Any) -> Tensor:
    """The local tensor of a DTensor or a piece, t itself otherwise. Writes to it are writes to t."""
    if isinstance(t, Piece):
        return t.value
    if not is_dtensor(t):
        return t
    # to_local() builds an autograd view each time; inside a compiled region it is what the compiler knows.
    return t.to_local() if torch.compiler.is_compiling() else t._local_tensor


def whole(t: Tensor) -> Tensor:
    """All of t; of a DTensor gathered, which every rank must ask for at once."""
    return t.full_tensor() if is_dtensor(t) else t


def gradient(p: Any) -> Tensor:
    """The local part of p's gradient, placed as p is: tensor parallelism leaves sums over ranks undone, and other placements."""
    grad = p.grad
    assert grad is not None
    if not is_dtensor(grad) or not is_dtensor(p):
        return local(grad)
    if grad.device_mesh != p.device_mesh or tuple(grad.placements) != tuple(p.placements):
        grad = grad.redistribute(p.device_mesh, p.placements)
    return local(grad)


def dense_gradient(p: Any) -> Tensor:
    """As `gradient`; RuntimeError where it is sparse."""
    grad = gradient(p)
    if grad.layout != torch.strided:
        raise RuntimeError(
            "lowbit takes dense gradients, not sparse ones; build the embedding with sparse=False"
        )
    return grad


_grad = operator.attrgetter("grad")
_local = operator.attrgetter("_local_tensor")
_placements = operator.attrgetter("_spec.placements")
_mesh = operator.attrgetter("_spec.mesh")


def plain_gradients(params: Sequence[Any], locals_: Sequence[Tensor]) -> list[Tensor] | None:
    """The local gradients of parameters that are all sharded, or none of them; None where one is missing or asks for a closer look (`gradient`).

    Args:
        locals_: the parameters' local tensors as they were.
    """
    grads = list(map(_grad, params))
    kinds = set(map(type, grads))
    if len(kinds) == 1 and is_dtensor(grads[0]):
        if not (
            set(map(type, params)) == kinds
            and all(map(operator.is_, map(_local, params), locals_))
            and all(map(operator.is_, map(_mesh, grads), map(_mesh, params)))
            and all(map(operator.eq, map(_placements, grads), map(_placements, params)))
        ):
            return None
        grads = list(map(_local, grads))
        kinds = set(map(type, grads))
    return grads if kinds == {Tensor} else None


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
    if not is_dtensor(t):
        return ()
    return tuple(
        t.device_mesh.get_group(i)
        for i, placement in enumerate(t.placements)
        if hasattr(placement, "dim") and t.device_mesh.size(i) > 1
    )
