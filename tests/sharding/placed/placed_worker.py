"""What a rank does in test_placed_state.py: the same steps on a sharded parameter and on the whole
one, compared bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lowbit
from lowbit import fsdp1
from tests.sharding.same_bytes import equal

SHAPES = [
    (3, 5, 310),
    (2, 1, 3, 3),
    (4, 1, 5, 5),
    (4, 47, 64),
    (4, 24, 32),
    (2, 32, 48),
    (1, 64, 32),
    (40, 33),
]
MAKERS = {
    "AdamW 8bit": functools.partial(lowbit.AdamW, state_format="8bit"),
    "AdamW 4bit": functools.partial(lowbit.AdamW, state_format="4bit"),
    "AdamW factored8": functools.partial(lowbit.AdamW, state_format="factored8"),
    "Adafactor": functools.partial(lowbit.Adafactor),
    "Adafactor momentum": functools.partial(
        lowbit.Adafactor, beta1=0.9, beta2=0.99, relative_step=False
    ),
    "CAME": lowbit.CAME,
    "LAMB": lowbit.LAMB,
    **{
        f"Lion {scale}s": functools.partial(
            lowbit.Lion, state_format=lowbit.scaled("linear8", scale=scale)
        )
        for scale in ("row", "column", "tensor")
    },
    "AdamW full precision": functools.partial(lowbit.AdamW, full_precision=True),
    "LAMB full precision, split8": functools.partial(
        lowbit.LAMB, full_precision=True, param_format="bfloat16_split8"
    ),
}
STEPS = 2


def value_of(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Matrices of different sizes, so that statistics of one are seen in another."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-2, 2, (shape[0], *[1] * (len(shape) - 1)), generator=generator)
    return (torch.randn(shape, generator=generator) * sizes).bfloat16()


def placements(ranks: int) -> Iterator[tuple[DeviceMesh, list[Any]]]:
    mesh = init_device_mesh("cpu", (ranks,))
    yield mesh, [Shard(0)]
    if ranks < 4:
        yield mesh, [Shard(1)]
        yield mesh, [Shard(2)]
    else:
        mesh = init_device_mesh("cpu", (2, 2))
        for pair in ((0, 0), (0, 1), (1, 0), (0, 2), (1, 2)):
            yield mesh, [Shard(dim) for dim in pair]
        yield mesh, [Replicate(), Shard(0)]


def stepped(name: str, shape: tuple[int, ...], place) -> dict[str, torch.Tensor]:
    """A parameter and its state after some steps."""
    p = nn.Parameter(place(value_of(shape, 0)))
    opt = MAKERS[name]([("w", p)], lr=1e-2, min_numel=1)
    for step in range(STEPS):
        p.grad = place(value_of(shape, 1 + step))
        opt.step()
    return {"": p.detach(), **opt.state[p]}


@functools.cache
def alone(name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return stepped(name, shape, lambda t: t)


def same(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether this rank holds its part of a whole tensor,
    cut as torch cuts it for these placements.
    """
    if isinstance(found, DTensor):
        if found.shape != want.shape:
            return False
        cut = distribute_tensor(want, found.device_mesh, found.placements, src_data_rank=None)
        found, want = found.to_local(), cut.to_local()
    return equal(found, want)


def compare() -> tuple[int, list[str], list[str]]:
    """How many cases were stepped, those that differ from one process,
    and those that were refused.
    """
    served, wrong, refused = 0, [], []
    for mesh, placed in placements(dist.get_world_size()):
        where = f"{[p.dim if isinstance(p, Shard) else 'replicated' for p in placed]}"
        dims = 1 + max(p.dim for p in placed if isinstance(p, Shard))
        for shape in (shape for shape in SHAPES if len(shape) >= dims):
            for name in MAKERS:
                what = f"{name} {shape} {where}"
                place = functools.partial(
                    distribute_tensor, device_mesh=mesh, placements=placed, src_data_rank=None
                )
                try:
                    got = stepped(name, shape, place)
                except ValueError as error:
                    assert "parameter 'w'" in str(error), error
                    refused.append(what)
                    continue
                want = alone(name, shape)
                served += 1
                wrong += [f"{what}: {key}" for key in want if not same(got[key], want[key])]
    return served, wrong, refused


class Experts(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(value_of(shape, 0))

    def forward(self, grad: torch.Tensor) -> torch.Tensor:
        return (self.w * grad).sum()


def compare_flat() -> list[str]:
    """The same of a parameter of FSDP1, whose flat shards hold an expert each; what differs."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    wrong = []
    shape = (dist.get_world_size(), 24, 32)
    for name in MAKERS:
        model = FSDP(Experts(shape), use_orig_params=True, device_id=torch.device("cpu"))
        opt = MAKERS[name](model.named_parameters(), lr=1e-2, min_numel=1)
        fsdp1.bind(model, opt)
        for step in range(STEPS):
            opt.zero_grad()
            model(value_of(shape, 1 + step)).backward()
            opt.step()
        with FSDP.summon_full_params(model):
            got = next(p.detach().clone() for p in model.parameters())
        wanted = MAKERS[name]([("w", nn.Parameter(value_of(shape, 0)))], lr=1e-2, min_numel=1)
        p = wanted.param_groups[0]["params"][0]
        for step in range(STEPS):
            p.grad = value_of(shape, 1 + step)
            wanted.step()
        if not same(got.reshape(shape), p.detach()):
            wrong.append(name)
    return wrong


def load_quantized() -> list[str]:
    """State of 8 bits, loaded into full precision where dimension 2 is cut;
    what differs from one process that loads it.
    """
    shape, wrong = (4, 24, 32), []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    place = functools.partial(
        distribute_tensor, device_mesh=mesh, placements=[Shard(2)], src_data_rank=None
    )
    p = nn.Parameter(value_of(shape, 0))
    source = lowbit.AdamW([("w", p)], min_numel=1)
    p.grad = value_of(shape, 1)
    source.step()
    made = []
    for put in (place, lambda t: t):
        q = nn.Parameter(put(value_of(shape, 0)))
        opt = lowbit.AdamW([("w", q)], full_precision=True)
        opt.load_state_dict(source.state_dict())
        made.append(opt.state[q])
    for key, want in made[1].items():
        if not same(made[0][key], want):
            wrong.append(key)
    assert made[1]["exp_avg"].any()
    return wrong
