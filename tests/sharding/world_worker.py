"""What a rank does in test_world.py: every rule, format and scale on the same global gradients,
sharded over the ranks, beside the same in one process.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowbit
from lowbit import ops
from tests.sharding.same_bytes import equal
from tests.support.groups import begin

SHAPES = [(96, 64), (37, 130), (2, 2080), (9, 512), (6, 5, 160), (4, 3, 10, 40), (70,), (1024, 1)]
COLUMNS = [(9, 512)]  # two halves of one block of 256
STEPS = 4


def cases() -> Iterator[tuple[str, Callable[..., torch.optim.Optimizer]]]:
    """Everything that one process and many must agree on."""
    for entry in ops.catalog()["state"]:
        slot = "exp_avg" if entry["signed"] else "exp_avg_sq"
        for rounding in ("nearest", "stochastic") if entry["scaled"] else ("nearest",):
            spec = lowbit.scaled(entry["name"], rounding=rounding)
            yield (
                f"AdamW {entry['name']} {rounding}",
                functools.partial(lowbit.AdamW, state_format={slot: spec}),
            )
    for block in (32, 64, 512, 1024, 2048):
        specs = {"exp_avg": lowbit.scaled("dynamic4", block=block)}
        yield f"AdamW block {block}", functools.partial(lowbit.AdamW, state_format=specs)
    yield from rules()


def rules() -> Iterator[tuple[str, Callable[..., torch.optim.Optimizer]]]:
    """Every rule, and every scale that is reduced over the shards."""
    for scale in ("row", "column", "tensor", "rank1"):
        specs = {
            "exp_avg": lowbit.scaled("dynamic8", scale=scale, rounding="stochastic"),
            "exp_avg_sq": lowbit.scaled("power1_4_unsigned", scale=scale),
        }
        yield f"AdamW {scale}", functools.partial(lowbit.AdamW, state_format=specs)
    yield "SGD", functools.partial(lowbit.SGD, lr=0.1)
    yield "SGD momentum", functools.partial(lowbit.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    yield "Lion", functools.partial(lowbit.Lion, weight_decay=0.1)
    yield "RMSprop", functools.partial(lowbit.RMSprop, centered=True, momentum=0.9)
    yield "Adagrad", functools.partial(lowbit.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1)
    yield "AdamW cautious", functools.partial(lowbit.AdamW, cautious=True)
    yield "Lion cautious", functools.partial(lowbit.Lion, cautious=True, weight_decay=0.1)
    yield "SGD cautious", functools.partial(lowbit.SGD, lr=0.1, momentum=0.9, cautious=True)
    yield (
        "Schedule-Free",
        functools.partial(lowbit.ScheduleFreeAdamW, lr=0.02, weight_decay=0.1, warmup_steps=3),
    )
    coded_z = {"z": lowbit.scaled("linear8", scale="rank1"), "exp_avg_sq": "4bit"}
    yield "Schedule-Free coded z", functools.partial(lowbit.ScheduleFreeAdamW, state_format=coded_z)
    yield "AdEMAMix", functools.partial(lowbit.AdEMAMix, t_alpha=3, t_beta3=3)
    for entry in ops.catalog()["param"]:
        if entry["dtype"] == "bfloat16":
            yield (
                f"weights {entry['name']}",
                functools.partial(lowbit.AdamW, param_format=entry["name"]),
            )
    factored = {"exp_avg": "dynamic8", "exp_avg_sq": "factored"}
    yield "AdamW factored", functools.partial(lowbit.AdamW, state_format=factored)
    yield "Adam factored", functools.partial(lowbit.Adam, weight_decay=0.1, state_format=factored)
    yield "Adafactor", functools.partial(lowbit.Adafactor, weight_decay=0.1)
    yield "Adafactor Fira", functools.partial(lowbit.Adafactor, fira_margin=0.01, decay_by="alpha")
    yield (
        "Adafactor momentum",
        functools.partial(lowbit.Adafactor, beta1=0.9, beta2=0.99, relative_step=False),
    )
    yield "Adafactor full", functools.partial(lowbit.Adafactor, beta1=0.9, factored=False)
    rank1 = lowbit.scaled("dynamic4", scale="rank1")
    measured = {
        "exp_avg": lowbit.scaled("dynamic8", scale="column", rounding="stochastic"),
        "exp_avg_sq": lowbit.scaled("dynamic8_unsigned", scale="row"),
    }
    yield (
        "Adafactor rank 1",
        functools.partial(lowbit.Adafactor, beta1=0.9, state_format={"exp_avg": rank1}),
    )
    yield "CAME", functools.partial(lowbit.CAME, weight_decay=0.1)
    yield "LAMB", functools.partial(lowbit.LAMB, weight_decay=0.1)
    small = {"update_proj_gap": 2, "weight_decay": 0.1}
    yield "APOLLO", functools.partial(lowbit.APOLLO, rank=8, **small)
    yield (
        "APOLLO cross-tile scales",
        functools.partial(lowbit.APOLLO, rank=20, state_format=measured, **small),
    )
    yield "APOLLO torch", functools.partial(lowbit.APOLLO, rank=4, projection="torch", **small)
    yield "APOLLO-Mini", functools.partial(lowbit.APOLLOMini, **small)
    yield "Fira", functools.partial(lowbit.Fira, rank=8, alpha=0.5, **small)
    low = {"decay_by": "alpha", "fira_margin": 0.01, **small}
    yield "Adafactor in a subspace", functools.partial(lowbit.Adafactor, rank=8, **low)
    yield (
        "Adafactor in a subspace, torch",
        functools.partial(
            lowbit.Adafactor,
            rank=4,
            projection="torch",
            scale_type="tensor",
            state_format=measured["exp_avg_sq"],
            **low,
        ),
    )
    yield "Muon", matrices_by_muon
    yield "LARS", functools.partial(lowbit.LARS, lr=0.1, momentum=0.9, weight_decay=0.1)


def matrices_by_muon(params: list[Any]) -> torch.optim.Optimizer:
    """Muon where it can, AdamW for the others."""
    groups = [{"params": [], "use_muon": of_muon} for of_muon in (True, False)]
    for name, p in params:
        groups[p.dim() not in (2, 3)]["params"].append((name, p))
    return lowbit.MuonWithAdamW(groups, lr=0.02)


def run(
    name: str, make: Callable[..., Any], place: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All weights and state after STEPS steps, as they lie."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    narrow = name.startswith("weights ")  # a parameter format of bfloat16
    values = [v.bfloat16() if narrow or i % 2 else v for i, v in enumerate(values)]
    params = [(f"p{i}", nn.Parameter(place(v))) for i, v in enumerate(values)]
    opt = begin(make(params))
    for _ in range(STEPS):
        for (_, p), shape in zip(params, SHAPES, strict=True):
            p.grad = place((torch.randn(shape, generator=generator) * 0.1).to(p.dtype))
        opt.step()
    if hasattr(opt, "eval"):
        opt.eval()
    return {
        f"{key} {which}": t.detach()
        for key, p in params
        for which, t in [("", p), *opt.state[p].items()]
    }


@functools.cache
def alone(name: str) -> dict[str, torch.Tensor]:
    """What one process has; it knows of no process group."""
    return run(name, dict(cases())[name], lambda t: t)


def differs(name: str, found: dict[str, torch.Tensor]) -> list[str]:
    """What is not, byte for byte, this rank's part of what one process has."""
    want = alone(name)
    return [
        f"{name}: {key}"
        for key in sorted(found.keys() | want.keys())
        if key not in found or key not in want or not equal(found[key], want[key])
    ]


def sharded(mesh: DeviceMesh, placements: list[Any], t: torch.Tensor) -> torch.Tensor:
    """Its part of what every rank has whole, so that nothing need be sent."""
    return distribute_tensor(t, mesh, placements, src_data_rank=None)


def by_columns(mesh: DeviceMesh, t: torch.Tensor) -> torch.Tensor:
    """Cut on dimension 1 where blocks allow it, else on dimension 0."""
    cut = 1 if tuple(t.shape) in COLUMNS else 0
    return sharded(mesh, [Shard(cut)], t)


def compare(ranks: int) -> tuple[int, list[str]]:
    """How many cases this rank ran, and what differs in them."""
    mesh, wrong, count = init_device_mesh("cpu", (ranks,)), [], 0
    rows = functools.partial(sharded, mesh, [Shard(0)])
    ways = [("", dict(rules() if ranks == 4 else cases()), rows)]
    if ranks == 2:
        # They refuse columns at construction (test_apollo.py).
        low_rank = ("APOLLO", "Fira", "Muon", "Adafactor in a")
        cut = {name: make for name, make in rules() if not name.startswith(low_rank)}
        ways.append((", columns", cut, functools.partial(by_columns, mesh)))
    if ranks == 4:  # two replicas of two shards
        hybrid = functools.partial(
            sharded, init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]
        )
        ways.append((", HSDP", dict(rules()), hybrid))
    for way, made, place in ways:
        for name, make in made.items():
            wrong += [found + way for found in differs(name, run(name, make, place))]
            count += 1
    return count, wrong


def one_byte_off() -> list[str]:
    """A comparison that could not fail would prove nothing: the last rank's part is changed in one
    byte, and rank 0's is not.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    name = "AdamW dynamic8 nearest"
    found = run(name, dict(cases())[name], functools.partial(sharded, mesh, [Shard(0)]))
    if dist.get_rank() == dist.get_world_size() - 1:
        found["p0 exp_avg_dynamic8"].to_local().view(torch.uint8)[-1] ^= 1
    return differs(name, found)
