"""An optimizer built before its weights exist,
whose first step has learning rate 0 and gradients on one rank only.
"""

from __future__ import annotations

import warnings

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


def steps_of_what_was_sharded_later() -> tuple[list[str], bool]:
    """What two steps warn of if `fully_shard` comes after the optimizer,
    and whether a weight changed.
    """
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    opt = lowbit.AdamW(model.named_parameters())
    fully_shard(model)
    before = model[0].weight.full_tensor().detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            opt.step()
    messages = [
        str(w.message) for w in caught if "lowbit" in w.filename or "step()" in str(w.message)
    ]
    return messages, not torch.equal(before, model[0].weight.full_tensor())
