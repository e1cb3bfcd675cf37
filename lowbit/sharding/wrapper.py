"""Wrappers around a module: DistributedDataParallel and fully_shard."""

from __future__ import annotations

from typing import Any

import torch


def is_ddp(module: Any) -> bool:
    """Whether a module is wrapped in DistributedDataParallel."""
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def inside_ddp(module: Any) -> bool:
    """Whether the running forward pass belongs to a DistributedDataParallel that contains the
    module and is not it.
    """
    around = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return around is not None and around is not module and module in around.modules()


def is_fully_sharded(module: Any) -> bool:
    """Whether fully_shard (FSDP2) was called on any part of a module."""
    return any(_is_fsdp2(part) for part in module.modules())


def _is_fsdp2(part: Any) -> bool:
    # Composable DDP (torch.distributed._composable.replicate) has the first alone.
    return hasattr(part, "set_requires_gradient_sync") and hasattr(part, "reshard")


def reshard(module: Any) -> None:
    """Gives up the weights that FSDP2 has gathered and holds beyond a pass,
    so that the next pass gathers them again.
    """
    for part in module.modules():
        if _is_fsdp2(part):
            part.reshard()


def reset_fully_sharded(module: Any) -> bool:
    """Restores FSDP2 after a pass that raised: it shards parameters again and drops sums that were
    never reduced.

    Returns:
        Whether this torch can; FSDPModule.reset_iter_state came with 2.13.
    """
    able = True
    for part in module.modules():
        if not _is_fsdp2(part):
            continue
        if not hasattr(part, "reset_iter_state"):
            able = False
        elif part._get_fsdp_state()._is_root:  # None before the first pass
            before = list(part.parameters())
            part.reset_iter_state()
            now = {id(p) for p in part.parameters()}
            for p in before:
                if id(p) not in now:  # it was unsharded
                    p.grad = None
    return able


def reset_reducer(model: Any) -> None:
    """Restores the reducer of a DistributedDataParallel after a backward pass that raised.

    Call it on every rank: it is a collective if the reducer had begun to reduce.
    """
    import torch.distributed as dist

    try:
        model._check_reducer_finalized()
    except RuntimeError:  # pending reductions write to buckets that the next pass fills
        dist.barrier(model.process_group)
    model.reducer._reset_state()
