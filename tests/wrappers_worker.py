"""What a rank does in test_wrappers.py: the same global gradients under any wrapper, and all of weights and state as one process would hold them."""

from __future__ import annotations

import hashlib
import pathlib
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import lowbit
from lowbit import fsdp1, shard
from lowbit.overrides import clean_name

# Rows are fewer than a real model's; columns are what blocks are cut by.
UNITS = {
    "a": {"square": (96, 896), "vector": (1000,)},
    "b": {"wide": (36, 1408), "odd": (100, 77)},
    "c": {"long": (7, 4096), "conv": (3, 3, 3, 5), "tied": (40, 128)},
    "d": {"never": (70, 70)},
    "e": {"frozen": (5, 33)},
}
FORMATS = {
    "8bit": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5),
    "4bit": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5, state_format="4bit"),
    "fp8": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5, state_format="fp8"),
    "rank-1": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5, state_format="lpmm4"),
    "Adafactor": lambda p: lowbit.Adafactor(p, lr=1e-2, seed=5, beta1=0.9),
}
# Wrapper: ranks.
WRAPPERS = {
    "single": 1, "DDP": 2, "FSDP1 orig": 4, "FSDP1 flat": 3, "FSDP2": 4, "HSDP 2x2": 4,
    "TP x FSDP 2x2 row": 4, "TP x FSDP 2x2 col": 4, "CPU offload": 2,
}  # fmt: skip


class Unit(nn.Module):
    def __init__(self, name: str, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        for key, shape in UNITS[name].items():
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()) + seed)
            value = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(key, nn.Parameter(value, requires_grad=key != "frozen"))
        if name == "c":
            self.tied_again = self.tied


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        for name in UNITS:
            self.add_module(name, Unit(name, dtype, seed))

    def forward(self) -> torch.Tensor:
        return sum(p.float().square().sum() for p in self.parameters())  # type: ignore[return-value]


def build(wrapper: str, make, seed: int = 0, dtype: torch.dtype = torch.bfloat16):
    model: nn.Module = Model(dtype, seed)
    if wrapper == "DDP":
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif wrapper.startswith("FSDP1"):
        options = {"use_orig_params": wrapper == "FSDP1 orig", "device_id": torch.device("cpu")}
        for name in UNITS:
            setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
        model = FullyShardedDataParallel(model, **options)
    elif wrapper != "single":
        mesh, offload = _mesh(wrapper), None
        if wrapper.startswith("TP"):
            for unit in model.children():
                for key, p in list(unit.named_parameters()):
                    placement = Shard(1 if wrapper.endswith("row") and key in ("square", "wide", "long") else 0)  # fmt: skip
                    local = distribute_tensor(p.detach(), mesh["tp"], [placement])
                    setattr(unit, key, nn.Parameter(local, requires_grad=p.requires_grad))
                    if key == "tied":
                        unit.tied_again = unit.tied
            mesh = mesh["dp"]
        if wrapper == "CPU offload":
            offload = CPUOffloadPolicy(pin_memory=False)
        options = {"mesh": mesh, **({"offload_policy": offload} if offload else {})}
        for unit in model.children():
            fully_shard(unit, **options)
        fully_shard(model, **options)
    opt = make(model.named_parameters())
    if wrapper.startswith("FSDP1"):
        fsdp1.bind(model, opt)
    return model, opt


def _mesh(wrapper: str):
    ranks = dist.get_world_size()
    if wrapper == "HSDP 2x2":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    if wrapper.startswith("TP"):
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (ranks,))


def global_gradient(name: str, step: int, shape, dtype: torch.dtype) -> torch.Tensor:
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def set_grads(model: nn.Module, opt, step: int) -> None:
    """The gradient of a parameter depends on its name and the step alone."""
    for _, p, name, _ in opt._members():
        name = clean_name(p.name if isinstance(p, shard.Piece) else name)
        if name in ("d.never", "e.frozen"):
            continue
        grad = global_gradient(name, step, p.shape, p.dtype)
        if isinstance(p, shard.Piece):  # as FSDP1 leaves it, by its own records
            owner = p.owner
            if p.alone:
                begin, end = p.elements(p.flat.rank)
                owner.grad = grad.reshape(-1)[begin:end].clone() if end > begin else None
                continue
            if owner.grad is None:
                owner.grad = torch.zeros_like(owner)
            info = owner._shard_param_infos[owner._fqns.index(name.rpartition(".")[2])]
            if info.in_shard:
                begin, end = info.intra_param_start_idx, info.intra_param_end_idx + 1
                at = info.offset_in_shard
                owner.grad[at : at + end - begin] = grad.reshape(-1)[begin:end]
        elif isinstance(p, DTensor):
            p.grad = _placed(grad, p)
        else:
            p.grad = grad


def _placed(grad: torch.Tensor, p: DTensor) -> DTensor:
    """Cut as wrappers cut: by tensor parallelism first, which is the mesh's last dimension."""
    local = grad
    for i in reversed(range(p.device_mesh.ndim)):
        dim = getattr(p.placements[i], "dim", None)
        if dim is not None:
            chunks = torch.chunk(local, p.device_mesh.size(i), dim)
            at = p.device_mesh.get_local_rank(i)
            local = chunks[at] if at < len(chunks) else local.narrow(dim, 0, 0)
    return DTensor.from_local(
        local.contiguous(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=grad.stride()
    )  # fmt: skip


def whole(t):
    t = t.detach()
    return t.full_tensor() if isinstance(t, DTensor) else t


def _whole_weight(p) -> torch.Tensor:
    if not isinstance(p, shard.Piece):
        return whole(p)
    full = torch.zeros(p.numel, dtype=p.dtype)
    begin, end = p.elements(p.flat.rank)
    full[begin:end] = p.value
    bits = full.view(torch.uint8)
    dist.all_reduce(bits)  # each element from one
    return bits.view(p.dtype).reshape(p.shape)


def digest(opt, steps: int) -> dict[str, str]:
    """Of each parameter's weight and state."""
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
        if kept and name != "d.never":
            assert kept["step"] == steps, f"{name} is at step {kept['step']} here, not {steps}"
    return found


def state_of(wrapper: str, model, opt) -> dict:
    if wrapper.startswith("FSDP1"):
        return {"model": get_model_state_dict(model), "optim": fsdp1.get_state_dict(opt)}
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)}


def save(wrapper: str, model, opt, path: pathlib.Path) -> None:
    dcp.save(state_of(wrapper, model, opt), checkpoint_id=path)


def load(wrapper: str, model, opt, path: pathlib.Path) -> None:
    state = state_of(wrapper, model, opt)
    dcp.load(state, checkpoint_id=path)
    if wrapper == "DDP":  # set_model_state_dict does not find tied parameters there
        model.module.load_state_dict(state["model"])
    else:
        set_model_state_dict(model, state["model"])
    if wrapper.startswith("FSDP1"):
        fsdp1.set_state_dict(opt, state["optim"])
    else:
        set_optimizer_state_dict(model, opt, state["optim"])


def train(wrapper: str, formats: list[str], folder: str, steps: int = 10) -> dict:
    """Digests after so many steps, by format; saves."""
    made = {}
    for name in formats:
        model, opt = build(wrapper, FORMATS[name])
        torch.manual_seed(dist.get_rank())  # must not matter
        for step in range(steps):
            set_grads(model, opt, step)
            opt.step()
            opt.zero_grad()
        made[name] = digest(opt, steps)
        save(wrapper, model, opt, pathlib.Path(folder) / f"{wrapper} {name}")
    return made


def resume(wrapper: str, jobs: list[tuple[str, str]], folder: str, steps: int = 10) -> dict:
    """Digests after so many steps more from what another wrapper saved, by (format, that wrapper)."""
    made = {}
    for name, source in jobs:
        model, opt = build(wrapper, FORMATS[name], seed=1)
        load(wrapper, model, opt, pathlib.Path(folder) / f"{source} {name}")
        for step in range(steps, 2 * steps):
            set_grads(model, opt, step)
            opt.step()
            opt.zero_grad()
        made[name, source] = digest(opt, 2 * steps)
    return made
