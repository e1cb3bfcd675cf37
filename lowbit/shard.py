"""Which part of a parameter is here. The only file that knows torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

try:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
except ImportError:  # torch built without distributed
    DTensor = ()  # type: ignore[assignment,misc]


@dataclass(frozen=True)
class Part:
    """The local part of a tensor: a box of the global shape."""

    shape: tuple[int, ...]  # global
    local: tuple[int, ...]
    offset: tuple[int, ...]

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
    return Part(shape, tuple(local_shape), tuple(offset))


def like(p: Tensor, value: Tensor, shape: Sequence[int]) -> Tensor:
    """`value`, the local part of a state tensor of global `shape`, placed as p is: plain beside a plain parameter, else a DTensor."""
    if not isinstance(p, DTensor):
        return value
    stride: list[int] = []
    run = 1
    for size in reversed(shape):
        stride.insert(0, run)
        run *= size
    return DTensor.from_local(
        value,
        p.device_mesh,
        p.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def take(value: Tensor, p: Tensor, box: Part, what: str) -> Tensor:
    """The local part of a loaded state tensor: `value` may be placed as p is, placed otherwise, or whole.

    `value` has p's rows in dimension 0; its further dimensions are whole here unless `value` has p's own shape.
    """
    if isinstance(value, DTensor):
        if not isinstance(p, DTensor):
            return value.full_tensor()
        if value.device_mesh == p.device_mesh and tuple(value.placements) != tuple(p.placements):
            value = value.redistribute(p.device_mesh, p.placements)
        return value.to_local()
    if not isinstance(p, DTensor) or (tuple(value.shape) == box.local and box.local != box.shape):
        return value
    if value.ndim == 0 or value.shape[0] != box.global_rows:
        raise ValueError(
            f"{what} has the shape {tuple(value.shape)}, which is neither the whole nor this rank's part of {box.shape}"
        )
    value = value.narrow(0, box.row_offset, box.rows)
    if not box.whole_rows:
        if tuple(value.shape[1:]) != box.shape[1:]:
            raise ValueError(
                f"{what} is whole, but this rank holds columns of it; save and load it sharded"
            )
        value = value.narrow(1, box.offset[1], box.local[1])
    return value
