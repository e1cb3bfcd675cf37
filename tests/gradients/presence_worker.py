"""What a rank does in test_presence.py: gradients that only some ranks have,
such as of experts without tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowbit

SHAPES = [(8, 64, 32), (8, 64, 32), (96, 64), (64,), (40, 512)]
MATRICES = [shape for shape in SHAPES if len(shape) < 3]
STEPS = 10
SCALES = {"exp_avg": lowbit.scaled("dynamic8", scale="tensor")}
REDUCING: dict[str, Callable[..., Any]] = {
    "LAMB": functools.partial(lowbit.LAMB, weight_decay=0.1),
    "Adafactor": lowbit.Adafactor,
    "Adafactor momentum": functools.partial(lowbit.Adafactor, beta1=0.9),
    "CAME": lowbit.CAME,
    "tensor scales": functools.partial(lowbit.AdamW, state_format=SCALES),
    "APOLLO": functools.partial(lowbit.APOLLO, rank=8, update_proj_gap=2),
    "Fira": functools.partial(lowbit.Fira, rank=8, update_proj_gap=2),
    "cautious": functools.partial(lowbit.AdamW, cautious=True),
    "LARS": functools.partial(lowbit.LARS, momentum=0.9),
    "column scales": functools.partial(
        lowbit.Lion, state_format=lowbit.scaled("linear8", scale="column")
    ),
}
FREE: dict[str, Callable[..., Any]] = {
    "AdamW": lowbit.AdamW,
    "AdamW 4bit": functools.partial(lowbit.AdamW, state_format="4bit"),
    "rows": functools.partial(
        lowbit.AdamW, state_format={"exp_avg": lowbit.scaled("dynamic8", scale="row")}
    ),
    "Lion": lowbit.Lion,
}


def has(step: int, number: int, rank: int) -> bool:
    """Whether a rank has a gradient: all of them do, one alone, none,
    and what differs from parameter to parameter.

    After a step in which odd ranks alone lack the first one,
    all have all: what is repeated must not be the lack.
    """
    if step in (0, 1, 5, 7, 9):
        return True
    if step in (6, 8):
        return number > 0 or (rank + step // 2) % 2 == 1
    if number == 3:
        return False
    return (number + rank + step) % 2 == 0


def whole(t: Any) -> torch.Tensor:
    t = t.detach()
    return t.full_tensor() if hasattr(t, "full_tensor") else t.clone()


def bits(name: str, placements: list[Any], mesh: Any, dense: Any = None) -> bool:
    """Whether weights and state are those of one process, for which parts without gradient are
    zeros of a gradient that any rank has.

    Matrices and vectors lie on the mesh `dense` by their first dimension, if one is given, and
    every rank has their gradients, as FSDP2 sees to.
    """
    gen = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=gen) for shape in SHAPES]
    values = [v.bfloat16() if i % 2 else v for i, v in enumerate(values)]

    def place(t: torch.Tensor) -> Any:
        if dense is not None and t.dim() < 3:
            return distribute_tensor(t, dense, [Shard(0)], src_data_rank=None)
        mine = (
            placements if t.dim() > 1 else [p if p == Replicate() else Shard(0) for p in placements]
        )
        return distribute_tensor(t, mesh, mine, src_data_rank=None)

    alone = [nn.Parameter(v.clone()) for v in values]
    shared = [nn.Parameter(place(v.clone())) for v in values]
    make = {**REDUCING, **FREE}[name]
    one = make([(f"p{i}", p) for i, p in enumerate(alone)], lr=1e-2, min_numel=64)
    opt = make([(f"p{i}", p) for i, p in enumerate(shared)], lr=1e-2, min_numel=64)

    def here(step: int, number: int, rank: int) -> bool:
        return (dense is not None and len(SHAPES[number]) < 3) or has(step, number, rank)

    rank = dist.get_rank() // (2 if Replicate() in placements else 1)
    rank = dist.get_rank() % 2 if placements[0] == Replicate() else rank
    ranks = dist.get_world_size() // (2 if Replicate() in placements else 1)
    for step in range(STEPS):
        for i, (p, q) in enumerate(zip(alone, shared, strict=True)):
            grad = place((torch.randn(p.shape, generator=gen) * 0.1).to(p.dtype))
            if not here(step, i, rank):
                grad.to_local().zero_()
            somewhere = any(here(step, i, r) for r in range(ranks))
            p.grad = whole(grad) if somewhere else None
            q.grad = grad if here(step, i, rank) else None
        one.step()
        opt.step()
    return all(
        torch.equal(whole(x), y)
        for p, q in zip(alone, shared, strict=True)
        for x, y in zip((q, *opt.state[q].values()), (p, *one.state[p].values()), strict=True)
    )


def found(ranks: int) -> dict[str, bool]:
    made = {}
    if ranks == 2:
        mesh = init_device_mesh("cpu", (2,))
        return {name: bits(name, [Shard(0)], mesh) for name in (*REDUCING, *FREE)}
    mesh = init_device_mesh("cpu", (2, 2))
    for name in ("LAMB", "Adafactor", "APOLLO"):
        made[f"{name}, replicated"] = bits(name, [Replicate(), Shard(0)], mesh)
    made["LAMB, both dimensions"] = bits("LAMB", [Shard(0), Shard(1)], mesh)
    flat = init_device_mesh("cpu", (4,))
    for name in ("AdamW", "AdamW 4bit", "LAMB", "Adafactor", "APOLLO", "column scales"):
        made[f"{name}, experts on a mesh of their own"] = bits(
            name, [Shard(0), Shard(0)], mesh, flat
        )
    return made


def collectives() -> dict[str, list[int]]:
    """Of each step: of rules that reduce, first as they are and then without any agreement; and of
    those that do not, whatever has a gradient, with experts and without."""
    mesh = init_device_mesh("cpu", (2,))
    counts: dict[str, list[int]] = {}

    def run(
        make: Callable[..., Any],
        agrees: bool,
        ragged: bool,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
    ) -> list[int]:
        params = [
            nn.Parameter(distribute_tensor(torch.ones(s), mesh, [Shard(0)], src_data_rank=None))
            for s in shapes
        ]
        opt = make([(f"p{i}", p) for i, p in enumerate(params)], min_numel=64)
        if not agrees:
            opt.lacking_gradients = lambda *_: []
        made = []
        for step in range(4):
            for i, p in enumerate(params):
                wanted = not ragged or has(step, i, dist.get_rank())
                p.grad = torch.ones_like(p) if wanted else None
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
                opt.step()
            made.append(calls.call_count)
        return made

    for name in ("LAMB", "Adafactor", "tensor scales"):
        counts[name] = run(REDUCING[name], True, False)
        counts[f"{name}, alone"] = run(REDUCING[name], False, False)
    for name, make in FREE.items():
        counts[f"{name}, free"] = run(make, True, True, MATRICES)
        counts[f"{name}, experts"] = run(make, True, True)
    plain = [nn.Parameter(torch.ones(96, 64))]
    opt = lowbit.LAMB(plain)
    if dist.get_rank() == 0:  # parameters of their own: nothing is shared
        plain[0].grad = torch.ones_like(plain[0])
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        opt.step()
    counts["plain, free"] = [calls.call_count]
    return counts


def probed() -> list[bool]:
    """`stats(probe=True)` ends where gradients differ, and leaves them as they are."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.ones(96, 64), mesh, [Shard(0)], src_data_rank=None))
    opt = lowbit.LAMB([("p", p)])
    if dist.get_rank() == 0:
        p.grad = torch.ones_like(p)
    made = opt.stats(probe=True)["parameters"]["p"]
    return ["updates" in made, (p.grad is None) == (dist.get_rank() == 1)]


def in_backward() -> dict[str, bool]:
    """Whether steps in the backward pass have the bits of one process where a rank's experts get no
    token in some steps.
    """
    mesh = init_device_mesh("cpu", (2,))
    equal = {}
    for name in ("AdamW", "LAMB", "Adafactor"):
        gen = torch.Generator().manual_seed(4)
        values = [torch.randn(shape, generator=gen) for shape in SHAPES[:3]]
        alone = [nn.Parameter(v.clone()) for v in values]
        model = nn.ParameterList(
            nn.Parameter(distribute_tensor(v.clone(), mesh, [Shard(0)], src_data_rank=None))
            for v in values
        )
        make = {**REDUCING, **FREE}[name]
        one = make([(str(i), p) for i, p in enumerate(alone)], lr=1e-2, min_numel=64)
        opt = make(model.named_parameters(), lr=1e-2, min_numel=64)
        try:
            lowbit.step_in_backward(model, opt, scaler=torch.amp.GradScaler("cpu"))
        except ValueError as error:
            equal[f"{name} with a scaler"] = "get no token" in str(error)
        lowbit.step_in_backward(model, opt)
        for step in range(STEPS):
            loss = torch.zeros(())
            for i, (p, q) in enumerate(zip(alone, model, strict=True)):
                full = torch.randn(p.shape, generator=gen) * 0.1
                grad = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
                there = [i == 2 or has(step, i, r) for r in range(2)]
                if there[dist.get_rank()]:
                    loss = loss + (q.to_local() * grad.to_local()).sum()
                parts = zip(full.chunk(2), there, strict=True)
                p.grad = (
                    torch.cat([part * has_one for part, has_one in parts]) if any(there) else None
                )
            loss.backward()
            opt.step()
            one.step()
            opt.zero_grad()
        equal[name] = all(
            torch.equal(whole(x), y)
            for p, q in zip(alone, model, strict=True)
            for x, y in zip((q, *opt.state[q].values()), (p, *one.state[p].values()), strict=True)
        )
    return equal


def probe_between() -> list[bool]:
    """Whether a probe between steps changes no bit of the next one,
    of which a rank lacks a gradient.
    """
    mesh = init_device_mesh("cpu", (2,))
    same = []
    for name in ("AdamW", "LAMB"):
        runs = []
        for probe in (False, True):
            gen = torch.Generator().manual_seed(5)
            params = [
                nn.Parameter(
                    distribute_tensor(
                        torch.randn(s, generator=gen), mesh, [Shard(0)], src_data_rank=None
                    )
                )
                for s in SHAPES[:3]
            ]
            opt = {**REDUCING, **FREE}[name](
                [(str(i), p) for i, p in enumerate(params)], min_numel=64
            )
            for step in range(5):
                for i, p in enumerate(params):
                    grad = distribute_tensor(
                        torch.randn(p.shape, generator=gen), mesh, [Shard(0)], src_data_rank=None
                    )
                    p.grad = None if step == 3 and i == 0 and dist.get_rank() == 1 else grad
                opt.step()
                opt.zero_grad()
                if probe and step == 2:
                    opt.stats(probe=True)
            runs.append([t for p in params for t in (whole(p), *map(whole, opt.state[p].values()))])
        same.append(all(map(torch.equal, *runs)))
    return same


def convolutions() -> tuple[int, bool]:
    """How many collectives a step of Conv1d takes under FSDP2,
    and whether `step_in_backward` takes a scaler.
    """
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Conv1d(32, 64, 3), nn.Conv1d(64, 32, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    opt = lowbit.AdamW(model.named_parameters(), min_numel=64)
    model(torch.ones(2, 32, 16)).sum().backward()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        opt.step()
    lowbit.step_in_backward(model, opt, scaler=torch.amp.GradScaler("cpu"))
    return calls.call_count, True
