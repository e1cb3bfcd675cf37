"""What a rank does in test_regressions.py under tensor parallelism."""

from __future__ import annotations

import copy
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import lowbit


def partial_gradients(mesh) -> dict[str, float]:
    """A layer norm whose inputs are cut along the sequence: its gradients are sums over ranks that
    are yet to be taken.
    """
    torch.manual_seed(0)
    plain = nn.LayerNorm(64)
    sharded = copy.deepcopy(plain)
    parallelize_module(sharded, mesh, SequenceParallel())
    opts = [lowbit.AdamW(m.named_parameters(), lr=1e-2) for m in (plain, sharded)]
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 8, 64, generator=generator)
        for m, opt in zip((plain, sharded), opts, strict=True):
            value = m(x if m is plain else distribute_tensor(x, mesh, [Shard(1)]))
            loss = (value * value * value).mean()
            (loss if m is plain else loss.full_tensor()).backward()
            opt.step()
            opt.zero_grad()
    local = sharded.weight.detach().to_local()
    copies = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, local.contiguous())
    return {
        "between copies": float((copies[0] - copies[1]).abs().max()),
        "from one process": float((local - plain.weight.detach()).abs().max()),
    }


def partial_probe(mesh) -> bool:
    """`stats(probe=True)` of a gradient that is a sum over ranks yet to be taken,
    beside that of one process.
    """
    generator = torch.Generator().manual_seed(0)
    value, *parts = torch.randn(3, 64, 128, generator=generator)
    plain, copies = (
        nn.Parameter(value.clone()),
        nn.Parameter(distribute_tensor(value, mesh, [Replicate()])),
    )
    plain.grad = parts[0] + parts[1]
    copies.grad = DTensor.from_local(parts[dist.get_rank()], mesh, [Partial()])
    totals = [lowbit.AdamW([("w", p)]).stats(probe=True)["total"] for p in (plain, copies)]
    return totals[0]["states"] == totals[1]["states"]


def partial_clipped(mesh) -> bool:
    """A gradient that is a sum over ranks yet to be taken is clipped as one process clips it."""
    generator = torch.Generator().manual_seed(0)
    value, *parts = torch.randn(3, 64, 128, generator=generator)
    plain = nn.Parameter(value.clone())
    copies = nn.Parameter(distribute_tensor(value, mesh, [Replicate()]))
    plain.grad = parts[0] + parts[1]
    copies.grad = DTensor.from_local(parts[dist.get_rank()], mesh, [Partial()])
    norms = [lowbit.clip_grad_norm_(p, 0.3) for p in (plain, copies)]
    return torch.equal(*norms) and torch.equal(plain.grad, copies.grad.full_tensor())


def columns(mesh, folder: pathlib.Path) -> bool:
    """State of a parameter cut along its columns,
    saved as a DCP directory and loaded by load_optimizer.
    """
    torch.manual_seed(0)
    value, grad = torch.randn(64, 512), torch.randn(64, 512)
    made = []
    for _ in range(2):
        p = nn.Parameter(distribute_tensor(value, mesh, [Shard(1)]))
        made.append((p, lowbit.AdamW([("w", p)], lr=1e-2)))
    p, opt = made[0]
    p.grad = distribute_tensor(grad, mesh, [Shard(1)])
    opt.step()
    state = {
        "optim": {"state": {"w": opt.state[p]}, "param_groups": [{"lr": 1e-2, "params": ["w"]}]}
    }
    dcp.save(state, checkpoint_id=folder)
    q, again = made[1]
    lowbit.load_optimizer(again, folder)
    return all(
        torch.equal(
            getattr(t, "_local_tensor", t),
            getattr(again.state[q][key], "_local_tensor", again.state[q][key]),
        )
        for key, t in opt.state[p].items()
    )


def found(folder: str) -> dict:
    mesh = init_device_mesh("cpu", (2,))
    out = {**partial_gradients(mesh), "probed": partial_probe(mesh)}
    out["clipped"] = partial_clipped(mesh)
    return {**out, "columns loaded": columns(mesh, pathlib.Path(folder) / "columns")}
