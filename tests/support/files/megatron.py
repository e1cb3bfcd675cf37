"""Directories as Megatron-Core's dist_checkpointing writes them (torch_dist, 0.16.1 and 0.19.2), by
a writer of ours that follows its source: flat names without paths, chunks of tensor parallel ranks,
and a common state. tests/golden/megatron_core.tar.xz holds ones that the package itself wrote.
"""

import argparse
import io
import json
import pickle

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

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


class Packed(DefaultSavePlanner):
    """Takes an io.BytesIO for an item that is written as it is, as Megatron-Core's planner does."""

    def transform_object(self, write_item, object):
        return object


def write(folder, content, optimizer, common="common.pt"):
    """`optimizer`: what the common state has of it; `common`: where that is, None for nowhere."""
    rest = {"iteration": 3, "args": argparse.Namespace(lr=0.01), "optimizer": optimizer}
    content = dict(content)
    if common == "item":
        content["common_state/shard_0_1"] = io.BytesIO()
        torch.save([rest], content["common_state/shard_0_1"])
    dcp.save(content, checkpoint_id=folder, no_dist=True, planner=Packed())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = None
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(said))
    if common == "common.pt":
        torch.save(rest, folder / "common.pt")
    return folder
