"""What a rank does in test_resumed_ddp.py: trains under DistributedDataParallel, and continues
with a wrapper of its own from half way."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowbit

HALF, ALL = 2, 4  # steps


def resumed(find_unused: bool) -> dict[str, bool]:
    """Whether what was loaded, and the weights at the end, are those of the uninterrupted run."""
    whole = Run(find_unused)
    whole.train(0, HALF)
    again = Run(find_unused, copy.deepcopy(whole.saved()))
    loaded = whole.same_as(again)
    whole.train(HALF, ALL)
    again.train(HALF, ALL)
    return {"loaded": loaded, "end": whole.same_as(again)}


class Run:
    def __init__(self, find_unused: bool, saved: list[dict] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        self.opt = lowbit.AdamW(self.model.named_parameters(), lr=1e-2)
        if saved is not None:
            self.model.load_state_dict(saved[0])
            self.opt.load_state_dict(saved[1])
        self.wrapped = DistributedDataParallel(self.model, find_unused_parameters=find_unused)

    def saved(self) -> list[dict]:
        return [self.model.state_dict(), self.opt.state_dict()]

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            self.wrapped(torch.randn(4, 64, generator=generator)).square().mean().backward()
            self.opt.step()
            self.opt.zero_grad()

    def same_as(self, other: Run) -> bool:
        mine, others = (
            [t for p in run.model.parameters() for t in (p, *run.opt.state[p].values())]
            for run in (self, other)
        )
        return all(map(torch.equal, mine, others))
