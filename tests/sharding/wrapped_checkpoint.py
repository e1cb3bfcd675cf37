"""Checkpoints as a user of each wrapper writes and reads them,
for test_wrappers.py and test_flat_shards.py.
"""

from __future__ import annotations

import pathlib

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from lowbit import fsdp1, sharding


def state_of(wrapper: str, model, opt) -> dict:
    if wrapper.startswith("FSDP1"):
        return {"model": get_model_state_dict(model), "optim": fsdp1.get_state_dict(opt)}
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)}


# a model and its optimizer by the name that they have in the checkpoint,
# or "" where they are all of it
Runs = dict[str, tuple]


def _tree(parts: dict[str, dict]) -> dict:
    return parts.get("", parts)


def save(wrapper: str, runs: Runs, path: pathlib.Path) -> None:
    states = {name: state_of(wrapper, *run) for name, run in runs.items()}
    dcp.save(_tree(states), checkpoint_id=path)


def load(wrapper: str, runs: Runs, path: pathlib.Path) -> None:
    states = {name: state_of(wrapper, *run) for name, run in runs.items()}
    if wrapper.startswith("FSDP1"):
        # Models by themselves: an FSDP1 model's ShardedTensor without a local shard makes torch
        # 2.13 look for 2.3's names of everything loaded beside it.
        optim = {name: {"optim": state["optim"]} for name, state in states.items()}
        models = [{name: {"model": state["model"]}} for name, state in states.items()]
        for part in (optim, *models):
            dcp.load(_tree(part), checkpoint_id=path)
    else:
        dcp.load(_tree(states), checkpoint_id=path)
    for name, (model, opt) in runs.items():
        _set(wrapper, model, opt, states[name])


def _set(wrapper: str, model, opt, state: dict) -> None:
    if wrapper == "DDP":  # set_model_state_dict does not find tied parameters there
        model.module.load_state_dict(state["model"])
    else:
        set_model_state_dict(model, state["model"])
    if wrapper.startswith("FSDP1"):
        fsdp1.set_state_dict(opt, state["optim"])
    else:
        set_optimizer_state_dict(model, opt, state["optim"])


def spoil(model, opt) -> None:
    """Other weights and state, so that what is not loaded is seen."""
    for p in model.parameters():
        sharding.local(p.detach()).fill_(-3)
    for _, p, _, _ in opt.members():
        for key, t in opt.state_of(p).items():
            if key != "shape":
                sharding.local(t).fill_(1)
