"""What a rank does in test_sharding.py: train on the same global gradients;
digests of everything.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lowbit
from lowbit import ops
from lowbit.sharding import whole

SHAPES = [(448, 896), (360, 1408), (1000, 77), (7, 4096), (3, 5, 64), (1000,)]
STEPS = 8


class Shapes(nn.Module):
    """One parameter of each shape, the scalar where the wrapper takes it,
    one that never gets a gradient, one frozen.
    """

    def __init__(self, dtype: torch.dtype, scalar: bool, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for i, shape in enumerate([*SHAPES, ()] if scalar else SHAPES):
            value = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(value))
        self.never = nn.Parameter(torch.ones(70, 70, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(5, dtype=dtype), requires_grad=False)

    def forward(self) -> torch.Tensor:
        squares = [p.float().square().sum() for p in self.parameters()]
        return sum(squares)  # type: ignore[return-value]


@functools.cache
def made_grad(shape: torch.Size, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def set_grads(model: nn.Module, step: int) -> None:
    """The gradient of a parameter depends on its name and the step alone; the scalar's too."""
    for name, p in model.named_parameters():
        name = name.removeprefix("module.")
        if name in ("never", "frozen"):
            continue
        grad = made_grad(p.shape, p.dtype, 1000 * step + int(name[1:])).clone()
        if isinstance(p, DTensor):  # every rank has all of it: nothing need be sent
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad


def digest(model: nn.Module, opt: torch.optim.Optimizer, without: tuple[str, ...] = ()) -> str:
    h = hashlib.sha256()
    for name, p in model.named_parameters():
        name = name.removeprefix("module.")
        if name in without:
            continue
        for key, t in [("", p), *sorted(opt.state[p].items())]:
            t = whole(t.detach()).contiguous()
            h.update(f"{name} {key} {t.dtype} {tuple(t.shape)}".encode())
            h.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def build(
    dtype: torch.dtype, mode: str, ranks: int, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = Shapes(dtype, scalar=mode in ("single", "ddp"), seed=seed)
    if mode == "fsdp":  # refuses scalars
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return model, lowbit.AdamW(model.named_parameters(), lr=1e-2, seed=5)


def run_bits(mode: str, ranks: int) -> dict[str, str]:
    """Digests after STEPS steps for both dtypes and every instruction set; the scalar apart,
    since FSDP2 has none.
    """
    out = {}
    before = ops.catalog()["isa"]
    for dtype in (torch.bfloat16, torch.float32):
        for isa in ops.catalog()["isas"]:
            ops.set_isa(isa)
            # torch's generator must not matter.
            torch.manual_seed(100 + (dist.get_rank() if dist.is_initialized() else 0))
            model, opt = build(dtype, mode, ranks)
            state = torch.random.get_rng_state()
            for step in range(STEPS):
                set_grads(model, step)
                opt.step()
            assert torch.equal(state, torch.random.get_rng_state()), (
                "torch's random state was touched"
            )
            out[f"{dtype} {isa}"] = digest(model, opt, without=(f"p{len(SHAPES)}",))
            if mode != "fsdp":
                out[f"{dtype} {isa} with scalar"] = digest(model, opt)
            if mode == "ddp":  # every replica has the same
                digests: list = [None] * ranks
                dist.all_gather_object(digests, digest(model, opt))
                assert len(set(digests)) == 1, "replicas differ"
            if mode == "fsdp":
                clipped = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                assert whole(clipped).isfinite() and opt.state[model.p3]["step"] == STEPS, (
                    "7 rows: some ranks hold none"
                )
    ops.set_isa(before)
    return out


def state_of(model: nn.Module, opt: torch.optim.Optimizer, flat: bool) -> dict:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, opt, options=options),
    }


def run_checkpoint(mode: str, ranks: int, path: pathlib.Path, save: bool) -> dict[str, str]:
    """Saves, or loads what was saved before; then five more steps. Nested, flattened,
    and saved asynchronously.
    """
    out = {}
    alone = not dist.is_initialized()
    for kind in ("nested", "flat", "async"):
        flat, target = kind == "flat", path / kind
        model, opt = build(torch.bfloat16, mode, ranks, seed=0 if save else 1)
        if save:
            for step in range(5):
                set_grads(model, step)
                opt.step()
            if kind == "async":
                dcp.async_save(state_of(model, opt, flat), checkpoint_id=target).result()
            else:
                dcp.save(state_of(model, opt, flat), checkpoint_id=target, no_dist=alone)
        else:
            saved = state_of(model, opt, flat)
            dcp.load(saved, checkpoint_id=target, no_dist=alone)
            set_model_state_dict(model, saved["model"])
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            set_optimizer_state_dict(model, opt, saved["optim"], options=options)
            for p in model.parameters():
                for key, t in opt.state[p].items():
                    wanted = {
                        "step": torch.float32,
                        "stream": torch.int64,
                        "shape": torch.int64,
                    }.get(key)
                    wanted = wanted or (
                        torch.uint8 if key.endswith(("dynamic8", "unsigned")) else torch.float32
                    )
                    assert t.dtype == wanted, f"{key} became {t.dtype}"
        out[kind] = digest(model, opt)
        again, opt2 = build(torch.bfloat16, mode, ranks, seed=2)
        lowbit.load_optimizer(opt2, target)  # the optimizer alone, by its own reader
        for p, q in zip(again.parameters(), model.parameters(), strict=True):
            assert set(opt2.state[p]) == set(opt.state[q])
            assert all(
                torch.equal(whole(t), whole(opt.state[q][key])) for key, t in opt2.state[p].items()
            )
        for step in range(5, 10):
            set_grads(model, step)
            opt.step()
        out[kind + ", five more steps"] = digest(model, opt)
    return out


def other_ranks() -> dict[str, str]:
    """What is said of parameters on meshes of some of three ranks, all of them in one optimizer."""
    meshes = {"first": DeviceMesh("cpu", [0, 1]), "last": DeviceMesh("cpu", [2])}
    out = {}
    for what, placement in (("cut", Shard(0)), ("whole", Replicate())):
        params = {
            name: nn.Parameter(distribute_tensor(torch.ones(64, 128), mesh, [placement]))
            for name, mesh in meshes.items()
        }
        own = {"last" if dist.get_rank() == 2 else "first"}
        mine = [(name, p) for name, p in params.items() if name in own]
        for _, p in mine:
            p.grad = distribute_tensor(torch.ones(64, 128), p.device_mesh, [placement])

        def stepped(make, named) -> str:
            try:
                make(named).step()
            except ValueError as error:
                return str(error)
            return "stepped"

        out[f"AdamW, {what}"] = stepped(lowbit.AdamW, params.items())
        out[f"Muon, {what}"] = stepped(lowbit.Muon, params.items())
        out[f"own, {what}"] = stepped(lowbit.AdamW, mine)
        try:
            lowbit.clip_grad_norm_(params.values(), 1.0)
            out[f"clipped, {what}"] = "stepped"
        except ValueError as error:
            out[f"clipped, {what}"] = str(error)
    return out
