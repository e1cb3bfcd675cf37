"""What a rank does in test_muon_sharding.py: Muon on sharded matrices beside the same in one
process.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowbit
from lowbit import ops, sharding
from lowbit.step import muon as muon_step
from tests.sharding.same_bytes import equal
from tests.support.ranks.resume_worker import digests, train, wrapped
from tests.support.wrap import shared_mesh

# Uneven on any number of ranks, fewer rows than ranks, a batch, fused QKV, a vector.
SHAPES = [(48, 200), (200, 48), (77, 130), (130, 77), (2, 300), (4, 24, 40), (3 * 32, 64), (50,)]
QKV = SHAPES.index((96, 64))
STEPS = 4
# Of the grid: beyond one block of a product in every direction, uneven, a batch, a fused QKV.
GRID = [(272, 1040), (1040, 272), (77, 1000), (1000, 77), (4, 96, 160), (3 * 128, 128)]
LARGE_STEPS, GRID_STEPS = 2, 10  # the two large matrices take most of the time
# The dimension that tensor parallelism cuts of each: columns, rows, rows of a batch's matrices.
# FSDP2 cuts dimension 0 again.
TENSOR_PARALLEL = {0: 1, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 0}
# Experts by expert parallelism, whose rows FSDP2 cuts.
EXPERT_PARALLEL = {5: 0}
WAYS = {
    "8bit": {},
    "float32": {"state_format": "float32", "adjust_lr_fn": "match_rms_adamw"},
    "parts": {"split": {f"p{QKV}": (64, 16, 16)}, "nesterov": False},
    "row": {"state_format": lowbit.scaled("dynamic8", scale="row", rounding="stochastic")},
    "tensor": {"state_format": lowbit.scaled("dynamic8", scale="tensor")},
    "normuon": {
        "normuon_beta2": 0.9,
        "cautious_weight_decay": True,
        "weight_decay": 0.5,
        "split": {f"p{QKV}": 3},
    },
    "grid": {"split": {"p4": 2, "p5": 3}},
    "kahan": {"param_format": "bfloat16_kahan", "overrides": None},
}


class Model(nn.Module):
    def __init__(
        self,
        dtype: torch.dtype,
        place: Callable[[int, torch.Tensor], torch.Tensor],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            generator = torch.Generator().manual_seed(i)
            value = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(place(i, value)))


def made(kind: str, way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer. `kind`: how it is sharded, with the mesh's shape where that has
    two or three dimensions, such as "tp 2 2".
    """
    dtype = torch.bfloat16 if way == "kahan" else torch.float32
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    shapes = GRID if way == "grid" else SHAPES
    kind, *sizes = kind.split()
    names = {
        "fsdp2": ("s",),
        "hsdp": ("r", "s"),
        "tp": ("s", "t"),
        "ep": ("s", "t"),
        "columns": ("t",),
    }
    if kind in ("one", "ddp"):
        model = Model(dtype, lambda i, value: value, shapes)
    else:
        mesh = shared_mesh(tuple(map(int, sizes)) or (ranks,), names[kind])
        inner = {"tp": TENSOR_PARALLEL, "ep": EXPERT_PARALLEL, "columns": {5: 2, 0: 0, 1: 1}}.get(
            kind, {}
        )
        # Scales that follow no cut rows of a batch's matrices.
        rows_alone = way in (
            "row",
            "tensor",
        )

        def place(i: int, value: torch.Tensor) -> torch.Tensor:
            if i not in inner or (rows_alone and value.dim() == 3 and inner[i] == 1):
                return value
            return distribute_tensor(value, mesh["t"], [Shard(inner[i])], src_data_rank=None)

        model = Model(dtype, place, shapes)
        outer = tuple(name for name in names[kind] if name != "t")
        by_columns = {
            p
            for i, p in enumerate(model.parameters())
            if kind == "ep" and i in EXPERT_PARALLEL and not rows_alone
        }
        if outer:
            fully_shard(
                model,
                mesh=mesh[outer],
                shard_placement_fn=lambda p: Shard(1) if p in by_columns else None,
            )
    opt = lowbit.MuonWithAdamW(lowbit.muon_param_groups(model), lr=0.02, min_numel=0, **WAYS[way])
    return model, opt


def placed_like(p: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A whole tensor's part that this rank has of p; torch distributes no strided placements."""
    if not isinstance(p, DTensor):
        return whole
    if Shard(2) in p.placements:
        return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
    part = sharding.part(p, "p")
    for dim, (begin, length) in enumerate(zip(part.offset, part.local, strict=True)):
        whole = whole.narrow(dim, begin, length)
    return sharding.like(p, whole.contiguous(), part.shape)


def give(model: nn.Module, t: int, *without: str) -> None:
    """Gives parameters the gradients of a step, but for some."""
    for i, (name, p) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(1000 * t + i)
        grad = (torch.randn(tuple(p.shape), generator=generator) * 0.1).to(p.dtype)
        p.grad = None if name.removeprefix("module.") in without else placed_like(p, grad)


def step(model: nn.Module, opt: torch.optim.Optimizer, t: int, without: str = "") -> None:
    give(model, t, without)
    opt.step()


def bits(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{n} {which}": t.detach()
        for n, p in model.named_parameters()
        for which, t in [("", p), *opt.state[p].items()]
    }


@functools.cache
def alone(way: str) -> dict[str, torch.Tensor]:
    model, opt = made("one", way)
    for t in range(STEPS):
        step(model, opt, t, "p1" if t == 2 else "")
    return bits(model, opt)


def differing(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    return [
        key
        for key in sorted(found.keys() | want.keys())
        if key not in found or key not in want or not equal(found[key], want[key])
    ]


@contextlib.contextmanager
def rounds_of(numel: int) -> Iterator[None]:
    """Exchanges of at least so many elements."""
    before, muon_step.MIN_ROUND_NUMEL = muon_step.MIN_ROUND_NUMEL, numel
    try:
        yield
    finally:
        muon_step.MIN_ROUND_NUMEL = before


def compare(kind: str, way: str, numel: int = muon_step.MIN_ROUND_NUMEL) -> list[str]:
    """What is not, byte for byte, this rank's part of what one process has."""
    model, opt = made(kind, way)
    with rounds_of(numel):
        for t in range(STEPS):
            step(model, opt, t, "p1" if t == 2 else "")
    return differing(bits(model, opt), alone(way))


def grid(
    kind: str, file: pathlib.Path, settings: Sequence[tuple[str, int]], large: int = LARGE_STEPS
) -> list[str]:
    """What differs from one process, for each instruction set and number of threads.
    "one" writes the file.
    """
    before, found = lowbit.catalog()["isa"], []
    for isa, threads in settings:
        ops.set_isa(isa)
        torch.set_num_threads(threads)
        try:
            model, opt = made(kind, "grid")
            if kind == "ddp":
                model = nn.parallel.DistributedDataParallel(model)
            for t in range(GRID_STEPS):
                give(model, t, *(["p0", "p1"] if t >= large else []))
                opt.step()
        finally:
            ops.set_isa(before)
            torch.set_num_threads(1)
        here = {key.removeprefix("module."): t for key, t in bits(model, opt).items()}
        if kind == "one" and not file.exists():
            torch.save(here, file)
        wrong = differing(here, torch.load(file, mmap=True))
        found += [f"{key} ({isa}, {threads} threads)" for key in wrong]
    return found


def surrounded(kind: str) -> list[str]:
    """What differs from one process after clipping, under a scaler's divisor,
    and in a step that overflowed.
    """
    runs = []
    for where in (kind, "one"):
        model, opt = made(where, "normuon")
        give(model, 0)
        _, divisor = lowbit.clip_scale(model.parameters(), 0.5)
        opt.step(grad_scale=divisor)
        opt.grad_scale, opt.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        step(model, opt, 1)
        opt.found_inf = torch.tensor(1.0)
        step(model, opt, 2)
        runs.append(bits(model, opt))
    assert float(divisor) > 1.0
    return differing(*runs)


def parallel(kind: str) -> nn.Module:
    """Two layers that tensor parallelism cuts by rows and by columns, under FSDP2;
    "one": the same in one process.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24))
    if kind == "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("s", "t"))
        parallelize_module(model, mesh["t"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["s"])
    return model


def trained(early: bool, micro: int) -> list[str]:
    """What differs, under tensor parallelism,
    from the same steps of one process with the same gradients.
    """
    model, plain = parallel("tp"), parallel("one")
    opt, want = (
        lowbit.MuonWithAdamW(lowbit.muon_param_groups(m), lr=0.02, min_numel=0)
        for m in (model, plain)
    )
    accumulator = lowbit.accumulate(model, "float32") if micro > 1 else None
    seen: dict[str, torch.Tensor] = {}
    if early:
        update = opt.step_params

        def kept(params: Any, *rest: Any) -> Any:
            several = list(params)
            names = {p: name for name, p in model.named_parameters()}
            seen.update((names[p], sharding.whole(p.grad)) for _, p in several)
            return update(several, *rest)

        opt.step_params = kept
        lowbit.step_in_backward(model, opt)
    for t in range(3):
        for i in range(micro):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * t + i))
            with (
                accumulator.micro(last=i == micro - 1) if accumulator else contextlib.nullcontext()
            ):
                model(x).square().mean().backward()
        if not early:
            seen.update((name, sharding.whole(p.grad)) for name, p in model.named_parameters())
        for name, p in plain.named_parameters():
            p.grad = seen[name].clone()
        for one in (opt, want):
            one.step()
            one.zero_grad()
    return differing(bits(model, opt), bits(plain, want))


def collectives(kind: str, numel: int = muon_step.MIN_ROUND_NUMEL) -> dict[str, Any]:
    """Those of a step: each with the bytes that this rank sends, its ranks, and the ranks of all
    that have not finished before it.

    Of every exchange of a process group what this rank has and owns in bfloat16.
    """
    model, opt = made(kind, "8bit")
    step(model, opt, 0)
    seen: list[tuple[str, int, list[int], list[list[int]]]] = []
    running: list[list[int]] = []
    names = [
        n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "gather", "scatter"))
    ]
    before = {n: getattr(dist, n) for n in names if callable(getattr(dist, n))}

    def counted(name: str, *args: Any, **keywords: Any) -> Any:
        sent = args[1] if name == "all_to_all_single" else args[0]
        ranks = dist.get_process_group_ranks(keywords.get("group"))
        size = sent.nbytes if isinstance(sent, torch.Tensor) else 0
        seen.append((name, size, ranks, running.copy()))
        work = before[name](*args, **keywords)
        if not keywords.get("async_op"):
            return work
        running.append(ranks)

        def wait() -> None:
            work.wait()
            running.remove(ranks)

        return types.SimpleNamespace(wait=wait)

    for name in before:
        setattr(dist, name, functools.partial(counted, name))
    try:
        with rounds_of(numel):
            step(model, opt, 1)
    finally:
        for name, plain in before.items():
            setattr(dist, name, plain)
    groups: dict[Any, list[Any]] = {}
    for _, p, lay in opt.laid_out():
        if getattr(lay, "spread", None) and not lay.home:
            groups.setdefault(lay.group, []).append(
                types.SimpleNamespace(lay=lay, owners=opt._owners[p])
            )
    exchanges = []
    with rounds_of(numel):
        rounds = [
            (group, one) for group, several in groups.items() for one in muon_step._rounds(several)
        ]
    for group, several in rounds:
        me = dist.get_rank(group)
        owned = [(one.lay.spread, owner, one.lay) for one in several for owner in one.owners]
        exchanges.append(
            {
                "has": sum(2 * b.numel(me) for b, owner, _ in owned if b.of_one_replica(me, owner)),
                "owns": sum(
                    2 * b.numel(r) for b, owner, _ in owned if owner == me for r in range(len(b.of))
                ),
                "costs": [(owner, lay.cost) for _, owner, lay in owned],
                "bytes": sum(2 * math.prod(lay.part.shape[-2:]) for _, _, lay in owned),
                "replicas": len(set(owned[0][0].replicas)),
                "ranks": dist.get_process_group_ranks(group),
            }
        )
    return {"seen": seen, "exchanges": exchanges}


def saved(kind: str, folder: pathlib.Path) -> dict[str, dict[str, str]]:
    model, opt = made(kind, "normuon")
    for t in range(STEPS):
        step(model, opt, t)
    dcp.save(
        {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)},
        checkpoint_id=folder,
    )
    before = digests(model, opt)
    step(model, opt, STEPS)
    return {"before": before, "after": digests(model, opt)}


def loaded(kind: str, folder: pathlib.Path) -> dict[str, dict[str, str]]:
    model, opt = made(kind, "normuon")
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, state["optim"])
    before = digests(model, opt)
    step(model, opt, STEPS)
    return {"before": before, "after": digests(model, opt)}


def loaded_momentum() -> list[str]:
    """What differs where torch's momentum is loaded into batches cut on dimension 1 and 2;
    statistics are made as well.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value, momentum, grad = (
        torch.randn(4, 24, 40, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    found = []
    for state_format in ("8bit", "float32"):
        runs = []
        for dim in (None, 1, 2):
            place = (
                (lambda t: t)
                if dim is None
                else functools.partial(
                    distribute_tensor, device_mesh=mesh, placements=[Shard(dim)], src_data_rank=None
                )
            )
            p = nn.Parameter(place(value.clone()))
            opt = lowbit.Muon([("w", p)], state_format=state_format, min_numel=0)
            state = opt.state_dict()
            state["state"] = {0: {"momentum_buffer": momentum, "step": torch.tensor(3.0)}}
            opt.load_state_dict(state)
            p.grad = place(grad.clone())
            opt.step()
            opt.stats(probe=True)
            runs.append({"": p.detach(), **opt.state[p]})
        found += [key for run in runs[1:] for key in differing(run, runs[0])]
    return found


def of_some_ranks() -> list[str]:
    """What differs on a mesh of four ranks, which are not all: its process group is made for it."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    if mesh.get_coordinate() is None:
        return []
    value = torch.randn(48, 200, generator=torch.Generator().manual_seed(0))
    runs = []
    for place in (
        lambda t: distribute_tensor(t, mesh, [Shard(0), Shard(1)], src_data_rank=None),
        lambda t: t,
    ):
        p = nn.Parameter(place(value.clone()))
        opt = lowbit.Muon([("w", p)], min_numel=0)
        for t in range(2):
            p.grad = place(value.roll(t + 1, 0))
            opt.step()
        runs.append({"": p.detach(), **opt.state[p]})
        if isinstance(p, DTensor):
            assert dist.get_process_group_ranks(opt.layouts[p].group) == [0, 1, 2, 3]
    return differing(*runs)


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

    def message(
        mesh: Any, *placements: Any, shape: tuple[int, ...] = (64, 64), **options: Any
    ) -> str:
        p = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
        try:
            lowbit.Muon([("w", p)], **options)
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    return {
        "columns of a batch": message(deep, Shard(1), Shard(2), shape=(4, 64, 64)),
        "bytes": message(flat, Shard(1), shape=(64, 36), state_format="4bit", min_numel=0),
        "replicas": message(deep, Replicate(), Replicate()),
    }
