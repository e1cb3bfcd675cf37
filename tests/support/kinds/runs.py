"""The short runs whose checkpoints tests/support/kinds makes: one small net, gradients that
every rank knows, a few steps of any optimizer.

The numbers of the moments are dyadic: gradients of 7 bits, betas of 3 and 4. Every product and sum
of a moment is then exact, so that neither the number of ranks, nor where a vector of a shard ends,
nor a contracted multiply-add can move a bit, and one expected content holds for every world.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

STEPS = 3
BETAS = (1 - 2**-3, 1 - 2**-4)
LR = 2**-7  # a power of two: lr times a gradient is exact as well
DECAY = 0.01


class Scale(nn.Module):
    """One number, as scalars are under FSDP2, which takes none of 0 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Body(nn.Module):
    """A matrix with a bias, and a kernel of 4 dimensions."""

    def __init__(self, even: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 67 if even else 37)
        self.conv = nn.Conv2d(64, 64, 2, bias=False) if even else nn.Conv2d(32, 16, 3, bias=False)

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        # One by one: FSDP1 hides them from named_parameters.
        made = (self.linear.weight * grads["body.linear.weight"]).sum()
        made = made + (self.linear.bias * grads["body.linear.bias"]).sum()
        return made + (self.conv.weight * grads["body.conv.weight"]).sum()


class Net(nn.Module):
    """Five parameters: 37x256 (no multiple of 2 or 4 rows), its bias, 4 dimensions, 3x7 (fewer rows
    than 4 ranks), one number.

    Args:
        even: 67x256 and 64x64x2x2 instead, of which every shard of up to 4 ranks has 4096 elements
            in whole blocks of 256: what torchao quantizes whatever the number of ranks is.
    """

    def __init__(self, even: bool = False) -> None:
        super().__init__()
        self.body = Body(even)
        self.head = nn.Linear(7, 3, bias=False)
        self.norm = Scale()
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(normal(name, p.shape))

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        """What has exactly `grads` for gradients, however the net is wrapped."""
        own = (self.head.weight * grads["head.weight"]).sum()
        return own + (self.norm.scale * grads["norm.scale"]).sum() + self.body(grads)


def normal(name: str, shape: Iterable[int]) -> Tensor:
    """Weights of bfloat16's numbers, by name, so that a bfloat16 net begins with the same."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator).bfloat16().float()


def gradient(name: str, shape: Iterable[int], step: int) -> Tensor:
    """7 bits, rows of seven magnitudes; the sixth row is zero,
    as those of tokens that were not seen.
    """
    shape = tuple(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    g = torch.randint(-64, 65, shape, generator=generator).float() / 64
    rows = torch.arange(shape[0]).reshape(-1, *(1 for _ in shape[1:]))
    return torch.where(rows == 5, 0.0, g * 2.0 ** -(rows % 7))


def grouped(named: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Two groups as people have them: weight decay for matrices, none for the rest."""
    named = list(named)
    return [
        {"params": [(n, p) for n, p in named if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def order(net: nn.Module) -> list[str]:
    """Names in the order of an optimizer's numbers."""
    return [name for group in grouped(net.named_parameters()) for name, _ in group["params"]]


def _unnamed(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": [p for _, p in group["params"]]} for group in groups]


def optimizer(which: str, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """An optimizer by the name that kinds call it: torch's, `lowbit <preset>`, `bnb`,
    `ao 8bit|4bit|fp8`.
    """
    named = list(named)
    groups = grouped(named)
    adam: dict[str, Any] = {"lr": LR, "betas": BETAS}
    if which.startswith("lowbit "):
        import lowbit

        preset = which.partition(" ")[2]
        if preset == "kahan":
            return lowbit.AdamW(groups, **adam, param_format="bfloat16_kahan")
        return lowbit.AdamW(groups, **adam, state_format=preset)
    groups = _unnamed(groups)
    if which.startswith("ao "):
        import torchao.optim

        name = {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}[which[3:]]
        return getattr(torchao.optim, name)(groups, **adam)
    if which == "bnb":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(groups, **adam)
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(groups, **adam),
        # What FSDP1 steps: a flat parameter is one of a group, biases and all.
        "adamw flat": lambda: torch.optim.AdamW([p for _, p in named], **adam, weight_decay=DECAY),
        "amsgrad": lambda: torch.optim.AdamW(groups, **adam, amsgrad=True),
        # L2 decay adds a multiple of the weight to the gradient: no longer 7 bits.
        "adam": lambda: torch.optim.Adam([{**g, "weight_decay": 0.0} for g in groups], **adam),
        "sgd": lambda: torch.optim.SGD(
            [{**g, "weight_decay": 0.0} for g in groups], lr=LR, momentum=0.875
        ),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=0.01),
    }
    return makers[which]()


def is_even(which: str) -> bool:
    return which.startswith("ao ")


def net_for(which: str) -> Net:
    """The net that an optimizer steps here: bfloat16 where it corrects bfloat16 weights."""
    net = Net(is_even(which))
    return net.bfloat16() if which == "lowbit kahan" else net


def train(
    net: nn.Module, opt: torch.optim.Optimizer, place: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """STEPS steps; `place(gradient, parameter)` gives the part of a gradient that is here."""
    with _not_compiled(opt):
        for step in range(STEPS):
            for name, p in net.named_parameters():
                p.grad = place(gradient(name, p.shape, step).to(p.dtype), p)
            opt.step()
            opt.zero_grad()


def _not_compiled(opt: torch.optim.Optimizer) -> contextlib.AbstractContextManager[Any]:
    """torchao compiles its step for each shape: a minute, for the same bits."""
    if not type(opt).__module__.startswith("torchao"):
        return contextlib.nullcontext()
    return mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"})


@functools.cache
def plain(which: str) -> tuple[Net, torch.optim.Optimizer]:
    """The run in one process without any wrapper: what every kind of the same optimizer must
    hold.
    """
    torch.manual_seed(0)
    net = net_for(which)
    opt = optimizer(which, net.named_parameters())
    train(net, opt, lambda g, p: g)
    return net, opt


def plain_state(which: str) -> dict[str, dict[str, Any]]:
    """State by name of the plain run."""
    net, opt = plain(which)
    named = dict(net.named_parameters())
    return {name: dict(opt.state[named[name]]) for name in order(net)}


def plain_model(which: str) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in plain(which)[0].named_parameters()}
