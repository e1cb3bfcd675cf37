"""An optimizer built before its weights exist, whose first step has learning rate 0 and gradients on one rank only."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard

import lowbit


def first_step_of_a_warmup(rule: str) -> float:
    """The step's count behind it."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(64, 64))
    fully_shard(model)
    opt = getattr(lowbit, rule)(model.parameters(), lr=0.0)
    model.to_empty(device="cpu")
    torch.nn.init.constant_(next(model.parameters()), 0.1)
    model(torch.tensor([0, 1, 2])).sum().backward()  # rows of the first rank
    opt.step()
    return float(opt.state[next(model.parameters())]["step"])
