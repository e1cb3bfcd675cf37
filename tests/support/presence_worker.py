"""What a rank does in test_presence.py: gradients that only some ranks have, such as of experts without tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowbit

SHAPES = [(8, 64, 32), (8, 64, 32), (96, 64), (64,), (40, 512)]
STEPS = 6
SCALES = {"exp_avg": lowbit.scaled("dynamic8", scale="tensor")}
REDUCING: dict[str, Callable[..., Any]] = {
    "LAMB": functools.partial(lowbit.LAMB, weight_decay=0.1),
    "Adafactor": lowbit.Adafactor,
    "Adafactor momentum": functools.partial(lowbit.Adafactor, beta1=0.9),
    "CAME": lowbit.CAME,
    "tensor scales": functools.partial(lowbit.AdamW, state_format=SCALES),
    "APOLLO": functools.partial(lowbit.APOLLO, rank=8, update_proj_gap=2),
    "Fira": functools.partial(lowbit.Fira, rank=8, update_proj_gap=2),
}
FREE: dict[str, Callable[..., Any]] = {
    "AdamW": lowbit.AdamW,
    "AdamW 4bit": functools.partial(lowbit.AdamW, state_format="4bit"),
    "rows": functools.partial(lowbit.AdamW, state_format={"exp_avg": lowbit.scaled("dynamic8", scale="row")}),
    "Lion": lowbit.Lion,
}  # fmt: skip


def has(step: int, number: int, rank: int) -> bool:
    """Whether a rank has a gradient: all of them do, one alone, none, and what differs from parameter to parameter."""
    if step in (0, 1, 5):
        return True
    if number == 3:
        return False
    return (number + rank + step) % 2 == 0


def whole(t: Any) -> torch.Tensor:
    t = t.detach()
    return t.full_tensor() if hasattr(t, "full_tensor") else t.clone()


def bits(name: str, placements: list[Any], mesh: Any) -> bool:
    """Whether weights and state are those of one process, for which parts without gradient are zeros of a gradient that any rank has."""
    gen = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=gen) for shape in SHAPES]
    values = [v.bfloat16() if i % 2 else v for i, v in enumerate(values)]

    def place(t: torch.Tensor) -> Any:
        mine = placements if t.dim() > 1 else [p if p == Replicate() else Shard(0) for p in placements]  # fmt: skip
        return distribute_tensor(t, mesh, mine, src_data_rank=None)

    alone = [nn.Parameter(v.clone()) for v in values]
    shared = [nn.Parameter(place(v.clone())) for v in values]
    make = REDUCING[name]
    one = make([(f"p{i}", p) for i, p in enumerate(alone)], lr=1e-2, min_numel=64)
    opt = make([(f"p{i}", p) for i, p in enumerate(shared)], lr=1e-2, min_numel=64)
    rank = dist.get_rank() // (2 if Replicate() in placements else 1)
    rank = dist.get_rank() % 2 if placements[0] == Replicate() else rank
    ranks = dist.get_world_size() // (2 if Replicate() in placements else 1)
    for step in range(STEPS):
        for i, (p, q) in enumerate(zip(alone, shared, strict=True)):
            grad = place((torch.randn(p.shape, generator=gen) * 0.1).to(p.dtype))
            if not has(step, i, rank):
                grad.to_local().zero_()
            somewhere = any(has(step, i, r) for r in range(ranks))
            p.grad = whole(grad) if somewhere else None
            q.grad = grad if has(step, i, rank) else None
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
        return {name: bits(name, [Shard(0)], mesh) for name in REDUCING}
    mesh = init_device_mesh("cpu", (2, 2))
    for name in ("LAMB", "Adafactor", "APOLLO"):
        made[f"{name}, replicated"] = bits(name, [Replicate(), Shard(0)], mesh)
    made["LAMB, both dimensions"] = bits("LAMB", [Shard(0), Shard(1)], mesh)
    return made


def collectives() -> dict[str, list[int]]:
    """Of each step: of rules that reduce, first as they are and then without any agreement; and of those that do not, whatever has a gradient."""
    mesh = init_device_mesh("cpu", (2,))
    counts: dict[str, list[int]] = {}

    def run(make: Callable[..., Any], agrees: bool, ragged: bool) -> list[int]:
        params = [
            nn.Parameter(distribute_tensor(torch.ones(s), mesh, [Shard(0)], src_data_rank=None))
            for s in SHAPES
        ]
        opt = make([(f"p{i}", p) for i, p in enumerate(params)], min_numel=64)
        if not agrees:
            opt._lacking = lambda *_: []
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
        counts[f"{name}, free"] = run(make, True, True)
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
