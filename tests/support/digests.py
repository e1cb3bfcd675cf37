"""Digests of weights and state that do not depend on who holds them. Collectives,
where a parameter is sharded.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lowbit import fsdp1, sharding
from lowbit.config.overrides import clean_name
from lowbit.sharding import whole


def whole_weight(p) -> torch.Tensor:
    if not isinstance(p, sharding.FlatShard):
        return whole(p)
    full = torch.zeros(p.numel, dtype=p.dtype)
    begin, end = p.elements(p.flat.rank)
    full[begin:end] = p.value
    bits = full.view(torch.uint8)
    if p.flat.ranks > 1:
        dist.all_reduce(bits, group=p.flat.group)  # each element from one
    return bits.view(p.dtype).reshape(p.shape)


def digest(opt, steps: int) -> dict[str, str]:
    """Of each parameter's weight and state, which has counted so many steps."""
    found = {}
    state = fsdp1.get_state_dict(opt)["state"]
    for _, p, name, _ in opt.members():
        name = clean_name(p.name if isinstance(p, sharding.FlatShard) else name)
        h = hashlib.sha256()
        for key, t in [("", whole_weight(p)), *sorted(state.get(name, {}).items())]:
            t = whole(t).contiguous()
            h.update(f"{key} {t.dtype} {tuple(t.shape)}".encode())
            h.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
        found[name] = h.hexdigest()[:16]
        kept = opt.state_of(p)
        if kept and not name.startswith("unused"):
            assert kept["step"] == steps, f"{name} is at step {kept['step']} here, not {steps}"
    return found


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a whole tensor that is sharded like another one."""
    if isinstance(like, DTensor):
        mesh = like.device_mesh
        for dim, placement in enumerate(like.placements):
            if isinstance(placement, Shard | _StridedShard):
                parts, _ = placement._split_tensor(tensor, mesh.size(dim), with_padding=False)
                tensor = parts[mesh.get_local_rank(dim)]
    return tensor
