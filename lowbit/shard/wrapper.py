"""What is wrapped around a module."""

from __future__ import annotations

from typing import Any

import torch


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
