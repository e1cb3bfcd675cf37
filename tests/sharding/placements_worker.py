"""What a rank does in test_wrappers.py about placements: those that torch or lowbit refuses, and
columns that are cut inside blocks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import lowbit
from lowbit import sharding
from lowbit.state import quantize as coding
from tests.sharding.same_bytes import equal

# What torch itself refuses, and what it says.
REFUSED_BY_TORCH = {
    "a scalar under FSDP2": "fully_shard doesn't support scalar parameters",
    "channels_last under FSDP2": "FSDP does not support non-contiguous parameters yet",
    "columns that do not divide under FSDP2 on dimension 1": (
        "FSDP does not support uneven sharding on dim 1"
    ),
}


def refused_by_torch(what: str) -> str:
    module = nn.Module()
    value = (
        torch.zeros(6, 4, 5, 5)
        if "channels_last" in what
        else torch.zeros(4, 77)
        if "columns" in what
        else torch.zeros(())
    )
    if "channels_last" in what:
        value = value.to(memory_format=torch.channels_last)
    module.p = nn.Parameter(value)
    options = {"shard_placement_fn": lambda p: Shard(1)} if "columns" in what else {}
    try:
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), **options)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "nothing"


def refused_placements() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def message(shape, dim, make=lowbit.AdamW, **options) -> str:
        p = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(dim)]))
        try:
            make([("w", p)], **options)
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    return {
        "a byte": message((100, 77), 1, state_format="4bit"),
        "a byte, wide": message((100, 77), 1, state_format="4bit", full_precision=["w"]),
        "APOLLO": message((64, 256), 1, lowbit.APOLLO, rank=8),
        "Fira": message((64, 256), 1, lowbit.Fira, rank=8),
    }


def recode_columns() -> bool:
    torch.manual_seed(0)
    value, moments = (
        torch.randn(64, 1000),
        {"exp_avg": torch.randn(64, 1000), "exp_avg_sq": torch.rand(64, 1000)},
    )
    mesh, good = init_device_mesh("cpu", (dist.get_world_size(),)), True
    for state_format in ("8bit", "4bit", "log8", "fp8", "lpmm4"):
        made = []
        for p in (
            nn.Parameter(value.clone()),
            nn.Parameter(distribute_tensor(value, mesh, [Shard(1)])),
        ):
            opt = lowbit.AdamW([("w", p)], state_format=state_format)
            saved = opt.state_dict()
            saved["state"] = {0: {"step": torch.tensor(3.0), **moments}}
            opt.load_state_dict(saved)
            ((_, _, lay),) = opt.laid_out()
            values = [
                coding.dequantize_slot(
                    [sharding.local(opt.state[p][e.key]) for e in slot.entries(lay.part)], lay, slot
                )
                for slot in lay.slots
            ]
            made.append((dict(opt.state[p]), values, lay.part))
        (plain, all_values, _), (cut, here, part) = made
        good &= plain.keys() == cut.keys() and all(equal(cut[k], plain[k]) for k in plain)
        columns = slice(part.col_offset, part.col_offset + part.cols)
        good &= all(torch.equal(a[:, columns], b) for a, b in zip(all_values, here, strict=True))
    return good
