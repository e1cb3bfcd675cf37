"""Directories as Megatron-Core's dist_checkpointing writes them (0.16.1, torch_dist), by a writer
of ours that follows its source: flat names without paths, chunks of tensor parallel ranks, and
common.pt beside them. tests/golden/megatron_core.tar.xz holds ones that the package itself wrote.
"""

import argparse
import json
import pickle

import torch
import torch.distributed.checkpoint as dcp

SHAPES = {"embedding.weight": (12, 4), "fc1.weight": (8, 4), "fc1.bias": (8,)}
GROUP = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
    "max_lr": 0.01,
    "min_lr": None,
    "lr": 0.01,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
}


def numbers(name, state):
    """The state of a parameter, different for each."""
    generator = torch.Generator().manual_seed(sum(map(ord, name + state)))
    x = torch.randn(SHAPES[name], generator=generator)
    return x.square() if state == "exp_avg_sq" else x


def flattened(x, grid):
    """As Megatron-Core before 0.14 kept the parts of a distributed optimizer: [X, Y] in a grid of
    [x, y] as [X / x, Y / y, x * y].
    """
    parts = [n // cut for n, cut in zip(x.shape, grid, strict=True)]
    split = x.reshape([k for pair in zip(grid, parts, strict=True) for k in pair])
    order = [*range(0, split.ndim, 2), *range(1, split.ndim, 2)]
    return split.permute(order).reshape(*grid, -1).contiguous()


def groups(**different):
    """Two groups, of which the second has other settings."""
    return {0: {**GROUP, "step": 3}, 1: {**GROUP, "step": 3, "wd_mult": 0.0, **different}}


def tensors(master="fp32_param", prefix="", of=None):
    """Weights in bfloat16, and the optimizer's tensors."""
    made = {}
    for name in of or SHAPES:
        made[name] = numbers(name, "param").bfloat16()
        for state in ("exp_avg", "exp_avg_sq"):
            made[f"{prefix}optimizer.state.{state}.{name}"] = numbers(name, state)
        made[f"{prefix}optimizer.state.{master}.{name}"] = numbers(name, "param")
    return made


def write(folder, content, optimizer, common=True):
    """`optimizer`: what common.pt has of it; `common`: whether there is one."""
    dcp.save(dict(content), checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = None
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(said))
    if common:
        rest = {"iteration": 3, "args": argparse.Namespace(lr=0.01), "optimizer": optimizer}
        torch.save(rest, folder / "common.pt")
    return folder
