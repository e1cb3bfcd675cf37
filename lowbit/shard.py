"""Which part of a parameter is here. The only file that knows torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
except ImportError:  # torch built without distributed
    DTensor = ()  # type: ignore[assignment,misc]


@dataclass(frozen=True)
class Part:
    """The local part of a tensor: a box of the global shape."""

    shape: tuple[int, ...]  # global
    local: tuple[int, ...]
    offset: tuple[int, ...]
    # Where it is cut: a dimension and the process group that holds its parts, for each mesh dimension that shards.
    cuts: tuple[tuple[int, Any], ...] = ()
    # Of something made from a parameter: the parameter's dimension that each of its own follows, -1 where it follows none.
    follows: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return self.local[0] if self.local else 1

    @property
    def cols(self) -> int:
        return math.prod(self.local[1:])

    @property
    def global_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def global_cols(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_offset(self) -> int:
        return self.offset[0] if self.offset else 0

    @property
    def col_offset(self) -> int:
        return self.offset[1] * math.prod(self.shape[2:]) if len(self.shape) > 1 else 0

    @property
    def whole_rows(self) -> bool:
        return self.local[1:] == self.shape[1:]


def is_sharded(t: Tensor) -> bool:
    """Whether t is a DTensor (replicated ones too)."""
    return isinstance(t, DTensor)


def local(t: Tensor) -> Tensor:
    """The local tensor of a DTensor, t itself otherwise. Writes to it are writes to t."""
    if not isinstance(t, DTensor):
        return t
    # to_local() builds an autograd view each time; inside a compiled region it is what the compiler knows.
    return t.to_local() if torch.compiler.is_compiling() else t._local_tensor


def whole(t: Tensor) -> Tensor:
    """All of t; of a DTensor gathered, which every rank must ask for at once."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def gradient(p: Tensor) -> Tensor:
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
        ValueError: t is a flat shard of FSDP1, which does not say over which ranks it is spread.
    """
    if is_flat(t):
        raise ValueError(
            "a parameter is a flat shard of FSDP1 (FullyShardedDataParallel), which does not know the others; "
            "use the wrapped model's own clip_grad_norm_, or fully_shard (FSDP2)"
        )
    if not isinstance(t, DTensor):
        return ()
    return tuple(
        t.device_mesh.get_group(i)
        for i, placement in enumerate(t.placements)
        if hasattr(placement, "dim") and t.device_mesh.size(i) > 1
    )


def is_flat(t: Tensor) -> bool:
    """Whether t is a flat shard of FSDP1, or a parameter that is a view of one."""
    return bool(getattr(t, "_fsdp_flattened", False) or getattr(t, "_is_flat_param", False))


def is_ddp(module: Any) -> bool:
    """Whether a module is wrapped in DistributedDataParallel."""
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def inside_ddp(module: Any) -> bool:
    """Whether the forward pass that is running now is that of a DistributedDataParallel around a module that is not one itself."""
    around = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return around is not None and around is not module and module in around.modules()


def is_fully_sharded(module: Any) -> bool:
    """Whether fully_shard (FSDP2) was called on any part of a module."""
    return any(hasattr(m, "set_requires_gradient_sync") for m in module.modules())


def rank() -> int:
    """This process's number among all, 0 where there is one."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def part(p: Tensor, what: str) -> Part:
    """The local part of a parameter. `what` names it in errors.

    Raises:
        ValueError: the placement is one that state cannot follow yet, with the placement and what to do.
    """
    shape = tuple(p.shape)
    if getattr(p, "_fsdp_flattened", False) or getattr(p, "_is_flat_param", False):
        raise ValueError(
            f"{what} is a flat shard of FSDP1 (FullyShardedDataParallel), which hides the shapes that state is laid out by. "
            "Use fully_shard (FSDP2), DDP or a single device."
        )
    if not isinstance(p, DTensor):
        return Part(shape, shape, (0,) * len(shape))
    for placement in p.placements:
        dim = getattr(placement, "dim", None)
        if placement.is_partial():
            raise ValueError(
                f"{what} has the placement {placement}; a parameter must be sharded or replicated"
            )
        if type(placement).__name__ == "_StridedShard":
            raise ValueError(
                f"{what} has the placement {placement} (FSDP over tensor parallelism on the same dimension), whose local rows are "
                "not one run of the global rows; shard the two on different dimensions"
            )
        if dim is not None and dim > 1:
            raise ValueError(
                f"{what} is sharded on dimension {dim}; state follows dimensions 0 and 1"
            )
    local_shape, offset = compute_local_shape_and_global_offset(
        p.shape, p.device_mesh, p.placements
    )
    cuts = tuple(
        (placement.dim, p.device_mesh.get_group(i))
        for i, placement in enumerate(p.placements)
        if hasattr(placement, "dim") and p.device_mesh.size(i) > 1
    )
    return Part(shape, tuple(local_shape), tuple(offset), cuts)


def like(
    p: Tensor, value: Tensor, shape: Sequence[int], dims: Sequence[int] | None = None
) -> Tensor:
    """`value`, the local part of a state tensor of global `shape`, placed as p is: plain beside a plain parameter, else a DTensor.

    Args:
        dims: the dimension of p that each of the tensor's own follows; the same ones by default. Over a mesh dimension that shards another one
            the tensor is replicated.
    """
    if not isinstance(p, DTensor):
        return value
    stride: list[int] = []
    run = 1
    for size in reversed(shape):
        stride.insert(0, run)
        run *= size
    follows = range(len(shape)) if dims is None else dims
    return DTensor.from_local(
        value,
        p.device_mesh,
        _placements(p, follows),
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def _placements(p: Tensor, dims: Sequence[int]) -> list[Any]:
    placements: list[Any] = []
    for placement in p.placements:  # type: ignore[attr-defined]
        dim = getattr(placement, "dim", None)
        if dim is None:
            placements.append(placement)
        else:
            placements.append(Shard(list(dims).index(dim)) if dim in dims else Replicate())
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
    if isinstance(value, DTensor):
        if not isinstance(p, DTensor):
            return value.full_tensor()
        wanted = _placements(p, dims)
        if value.device_mesh == p.device_mesh and list(value.placements) != wanted:
            value = value.redistribute(p.device_mesh, wanted)
        return value.to_local()
    if not isinstance(p, DTensor) or (tuple(value.shape) == tuple(local) != tuple(shape)):
        return value
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"{what} has the shape {tuple(value.shape)}, which is neither the whole {tuple(shape)} nor this rank's part {tuple(local)}"
        )
    for dim, (start, length) in enumerate(zip(offset, local, strict=True)):
        value = value.narrow(dim, start, length)
    return value


def reduce_over(wanted: Sequence[tuple[Tensor, Any, str]]) -> None:
    """All-reduces tensors in place: (tensor, process group, "sum" or "max") each, one collective for each group, operation and dtype.

    Integers only, so that the result does not depend on the order in which ranks are met.
    """
    import torch.distributed as dist

    together: dict[Any, list[Tensor]] = {}
    for tensor, group, operation in wanted:
        if tensor.numel():
            together.setdefault((group, operation, tensor.dtype), []).append(tensor)
    for (group, operation, _), tensors in together.items():
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        joined = tensors[0] if alone else torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(joined, getattr(dist.ReduceOp, operation.upper()), group)
        if not alone:
            pieces = joined.split([t.numel() for t in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece.reshape(tensor.shape))


def average_over(t: Tensor, group: Any) -> None:
    """Averages a gradient over a process group in place, as DistributedDataParallel does: each rank's part of it is taken first."""
    import torch.distributed as dist

    t.div_(group.size())
    dist.all_reduce(t, group=group)
