"""What a rank does in test_compile_sharded.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lowbit

MAKERS: dict[str, Any] = {
    "AdamW": lowbit.AdamW,
    "LAMB": lowbit.LAMB,
    "APOLLO": functools.partial(lowbit.APOLLO, rank=8),
}


def weights(name: str, backend: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).bfloat16()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = MAKERS[name](lowbit.param_groups(model), lr=1e-2)
    step = torch.compile(opt.step, backend=backend) if backend else opt.step
    for i in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(i)).bfloat16()
        model(x).float().square().sum().backward()
        step()
        opt.zero_grad()
    kept = [t for p in model.parameters() for t in (p.detach(), *opt.state[p].values())]
    return [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in kept]


def same(name: str, backend: str) -> bool:
    both = zip(weights(name, backend), weights(name, ""), strict=True)
    return all(torch.equal(a, b) for a, b in both)
