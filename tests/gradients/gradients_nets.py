"""The network of test_gradients.py under every wrapper, and what ranks compare of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowbit
from lowbit.sharding import whole
from tests.gradients.test_gradients import Net, tokens

Found = dict[str, Any]


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n.removeprefix("module."): p for n, p in model.named_parameters() if p.requires_grad}


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: whole(p.grad).clone() for n, p in named(model).items() if p.grad is not None}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


def agreed(a: dict[str, torch.Tensor]) -> bool:
    """Whether every rank has the same."""
    total = torch.stack([t.double().sum() for t in a.values()])
    both = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(both, total)
    return all(torch.equal(t, total) for t in both)


def sharded(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    for part in model.children():
        if part is not getattr(model, "head", None) and part is not getattr(model, "embed", None):
            fully_shard(part, mesh=mesh, **options)  # the shared weight is the root's
    return fully_shard(model, mesh=mesh, **options)


def net(kind: str, mesh: Any = None) -> nn.Module:
    model = Net()
    if kind.startswith("fsdp2"):
        policies: dict[str, dict[str, Any]] = {
            "fsdp2": {},
            "fsdp2 offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            "fsdp2 reducing in float32": {
                "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)
            },
        }
        return sharded(model, mesh, **policies[kind])
    options: dict[str, dict[str, Any]] = {
        "ddp": {},
        "ddp view": {"gradient_as_bucket_view": True},
        "ddp small buckets": {"bucket_cap_mb": 0.001},
    }
    return DistributedDataParallel(model, find_unused_parameters=True, **options[kind])


KINDS = ("ddp", "ddp view", "ddp small buckets", "fsdp2")
POLICIES = ("fsdp2 offload", "fsdp2 reducing in float32")


def batch(i: int) -> torch.Tensor:
    return tokens(100 * i + dist.get_rank())


def optimizer(model: nn.Module, name: str = "AdamW") -> lowbit.LowbitOptimizer:
    params = [
        (n.removeprefix("module."), p) for n, p in model.named_parameters() if p.requires_grad
    ]
    return getattr(lowbit, name)(params, lr=1e-2)


def everything(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    made = {n: whole(p.detach()) for n, p in named(model).items()}
    for n, p in named(model).items():
        made |= {f"{n} {key}": whole(t) for key, t in opt.state[p].items()}
    return made
