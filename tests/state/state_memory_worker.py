"""What a rank does in test_state_memory.py: FSDP2 with state outside of the device's memory,
for which the CPU stands.
"""

from __future__ import annotations

import hashlib
import pathlib
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import lowbit
from lowbit import ops
from lowbit.state import memory

OUTSIDE = ("pinned", "managed")


class Outside:
    """What was asked for outside, and whether a tensor is of it."""

    def __init__(self):
        self.taken = []

    def allocate(self, size, dtype, device, kind):
        assert all(n > 0 for n in size) and device.type == "cpu" and kind in OUTSIDE
        self.taken.append((torch.full(size, 7, dtype=dtype), kind))  # not filled, as of CUDA
        return self.taken[-1][0]

    def kind_of(self, tensor):
        place = tensor.data_ptr()  # a DTensor's local part is another object
        return next((kind for t, kind in self.taken if t.data_ptr() == place), "device")

    def check(self, opt, kind):
        """Codes and values of 64 KiB and more are outside, and nothing else is."""
        found = set()
        for _, p, lay in opt.laid_out():
            state = opt.state_of(p)
            assert set(lay.keys) <= set(state)
            for key, tensor in state.items():
                large = tensor.numel() * tensor.element_size() >= 1 << 16
                wanted = large and "_scale" not in key and key not in ("step", "stream", "shape")
                assert self.kind_of(tensor) == (kind if wanted else "device"), (key, tensor.shape)
                found.add((wanted, key))
        assert {wanted for wanted, _ in found} == {True, False}


def net(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 700), nn.LayerNorm(700), nn.Linear(700, 300)).to(dtype)


def digest(t):
    return hashlib.sha256(t.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def go_on(folder: str, kind: str, begin: int, end: int) -> dict[str, str]:
    """Steps [begin, end) from the checkpoint of `begin` there, if that is not 0, and a checkpoint
    of `end`; digests of whole weights and state.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    outside = Outside()
    with (
        mock.patch.object(memory, "_DEVICES", ("cpu",)),
        mock.patch.object(ops, "allocate", outside.allocate),
    ):
        model = net()
        fully_shard(model, mesh=mesh)
        opt = lowbit.AdamW(model.named_parameters(), lr=1e-2, state_memory=kind)
        check(opt, outside, kind)
        if begin:
            taken = len(outside.taken)
            state = {
                "model": get_model_state_dict(model),
                "optim": get_optimizer_state_dict(model, opt),
            }
            dcp.load(state, checkpoint_id=pathlib.Path(folder) / str(begin))
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, opt, state["optim"])
            assert len(outside.taken) == taken, "it is loaded into what is there"
            check(opt, outside, kind)
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                grad = torch.randn(p.shape, generator=generator).to(p.dtype)
                p.grad = distribute_tensor(grad, mesh, p.placements)
            opt.step()
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, opt),
        }
        dcp.save(state, checkpoint_id=pathlib.Path(folder) / str(end))
    whole = StateDictOptions(full_state_dict=True)
    made = {
        name: digest(t.reshape(-1))
        for name, t in get_model_state_dict(model, options=whole).items()
    }
    for name, values in get_optimizer_state_dict(model, opt, options=whole)["state"].items():
        made |= {f"{name} {key}": digest(t.reshape(-1)) for key, t in values.items()}
    return made


def check(opt: lowbit.AdamW, outside: Outside, kind: str) -> None:
    """Local parts of codes are outside, as many as are large enough."""
    for p, values in opt.state.items():
        for key, t in values.items():
            local = getattr(t, "_local_tensor", t)
            large = local.ndim > 1 and "_scale" not in key and local.nbytes >= memory.LEAST
            assert outside.kind_of(local) == (kind if large else "device"), (key, p.shape)
    assert outside.taken or kind == "device"
