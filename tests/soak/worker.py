"""One rank of a round of the soak: loads the last checkpoint, steps, saves, and is disturbed."""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import lowbit
from tests.support.ranks.leaving import leave

SAVED = 2  # a save after so many steps
RULES: dict[str, Any] = {
    "adamw 8bit": (lowbit.AdamW, {"lr": 1e-3}),
    "adamw 4bit kahan": (
        lowbit.AdamW,
        {"lr": 1e-3, "state_format": "4bit", "param_format": "bfloat16_kahan"},
    ),
    "adafactor": (lowbit.Adafactor, {"lr": 1e-3, "beta1": 0.9}),
    "lion fp8": (lowbit.Lion, {"lr": 1e-4, "state_format": "fp8"}),
}


def build(rule: str, mesh: Any = None) -> tuple[nn.Module, Any]:
    """The model before training, and its optimizer; sharded over a mesh, or whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 130), nn.Linear(130, 70), nn.Linear(70, 96)).bfloat16()
    if mesh is not None:
        for layer in model:
            fully_shard(layer, mesh=mesh)
    cls, options = RULES[rule]
    return model, cls(model.named_parameters(), **options)


def step(model: nn.Module, opt: Any, number: int) -> None:
    """A step with the gradients of this number, the same for any number of ranks."""
    made = torch.Generator().manual_seed(number)
    for p in model.parameters():
        grad = torch.randn(p.shape, generator=made).to(p.dtype)
        if hasattr(p, "device_mesh"):
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad
    opt.step()


def content(model: nn.Module, opt: Any, number: int) -> dict[str, Any]:
    weights, state = get_state_dict(model, opt)
    return {"model": weights, "optim": state, "step": torch.tensor(number)}


def load(model: nn.Module, opt: Any, path: str, reader: Any) -> int:
    state = content(model, opt, 0)
    dcp.load(state, storage_reader=reader(path))
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(state["step"])


def fails_on_a_full_disk(state: dict[str, Any], folder: str) -> None:
    path = os.path.join(folder, "never")
    try:
        dcp.save(state, storage_writer=lowbit.checkpoint.Writer(path))
    except dcp.CheckpointException as error:
        assert "the disk is full" in str(error), error
        assert not os.path.exists(path)
        return
    raise AssertionError("a save to a full disk succeeded")


def slow_disk(chance: random.Random) -> None:
    """From here on what reaches the disk takes its time, another one on each rank."""
    sync = os.fsync

    def slow(file: int) -> None:
        time.sleep(chance.random() * 0.5)
        sync(file)

    os.fsync = slow


def main(rule: str, event: str, path: str, steps: int, seed: int, full: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank, chance = dist.get_rank(), random.Random(seed)
    if event == "slow":
        slow_disk(random.Random(seed + rank))
    model, opt = build(rule, init_device_mesh("cpu", (dist.get_world_size(),)))
    readers = [lowbit.checkpoint.Reader, dcp.FileSystemReader]
    number = load(model, opt, path, chance.choice(readers)) if os.path.exists(path) else 0
    writer = lowbit.checkpoint.Writer(path)
    for done in range(1, steps + 1):
        number += 1
        step(model, opt, number)
        if event == "late" and rank == 0:
            time.sleep(chance.random())
        if event == "full" and done == 1:
            fails_on_a_full_disk(content(model, opt, number), full)
        if done % SAVED == 0:
            if event == "async":
                dcp.async_save(content(model, opt, number), storage_writer=writer).result()
            else:
                dcp.save(content(model, opt, number), storage_writer=writer)
            if rank == 0:
                print("saved", number, flush=True)
    del model, opt
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
