"""What a rank does in test_storage_layouts.py: a model and its optimizer, sharded in one way,
saved and loaded in others.
"""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lowbit import checkpoint

LAYOUTS = ("FSDP2 and TP", "HSDP", "FSDP2")


def made(layout, seed):
    """A model of uneven shapes and its AdamW after one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 14), nn.Linear(14, 6))
    if layout == "FSDP2 and TP":  # fully_shard cuts what is cut already: _StridedShard
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
    elif layout == "HSDP":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(seed + 1)
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def tensors(value, name=""):
    """Whole tensors by their names."""
    out = {}
    for key, v in value.items():
        if isinstance(v, dict):
            out |= tensors(v, f"{name}{key}.")
        elif isinstance(v, torch.Tensor):
            out[name + str(key)] = v.full_tensor() if isinstance(v, DTensor) else v
    return out


def run(saved, path):
    """By layout, the names of what Reader, and torch's reader, loaded otherwise than it was saved,
    and the number of tensors.
    """
    state = made(saved, 0)
    dcp.save(state, storage_writer=checkpoint.Writer(path))
    want, told = tensors(state), {}
    for loaded in LAYOUTS:
        bad = []
        for reader in (checkpoint.Reader, dcp.FileSystemReader):
            other = made(loaded, 7)
            before = tensors(other)
            assert any(not torch.equal(before[name], want[name]) for name in want)
            dcp.load(other, storage_reader=reader(path))
            got = tensors(other)
            bad.append([name for name in want if not torch.equal(want[name], got[name])])
        told[loaded] = (bad, len(want))
    return told
