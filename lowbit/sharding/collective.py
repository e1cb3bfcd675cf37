"""The collectives of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def rank() -> int:
    """This process's rank in the default process group; 0 without one."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def reduce_over(wanted: Sequence[tuple[Tensor, Any, str]]) -> None:
    """All-reduces tensors in place, with one collective for each process group,
    operation and dtype.

    Call it with the same groups in the same order on all ranks;
    a tensor of no elements takes no collective.

    Args:
        wanted: (tensor, process group, "sum" or "max") each. Tensors are integers only, so that the
            result does not depend on the order of the ranks.
    """
    import torch.distributed as dist

    together: dict[Any, list[Tensor]] = {}
    for tensor, group, operation in wanted:
        # Also where nothing is here: what is reduced over two groups is right only if all ranks
        # take them in one order.
        here = together.setdefault((group, operation, tensor.dtype), [])
        if tensor.numel():
            here.append(tensor)
    for (group, operation, _), tensors in together.items():
        if not tensors:
            continue
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        joined = tensors[0] if alone else torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(joined, getattr(dist.ReduceOp, operation.upper()), group)
        if not alone:
            parts = joined.split([t.numel() for t in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.reshape(tensor.shape))


def average_over(t: Tensor, group: Any) -> None:
    """Averages a gradient over a process group in place: it multiplies by the
    reciprocal of the number of ranks, then sums, as DistributedDataParallel does by default.
    """
    import torch.distributed as dist

    t.mul_(1.0 / group.size())
    dist.all_reduce(t, group=group)


def host_device(groups: Sequence[Any], device: torch.device) -> torch.device:
    """Where to reduce numbers for the host: the CPU if all process groups support it,
    so that no GPU is waited for.
    """
    cpu = torch.device("cpu")
    return cpu if all(cpu in group._device_types for group in groups) else device


def device_of(group: Any) -> torch.device:
    """Where a rank without tensors takes part in a collective of those that have some: the
    accelerator if the group supports it.
    """
    accelerator = torch.accelerator.current_accelerator()
    served = {device.type for device in group._device_types}
    return accelerator if accelerator and accelerator.type in served else torch.device("cpu")


def ranks_in_both(group: Any, other: Any) -> list[int]:
    """The global ranks that two process groups share, in order."""
    import torch.distributed as dist

    return sorted({*dist.get_process_group_ranks(group)} & {*dist.get_process_group_ranks(other)})


def gathered_objects(mine: Any, group: Any = None) -> list[Any]:
    """An object of every rank of a process group, in rank order; None (default) is the default
    group, and one object without such a group. A collective.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found
