"""Whether a rank holds the bytes of a whole tensor: each rank compares its own part,
so nothing is gathered.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from lowbit import sharding
from tests.support import bits


def chunk(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The part of a whole tensor that a DTensor of its shape holds here: torch.chunk, mesh
    dimension by mesh dimension, under FSDP2 the last (TP) first.
    """
    local, order = whole, list(range(like.device_mesh.ndim))
    strided = any(hasattr(placement, "split_factor") for placement in like.placements)
    for i in reversed(order) if strided else order:
        dim = getattr(like.placements[i], "dim", None)
        if dim is not None:
            chunks = torch.chunk(local, like.device_mesh.size(i), dim)
            at = like.device_mesh.get_local_rank(i)
            local = chunks[at] if at < len(chunks) else local.narrow(dim, 0, 0)
    return local.contiguous()


def equal(found, want: torch.Tensor) -> bool:
    """`found`: a tensor, a DTensor or a FlatShard. `want`: the whole tensor."""
    if isinstance(found, sharding.FlatShard):
        begin, end = found.elements(found.flat.rank)
        found, want = found.value, want.reshape(-1)[begin:end]
    elif isinstance(found, DTensor):
        if found.shape != want.shape:
            return False
        found, want = found.to_local(), chunk(want, found)
    return bits.equal(found, want)
