"""What a rank does in test_recipes.py: the model of recipes/expert_parallel.py, saved and loaded by
torch's own state-dict functions under several layouts.
"""

from __future__ import annotations

import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from tests.support.digests import digest, part_of
from tests.support.paths import RECIPES

sys.path.insert(0, str(RECIPES))
import expert_parallel
import toy

HALF, ALL = 3, 6  # steps


def further(opt) -> dict[str, str]:
    """With gradients that depend on neither the model nor its layout, since sums in a model do."""
    for step in range(HALF, ALL):
        generator = torch.Generator().manual_seed(step)
        for group in opt.param_groups:
            for p in group["params"]:
                drawn = torch.randn(p.shape, generator=generator).mul_(0.01).to(p.dtype)
                local = part_of(drawn, p).clone()
                p.grad = DTensor.from_local(
                    local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
                )
        opt.step()
    return digest(opt, ALL)


def trained(shared: int, folder: str, flat: bool) -> tuple[dict[str, str], dict[str, str]]:
    """What is there after some steps, which is saved, and after some more."""
    model, opt = expert_parallel.build(shared, "cpu")
    for step in range(HALF):
        toy_batch = toy.batch(step, dist.get_rank(), dist.get_world_size())
        toy.loss_of(model, toy_batch).backward()
        opt.step()
        opt.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    expert_parallel.save(model, opt, HALF, pathlib.Path(folder), options)
    return digest(opt, HALF), further(opt)


def moved(
    shared: int, folder: str, flat: bool, to: str | None
) -> tuple[dict[str, str], dict[str, str], int]:
    """What was loaded, which is saved again, and what is there after some more steps; and of how
    many experts there is state here.
    """
    torch.manual_seed(1)
    model, opt = expert_parallel.build(shared, "cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    assert expert_parallel.load(model, opt, pathlib.Path(folder), options) == HALF
    if to is not None:
        expert_parallel.save(model, opt, HALF, pathlib.Path(to), options)
    codes = opt.state[model.blocks[0].mixture.experts.up]["exp_avg_dynamic8"]
    return digest(opt, HALF), further(opt), len(codes.to_local())
