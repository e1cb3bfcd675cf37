"""A model of named units with parameters alone, and every wrapper that test_wrappers.py and
test_matrix.py put around one.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.tensor import Shard, distribute_tensor

Units = Mapping[str, Mapping[str, Sequence[int]]]  # unit -> parameter -> shape


class Unit(nn.Module):
    def __init__(self, name: str, shapes, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        for key, shape in shapes.items():
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()) + seed)
            value = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(key, nn.Parameter(value, requires_grad=key != "frozen"))
        if name == "c":
            self.tied_again = self.tied


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, seed: int, units: Units) -> None:
        super().__init__()
        for name, shapes in units.items():
            self.add_module(name, Unit(name, shapes, dtype, seed))

    def forward(self) -> torch.Tensor:
        squares = [p.float().square().sum() for p in self.parameters()]
        return sum(squares)  # type: ignore[return-value]


BY_COLUMNS = ("square", "wide", "long", "up", "down")  # dimension 1 of these under "row"
EXPERTS = ("up", "down")
# The dimensions of a wrapper's mesh, by how its name begins; their sizes end it: "HSDP 2x2".
MESHES = {
    "HSDP x TP": ("copies", "shards", "tp"),
    "EP x HSDP": ("copies", "shards", "ep"),
    "pipeline x FSDP2": ("stages", "shards"),
    "HSDP": ("copies", "shards"),
    "TP x FSDP": ("shards", "tp"),
    "EP x FSDP": ("shards", "ep"),
    "EP": ("ep",),
}


@functools.cache
def shared_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Made once in a process group (tests/support/ranks/pool.py forgets it): another mesh would
    connect its ranks anew, and start three threads for each group.
    """
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def mesh_of(wrapper: str) -> DeviceMesh:
    names = next((names for start, names in MESHES.items() if wrapper.startswith(start)), None)
    sizes = re.search(r"\d(x\d)+", wrapper)
    shape = tuple(map(int, sizes[0].split("x"))) if sizes else (dist.get_world_size(),)
    return shared_mesh(shape, names)


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    """The model in a wrapper, by its name in the tables. "row" cuts BY_COLUMNS on dimension 1,
    whatever else tensor parallelism cuts on dimension 0.
    """
    if wrapper in ("single", "flat slices"):
        return model
    if wrapper in ("DDP", "ZeroRedundancyOptimizer"):
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if wrapper.startswith("FSDP1"):
        options = {"use_orig_params": wrapper == "FSDP1 orig", "device_id": torch.device("cpu")}
        for name, _ in list(model.named_children()):
            setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
        return FullyShardedDataParallel(model, **options)
    if wrapper == "pipeline":
        return stage(model, dist.get_rank(), dist.get_world_size())
    mesh = experts_mesh = mesh_of(wrapper)
    if wrapper.startswith("pipeline"):
        stage(model, mesh["stages"].get_local_rank(), mesh["stages"].size())
        mesh = mesh["shards"]
    if wrapper.startswith("TP") or "x TP" in wrapper:
        cut(model, mesh["tp"], wrapper.endswith("row"), None)
        mesh = mesh["copies", "shards"] if "HSDP" in wrapper else mesh["shards"]
    if wrapper.startswith("EP"):
        cut(model, mesh["ep"], False, EXPERTS)
        if wrapper == "EP":  # all else is on every rank
            return model
        # Experts over the ranks that have the same ones, all else over more.
        if "HSDP" in wrapper:
            experts_mesh = mesh["copies", "shards"]
            mesh["shards", "ep"]._flatten("all")
            mesh = mesh["copies", "all"]
        else:
            experts_mesh, mesh = mesh["shards"], mesh._flatten("all")
        fully_shard(model.experts, mesh=experts_mesh)
    offload = (
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if wrapper == "CPU offload" else {}
    )
    for unit in model.children():
        if not isinstance(unit, FSDPModule):
            fully_shard(unit, mesh=mesh, **offload)
    return fully_shard(model, mesh=mesh, **offload)


def stage(model: nn.Module, number: int, stages: int) -> nn.Module:
    """Every so many-th unit is left."""
    for i, (name, _) in enumerate(list(model.named_children())):
        if i % stages != number:
            delattr(model, name)
    return model


def cut(model: nn.Module, mesh: DeviceMesh, by_columns: bool, only: Sequence[str] | None) -> None:
    """Parameters become DTensors on a mesh of one dimension,
    as tensor and expert parallelism leave them.
    """
    for unit in model.children():
        for key, p in list(unit.named_parameters()):
            if only is not None and key not in only:
                continue
            dim = 1 if by_columns and key in BY_COLUMNS else 0
            local = distribute_tensor(p.detach(), mesh, [Shard(dim)])
            setattr(unit, key, nn.Parameter(local, requires_grad=p.requires_grad))
            if key == "tied":
                unit.tied_again = unit.tied
