"""What a rank does in test_muon_sharding.py: Muon on sharded matrices beside the same in one process."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from resume_worker import digests, train, wrapped
from same_bytes import equal
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lowbit

# Uneven on any number of ranks, fewer rows than ranks, a batch, fused QKV, a vector.
SHAPES = [(48, 200), (200, 48), (77, 130), (130, 77), (2, 300), (4, 24, 40), (3 * 32, 64), (50,)]
QKV = SHAPES.index((96, 64))
STEPS = 4
WAYS = {
    "8bit": {},
    "float32": {"state_format": "float32", "adjust_lr_fn": "match_rms_adamw"},
    "parts": {"split": {f"p{QKV}": (64, 16, 16)}, "nesterov": False},
    "row": {"state_format": lowbit.scaled("dynamic8", scale="row", rounding="stochastic")},
    "tensor": {"state_format": lowbit.scaled("dynamic8", scale="tensor")},
    "kahan": {"param_format": "bfloat16_kahan", "overrides": None},
}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for i, shape in enumerate(SHAPES):
            generator = torch.Generator().manual_seed(i)
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))  # fmt: skip


def made(kind: str, way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model(torch.bfloat16 if way == "kahan" else torch.float32)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("r", "s")))
    opt = lowbit.MuonWithAdamW(lowbit.muon_param_groups(model), lr=0.02, min_numel=0, **WAYS[way])
    return model, opt


def step(model: nn.Module, opt: torch.optim.Optimizer, t: int, without: str = "") -> None:
    for i, (name, p) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(1000 * t + i)
        grad = (torch.randn(tuple(p.shape), generator=generator) * 0.1).to(p.dtype)
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = None if name == without else grad
    opt.step()


def bits(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {f"{n} {which}": t.detach() for n, p in model.named_parameters() for which, t in [("", p), *opt.state[p].items()]}  # fmt: skip


@functools.cache
def alone(way: str) -> dict[str, torch.Tensor]:
    model, opt = made("one", way)
    for t in range(STEPS):
        step(model, opt, t, "p1" if t == 2 else "")
    return bits(model, opt)


def compare(kind: str, way: str) -> list[str]:
    """What is not, byte for byte, this rank's part of what one process has."""
    model, opt = made(kind, way)
    for t in range(STEPS):
        step(model, opt, t, "p1" if t == 2 else "")
    found, want = bits(model, opt), alone(way)
    return [key for key in sorted(found.keys() | want.keys())
            if key not in found or key not in want or not equal(found[key], want[key])]  # fmt: skip


def collectives(kind: str) -> dict[str, Any]:
    """Those of a step, and the bytes that this rank sends in each all-to-all; what it has and owns of matrices in bfloat16."""
    model, opt = made(kind, "8bit")
    step(model, opt, 0)
    seen: list[tuple[str, int]] = []
    names = [n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "gather", "scatter"))]  # fmt: skip
    before = {n: getattr(dist, n) for n in names if callable(getattr(dist, n))}

    def counted(name: str, *args: Any, **keywords: Any) -> Any:
        sent = args[1] if name == "all_to_all_single" else args[0]
        seen.append((name, sent.nbytes if isinstance(sent, torch.Tensor) else 0))
        return before[name](*args, **keywords)

    for name in before:
        setattr(dist, name, functools.partial(counted, name))
    try:
        step(model, opt, 1)
    finally:
        for name, plain in before.items():
            setattr(dist, name, plain)
    spread = [p for _, p, lay in opt._laid_out() if getattr(lay, "spread", ())]
    group = opt._layouts[spread[0]].group
    return {
        "seen": seen,
        "has": sum(2 * p.to_local().numel() for p in spread),
        "owns": sum(2 * p.numel() for p in spread if opt._owners[p] == dist.get_rank(group)),
        "costs": [(opt._owners[p], opt._layouts[p].cost) for p in spread],
    }


def saved(folder: pathlib.Path) -> dict[str, dict[str, str]]:
    model, opt = made("fsdp2", "8bit")
    for t in range(STEPS):
        step(model, opt, t)
    dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)}, checkpoint_id=folder)  # fmt: skip
    before = digests(model, opt)
    step(model, opt, STEPS)
    return {"before": before, "after": digests(model, opt)}


def loaded(folder: pathlib.Path) -> dict[str, dict[str, str]]:
    model, opt = made("fsdp2", "8bit")
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, state["optim"])
    before = digests(model, opt)
    step(model, opt, STEPS)
    return {"before": before, "after": digests(model, opt)}


def in_backward() -> list[str]:
    """What differs where the backward pass steps, from steps after it."""
    found = []
    for early in (False, True):
        net = wrapped("fsdp2")
        opt = lowbit.MuonWithAdamW(lowbit.muon_param_groups(net), lr=0.02, min_numel=0)
        if early:
            lowbit.step_in_backward(net, opt)
        losses = train(net, opt, 0)
        found.append({**digests(net, opt), "losses": str(losses)})
    return [key for key in found[0] if found[0][key] != found[1].get(key)]


def refused() -> dict[str, str]:
    ranks = dist.get_world_size()
    flat, deep = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (2, ranks // 2))

    def message(mesh: Any, *placements: Any, shape: tuple[int, ...] = (64, 64)) -> str:
        p = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
        try:
            lowbit.Muon([("w", p)])
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    return {
        "columns": message(flat, Shard(1)),
        "batch": message(flat, Shard(1), shape=(4, 64, 64)),
        "twice": message(deep, Shard(0), Shard(0)),
        "replicas": message(deep, Replicate(), Replicate()),
    }
