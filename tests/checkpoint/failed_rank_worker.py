"""What a rank does in test_failed_rank.py: it loads, and falls back from a damaged checkpoint."""

from __future__ import annotations

import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import lowbit
from lowbit import checkpoint
from lowbit.sharding import SharedFailure


def resumed(folder, formats):
    """Two checkpoints, of which the newer one is damaged in the rows of rank 1: the one that this
    rank resumes from, what it was told, and the step that its state has.

    Args:
        formats: of the optimizer that loads, by moment; None: the format of the one that saved.
    """
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)

    def parameter():
        return torch.nn.Parameter(distribute_tensor(torch.randn(64, 256), mesh, [Shard(0)]))

    first, second = parameter(), parameter()
    opt = lowbit.AdamW([("a", first), ("b", second)], lr=1e-3, min_numel=0)
    for step in (1, 2):
        for p in (first, second):
            p.grad = distribute_tensor(torch.randn(64, 256), mesh, [Shard(0)])
        opt.step()
        state = {"optim": opt.state_dict()}
        dcp.save(state, storage_writer=checkpoint.Writer(f"{folder}/step-{step}"))
    if dist.get_rank() == 1:
        file = pathlib.Path(folder) / "step-2/__1_0.distcp"
        content = bytearray(file.read_bytes())
        mine = opt.state[second]["exp_avg_dynamic8"].to_local().numpy().tobytes()
        content[content.index(mine) + len(mine) // 2] ^= 16
        file.write_bytes(content)
    dist.barrier()
    options = {} if formats is None else {"state_format": formats}
    opt = lowbit.AdamW([("a", first), ("b", second)], lr=1e-3, min_numel=0, **options)
    told = []
    for step in (2, 1):
        try:
            lowbit.load_optimizer(opt, f"{folder}/step-{step}")
        except checkpoint.CheckpointError as error:
            told.append((error.cause, str(error)))
        else:
            return step, told, float(opt.state[first]["step"])
    return 0, told, 0.0


def of_two_checkpoints(folder):
    """A load in which each rank names another checkpoint of the same model; what it is told."""
    mesh = init_device_mesh("cpu", (2,))

    def state(value):
        return {"w": distribute_tensor(torch.full((8, 8), float(value)), mesh, [Shard(0)])}

    for step in (1, 2):
        dcp.save(state(step), storage_writer=checkpoint.Writer(f"{folder}/step-{step}"))
    mine = f"{folder}/step-{dist.get_rank() + 1}"
    try:
        dcp.load(state(0), storage_reader=checkpoint.Reader(mine))
    except BaseException as error:  # torch's CheckpointException is not an Exception
        return str(error)
    return "no error"


def of_two_meshes():
    """A rank on two meshes beside ranks on one of them: a load without a failure, then two that
    fail on the last rank, at the end and at a check; what each rank is told.
    """
    rank, meshes = dist.get_rank(), [DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [0, 1])]
    held = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    params = [DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)]) for mesh in held]

    def fail():
        raise ValueError("no memory")

    def elsewhere(who, cause):
        return RuntimeError(f"rank {who} failed")

    told = []
    for checked in (None, False, True):
        try:
            with SharedFailure(params, elsewhere).together() as shared:
                if rank == 2 and checked is not None:
                    shared.attempt(fail)
                if checked:
                    shared.check()
            told.append("loaded")
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    return told
