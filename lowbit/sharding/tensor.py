"""The local part of any tensor: plain, DTensor or flat shard."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from lowbit.sharding.collective import device_of, host_device, rank, reduce_over
from lowbit.sharding.flat_shard import FlatShard, flats, is_flat

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(t: Any) -> TypeGuard[DTensor]:
    """Whether t is a DTensor. It never imports DTensor's module,
    which takes half a second: until then none exists.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def is_sharded(t: Any) -> bool:
    """Whether t is a DTensor, replicated or sharded, or a flat shard."""
    return isinstance(t, FlatShard) or is_dtensor(t)


def check_on_mesh(t: Any, what: str) -> None:
    """Raises ValueError if t is a DTensor of a mesh that this rank is not part of."""
    if is_dtensor(t) and t.device_mesh.get_coordinate() is None:
        ranks = t.device_mesh.mesh.flatten().tolist()
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        raise ValueError(
            f"{what} lies on a mesh of ranks {ranks[:8]}{more}, and rank {rank()} is not one of "
            "them: leave it out of this rank's optimizer, and of what this rank clips"
        )


def local(t: Any) -> Tensor:
    """The local tensor of a DTensor or flat shard, otherwise t itself. It shares t's memory,
    so writes change t.
    """
    if isinstance(t, FlatShard):
        return t.value
    if not is_dtensor(t):
        return t
    # to_local() builds an autograd view each time; the compiler knows only to_local().
    return t.to_local() if torch.compiler.is_compiling() else t._local_tensor


def same_placement(a: Any, b: Any) -> bool:
    """Whether both are DTensors of one mesh and equal placements, or neither is a DTensor."""
    if not is_dtensor(b):
        return not is_dtensor(a)
    return is_dtensor(a) and a.placements == b.placements and a.device_mesh == b.device_mesh


def whole(t: Tensor) -> Tensor:
    """The whole tensor. For a DTensor this is a gather, which every rank must call."""
    return t.full_tensor() if is_dtensor(t) else t


def has_nonzero(t: Tensor) -> bool:
    """Whether any element of the whole tensor is not 0. Every rank that has a part calls it."""
    found = bool(local(t).any())
    for group in process_groups(t):
        there = host_device([group], device_of(group))  # state may lie in the host's memory
        told = torch.tensor([found], dtype=torch.int32, device=there)
        reduce_over([(told, group, "max")])
        found = bool(told)
    return found


def gradient(p: Any) -> Tensor:
    """The local part of p's gradient, placed like p.

    Tensor parallelism may leave partial sums or other placements;
    these gradients are redistributed.
    """
    grad = p.grad
    assert grad is not None
    if not is_dtensor(grad) or not is_dtensor(p):
        return local(grad)
    return local(_redistributed(grad, p))


def _redistributed(grad: Any, p: Any) -> Any:
    """A gradient that is placed like p: a collective where it is not so already."""
    return grad if same_placement(grad, p) else grad.redistribute(p.device_mesh, p.placements)


def redistribute_gradient(p: Any) -> None:
    """Places p's gradient like p, in `p.grad` itself."""
    if is_dtensor(p) and is_dtensor(p.grad) and not same_placement(p.grad, p):
        p.grad = _redistributed(p.grad, p)


def dense_gradient(p: Any) -> Tensor:
    """The local part of p's gradient, as `gradient` gives it.
    Raises RuntimeError if it is sparse.
    """
    grad = gradient(p)
    check_dense(grad)
    return grad


def check_dense(grad: Tensor) -> None:
    """Raises RuntimeError if a gradient is sparse."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            "lowbit takes dense gradients, but this one is sparse; build the embedding with "
            "sparse=False"
        )


_grad = operator.attrgetter("grad")
_local = operator.attrgetter("_local_tensor")
_placements = operator.attrgetter("_spec.placements")
_mesh = operator.attrgetter("_spec.mesh")


def plain_gradients(params: Sequence[Any], locals_: Sequence[Tensor]) -> list[Tensor] | None:
    """The local gradients of parameters that are all plain,
    or all DTensors placed like their gradients; else None.

    None means that a gradient is missing or needs `gradient`.

    Args:
        params: the parameters.
        locals_: the parameters' local tensors at the last step.
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


def process_groups(t: Tensor) -> tuple[Any, ...]:
    """The process groups over which the parts of t are spread, one for each mesh dimension that
    shards it; none where it is whole here.

    Raises:
        ValueError: t is a flat shard of FSDP1 that was not bound, or a DTensor of other ranks.
    """
    flat = flats.get(t)
    if flat is not None:
        return (flat.group,) if flat.ranks > 1 else ()
    if is_flat(t):
        raise ValueError(
            "a parameter is a flat shard of FSDP1 (FullyShardedDataParallel), which does not know "
            "the other ranks' shards: call lowbit.fsdp1.bind(model, opt) first, or use the wrapped "
            "model's own clip_grad_norm_"
        )
    if not is_dtensor(t):
        return ()
    cut = [
        i
        for i, placement in enumerate(t.placements)
        if hasattr(placement, "dim") and t.device_mesh.size(i) > 1
    ]
    if cut:
        check_on_mesh(t, "a parameter")
    return tuple(map(t.device_mesh.get_group, cut))
