"""What a rank does in test_ema_sharded.py: it trains with an average, evaluates with it, saves it
and loads it, and returns digests.
"""

from __future__ import annotations

import hashlib
import pathlib

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowbit
from lowbit import sharding
from lowbit.sharding import whole

STEPS = 6
# Rows that no number of ranks divides, and a vector shorter than the ranks that share it.
WIDTHS = (35, 50, 3)


def widths(mode: str) -> tuple[int, ...]:
    """Of the model; tensor parallelism needs columns that its ranks divide."""
    return (36, 48, 8) if mode.endswith("tp") else WIDTHS


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(sizes[0], sizes[1], dtype=dtype)
        self.down = nn.Linear(sizes[1], sizes[2], dtype=dtype)
        self.register_buffer("seen", torch.zeros(()))
        self.down.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def composable_ddp() -> bool:
    """Whether a model of `replicate` is taken for one of fully_shard."""
    return sharding.is_fully_sharded(build("replicate", 1, torch.float32))


def build(mode: str, ranks: int, dtype: torch.dtype) -> nn.Module:
    model: nn.Module = Net(dtype, widths(mode))
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if mode == "replicate":  # DDP without a wrapper
        return replicate(model)
    if mode == "fsdp":  # which stays gathered after a forward pass
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), reshard_after_forward=False)
    if mode == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b")))
    if mode == "offload":
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (ranks,)),
            offload_policy=CPUOffloadPolicy(pin_memory=False),
        )
    if mode == "meshes":  # as experts beside other layers
        fully_shard(
            model.up, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))
        )
        fully_shard(model.down, mesh=init_device_mesh("cpu", (ranks,)))
    if mode == "tp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("fsdp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["fsdp"])
    return model


def move(model: nn.Module, step: int) -> None:
    """The same new weights however they are sharded."""
    sharding.reshard(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0 + 0.05 * (step % 3)).add_(0.01)


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    found = {}
    for name, t in sorted(tensors.items()):
        t = whole(t.detach()).contiguous()
        data = t.reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{t.dtype} {tuple(t.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
    return found


def run(mode: str, ranks: int, dtype: torch.dtype) -> dict[str, dict[str, str]]:
    """Digests of the averages and of the weights as `average_parameters` gives them; what a pass
    within it computes is checked here.
    """
    model = build(mode, ranks, dtype)
    ema = lowbit.EMA(model, 0.9, seed=3)
    x = torch.randn(4, widths(mode)[0], generator=torch.Generator().manual_seed(7)).to(dtype)
    for step in range(STEPS):
        move(model, step)
        ema.update_parameters()
    with torch.no_grad():
        before = model(x)
        with ema.average_parameters():
            weights = {
                name.removeprefix("module."): p.detach().clone()
                for name, p in model.named_parameters()
            }
            frozen = Net(dtype, widths(mode))
            frozen.load_state_dict(
                {name: whole(t) for name, t in weights.items()} | {"seen": torch.zeros(())}
            )
            averaged = model(x)
        after = model(x)
    assert torch.equal(before, after), "the weights of before did not come back"
    assert not torch.equal(before, averaged)
    torch.testing.assert_close(averaged, frozen(x), rtol=1e-2, atol=1e-2)
    sharding.reshard(model)  # the last pass has gathered them
    params = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    for name, t in ema.averages.items():
        assert getattr(t, "placements", None) == getattr(params[name], "placements", None), name
    return {"averages": digest(ema.averages), "weights": digest(weights)}


def checkpoint(mode: str, ranks: int, folder: pathlib.Path, save: bool) -> dict[str, str]:
    """Saves after some updates, or loads what was saved; then more updates."""
    model = build(mode, ranks, torch.bfloat16)
    ema = lowbit.EMA(model, 0.9, seed=3)
    for step in range(STEPS):
        move(model, step)
        if save:
            ema.update_parameters()
    alone = mode == "single"
    (dcp.save if save else dcp.load)({"ema": ema}, checkpoint_id=folder, no_dist=alone)
    assert ema.n_averaged == STEPS
    for step in range(STEPS, 2 * STEPS):
        move(model, step)
        ema.update_parameters()
    return digest(ema.averages)


def refused() -> list[str]:
    """What is said of FSDP1, and of DTensors without the model."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    said = []
    for original in (True, False):
        model = FSDP(
            Net(torch.float32, WIDTHS).requires_grad_(True),
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )
        try:
            lowbit.EMA(model)
        except ValueError as error:
            said.append(str(error))
    sharded = build("fsdp", 2, torch.float32)
    try:
        lowbit.EMA(sharded.named_parameters())
    except ValueError as error:
        said.append(str(error))
    return said


# Where ranks have different parameters, or others than the model's own step them


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 9, 20, dtype=torch.bfloat16))


def units(mode: str) -> nn.Module:
    """Layers and experts: with experts over ranks, a part of them on each rank,
    or all of them everywhere.
    """
    torch.manual_seed(0)
    model = nn.Module()
    model.up = nn.Linear(35, 50, dtype=torch.bfloat16)
    model.experts = Experts()
    model.down = nn.Linear(50, 3, dtype=torch.bfloat16)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if mode in ("ep", "ep x fsdp"):
        shape = (ranks // 2, 2) if "x" in mode else (1, ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        local = distribute_tensor(
            model.experts.w.detach(), mesh["ep"], [Shard(0)], src_data_rank=None
        )
        model.experts.w = nn.Parameter(local)
        if "x" in mode:  # experts over two of the ranks, all else over four
            fully_shard(model.experts, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh._flatten("all"))
    if mode.startswith("pipeline"):
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "dp"))
        here = mesh["pp"].get_local_rank()
        for name in ("experts", "down") if here == 0 else ("up",):
            delattr(model, name)
        if "x" in mode:
            fully_shard(model, mesh=mesh["dp"])
    return model


def stepping(model: nn.Module, mode: str):
    """One step: new weights, or those of an optimizer, from the same gradients everywhere."""
    if "zero" not in mode:
        return lambda step: move(model, step)
    options = {"lr": 1e-2, "param_format": "bfloat16_stochastic"}
    groups = lowbit.param_groups(model)
    opt = (
        lowbit.AdamW(groups, **options)
        if mode.startswith("single")
        else ZeroRedundancyOptimizer(
            groups, lowbit.AdamW, parameters_as_bucket_view="views" in mode, **options
        )
    )

    def take(step: int) -> None:
        for p in model.parameters():
            p.grad = torch.sin(torch.arange(p.numel()) * (step + 1.0)).reshape(p.shape).to(p.dtype)
        opt.step()

    return take


def apart(mode: str, folder: str, act: str) -> list[dict[str, str]]:
    """Digests of the local shards of the averages and of the weights within `average_parameters`,
    after more updates; `act`: "save" or "load" half-way.
    """
    model = units(mode)
    take = stepping(model, mode) if "built first" not in mode else None
    ema = lowbit.EMA(model, 0.9, seed=3)
    take = take or stepping(model, mode)
    for step in range(2 * STEPS):
        if step == STEPS:
            {"save": dcp.save, "load": dcp.load}[act](
                {"ema": ema}, checkpoint_id=pathlib.Path(folder), no_dist=mode.startswith("single")
            )
        take(step)
        if act == "save" or step >= STEPS:
            ema.update_parameters()
    assert ema.n_averaged == 2 * STEPS
    before = digest(dict(model.named_parameters()))
    with ema.average_parameters():
        within = digest(dict(model.named_parameters()))
        assert within != before
    assert digest(dict(model.named_parameters())) == before, "the weights did not come back"
    return [digest(ema.averages), within]
