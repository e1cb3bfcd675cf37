"""Collectives of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def rank() -> int:
    """This process's number among all, 0 where there is one."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


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
