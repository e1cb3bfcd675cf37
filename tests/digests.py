"""Digests of all that an optimizer has, whole, so that runs on different numbers of ranks can be compared."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lowbit import fsdp1, shard
from lowbit.overrides import clean_name


def whole(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return t.full_tensor() if isinstance(t, DTensor) else t


def _whole_weight(p) -> torch.Tensor:
    if not isinstance(p, shard.Piece):
        return whole(p)
    full = torch.zeros(p.numel, dtype=p.dtype)
    begin, end = p.elements(p.flat.rank)
    full[begin:end] = p.value
    bits = full.view(torch.uint8)
    if p.flat.ranks > 1:
        dist.all_reduce(bits, group=p.flat.group)  # each element from one
    return bits.view(p.dtype).reshape(p.shape)


def digest(opt, steps: int) -> dict[str, str]:
    """Of each parameter's weight and state, which must be at that step. A collective."""
    found = {}
    state = fsdp1.get_state_dict(opt)["state"]
    for _, p, name, _ in opt._members():
        name = clean_name(p.name if isinstance(p, shard.Piece) else name)
        h = hashlib.sha256()
        for key, t in [("", _whole_weight(p)), *sorted(state.get(name, {}).items())]:
            t = whole(t).contiguous()
            h.update(f"{key} {t.dtype} {tuple(t.shape)}".encode())
            h.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
        found[name] = h.hexdigest()[:16]
        kept = opt._state_of(p)
        if kept and not name.startswith("unused"):
            assert kept["step"] == steps, f"{name} is at step {kept['step']} here, not {steps}"
    return found
