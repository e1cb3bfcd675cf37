"""What a rank does in test_order.py: rank 1 has the parameters in another order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import lowbit

CPU = torch.device("cpu")


def listed(model: nn.Module, how: str) -> list[tuple[str, nn.Parameter]]:
    named = list(model.named_parameters())
    if dist.get_rank() == 1:
        named = named[::-1] if how == "reversed" else named[:-1] if how == "fewer" else named
    return named


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2)))


def trained(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(2, 128)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def fsdp2(rule: str, how: str) -> tuple[str, list[torch.Tensor]]:
    """What was refused, or nothing; and the weights."""
    model, mesh = layers(), init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    said = "nothing"
    try:
        trained(model, getattr(lowbit, rule)(listed(model, how), lr=1e-2))
    except ValueError as error:
        said = str(error)
    return said, [p.full_tensor().detach() for p in model.parameters()]


def fsdp1(how: str) -> str:
    model = nn.Sequential(*(FullyShardedDataParallel(layer, device_id=CPU) for layer in layers()))
    opt = lowbit.AdamW(listed(model, how), lr=1e-2)
    try:
        lowbit.fsdp1.bind(model, opt)
    except ValueError as error:
        return str(error)
    trained(model, opt)
    return "nothing"
