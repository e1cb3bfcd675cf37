"""What a rank does in test_resume.py: trains in float32 and saves,
or continues in 8 bits from what was saved.
"""

from __future__ import annotations

import hashlib
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import lowbit
from lowbit.sharding import whole

STEPS = 8
OPTIONS = {"lr": 3e-3, "weight_decay": 0.05, "betas": (0.9, 0.98)}


class Net(nn.Module):
    """Rows that no number of ranks divides, and a matrix of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.head = nn.Linear(70, 131), nn.Linear(131, 577), nn.Linear(577, 3)
        self.wide = nn.Parameter(torch.randn(3, 2048) / 45)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(F.gelu(self.mid(F.gelu(self.up(x)))))
        return y + F.pad(y, (0, 2045)) @ self.wide.T


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp1":
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(net, device_id=cpu, use_orig_params=True, device_mesh=mesh)
    for part in (net.up, net.mid, net.head, net):
        fully_shard(part, mesh=mesh)
    return net


def train(net: nn.Module, opt: torch.optim.Optimizer, first: int) -> list[float]:
    """STEPS steps from step `first` on,
    all ranks on the same batches: their number does not matter.
    """
    losses = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 70, generator=generator)
        loss = F.mse_loss(net(x), x[:, :3].sin())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def digests(net: nn.Module, opt: torch.optim.Optimizer) -> dict[str, str]:
    """Of each state of each parameter, whole."""
    out = {}
    for name, p in net.named_parameters():
        for key, t in sorted(opt.state[p].items()):
            data = whole(t).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            out[f"{name}.{key}"] = hashlib.sha256(data).hexdigest()[:16]
    return out


def run_train(kind: str, folder: pathlib.Path) -> dict:
    net = wrapped(kind)
    opt = torch.optim.AdamW(net.parameters(), **OPTIONS)
    before = train(net, opt, 0)
    state = {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, opt)}
    dcp.save(state, checkpoint_id=folder)
    return {"before": before, "after": train(net, opt, STEPS)}


def run_resume(original: pathlib.Path, converted: list[pathlib.Path]) -> dict:
    """By load_optimizer from the float32 checkpoint, and by torch's reader from converted ones."""
    out = {}
    for path in (original, *converted):
        net = wrapped("fsdp2")
        opt = lowbit.AdamW(net.named_parameters(), lr=1.0)
        state = {"model": get_model_state_dict(net)}
        if path != original:
            state["optim"] = get_optimizer_state_dict(net, opt)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(net, state["model"])
        if path == original:
            lowbit.load_optimizer(opt, path)
        else:
            set_optimizer_state_dict(net, opt, state["optim"])
        group = {key: opt.param_groups[0][key] for key in OPTIONS}
        state_here = digests(net, opt)
        losses = train(net, opt, STEPS)
        out[path] = {"state": state_here, "group": group, "after": losses}
    return out
