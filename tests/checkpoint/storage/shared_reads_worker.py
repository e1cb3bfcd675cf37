"""What a rank does in test_shared_reads.py: loads replicas through lowbit.checkpoint.Reader,
and says what it read.
"""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lowbit import checkpoint
from lowbit.checkpoint.storage import reader, shared_reads

SHAPES = [(64, 512), (33, 70), (5000,), (3,), (), (128, 256), (0, 4), (7, 1000)]


def tensors():
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator) for s in SHAPES]
    return {f"w{i}": (v.bfloat16() if i % 3 == 2 else v) for i, v in enumerate(values)}


def total():
    return sum(t.nbytes for t in tensors().values())


def load(path, kind, buffer=shared_reads.BUFFER, options=None):
    """What is wrong after the load, the bytes read and received,
    and the number of collectives in which values moved.
    """
    kept, shared_reads.BUFFER = shared_reads.BUFFER, buffer
    rounds, options = [], dict(options or {})
    wrapped = dist.all_to_all_single
    dist.all_to_all_single = lambda *a, **k: rounds.append(1) or wrapped(*a, **k)
    group = None
    try:
        want, target = tensors(), {k: torch.zeros_like(t) for k, t in tensors().items()}
        if kind in ("hsdp", "sharded"):
            replicas = 2 if kind == "hsdp" else 1
            mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
            target = {
                k: distribute_tensor(t, mesh, [Replicate(), Shard(0)]) if t.dim() else t
                for k, t in target.items()
            }
        elif kind == "strided":  # and of another dtype: nothing can be read or received in place
            target = {
                k: torch.zeros(*t.shape[::-1], dtype=torch.float64).t() if t.dim() == 2 else t
                for k, t in target.items()
            }
        elif kind == "group":
            group = dist.new_group([1, 2])
            if dist.get_rank() == 0:
                return [], 0, 0, 0
            options["process_group"] = group
        elif kind == "other group":
            group = dist.new_group([1, 2])  # and a Reader that was not told
            if dist.get_rank() == 0:
                return [], 0, 0, 0
        source = checkpoint.Reader(path, **options)
        dcp.load(target, storage_reader=source, process_group=group)
        bad = []
        for name, t in target.items():
            whole = t.full_tensor() if hasattr(t, "full_tensor") else t
            if not torch.equal(whole.to(want[name].dtype), want[name]):
                bad.append(name)
        return bad, source.bytes_read, source.bytes_received, len(rounds)
    finally:
        dist.all_to_all_single = wrapped
        shared_reads.BUFFER = kept


def fails(path, buffer=shared_reads.BUFFER):
    """What each rank is told of a load that one of them cannot end, and what a rank that could
    read its share still holds of it.
    """
    target = {k: torch.zeros_like(t) for k, t in tensors().items()}
    made = []

    class Kept(reader.SharedReads):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    kept, shared_reads.BUFFER, reader.SharedReads = shared_reads.BUFFER, buffer, Kept
    said = "no error"
    try:
        dcp.load(target, storage_reader=checkpoint.Reader(path))
    except BaseException as error:  # torch's CheckpointException is not an Exception
        said = str(error)
    finally:
        shared_reads.BUFFER, reader.SharedReads = kept, Kept.__base__
    return said, [one.open.keys() & one.shared.read for one in made if one.failure is None]


def largest_buffers(plan_ranks, sizes, buffer):
    """Of a plan in which every rank needs everything: the largest round of one rank,
    sent and received.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    def item(i, n):
        index = MetadataIndex(f"t{i}", torch.Size([0]))
        return ReadItem(
            LoadItemType.TENSOR, index, torch.Size([0]), index, torch.Size([0]), torch.Size([n])
        )

    items = [item(i, n) for i, n in enumerate(sizes)]
    plans = [
        LoadPlan(items, storage_data=shared_reads.Told(shared_reads.Place(r, plan_ranks), "", ""))
        for r in range(plan_ranks)
    ]
    kept, shared_reads.BUFFER = shared_reads.BUFFER, buffer
    shares = shared_reads.share(plans, lambda box: math.prod(box.shape))
    shared_reads.BUFFER = kept
    size = lambda pieces: sum(p.end - p.begin for p in pieces)  # noqa: E731
    most = max(
        max(sum(map(size, side.values())) for side in (r.send, r.receive))
        for s in shares
        for r in s.rounds
    )
    read = [sum(math.prod(box.shape) for box in s.read) for s in shares]
    return most, read, {len(s.rounds) for s in shares}


def reshard_part(folder, source):
    """A part of a reshard for each rank, as a script under torchrun has it."""
    os.chdir(folder)
    part = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return checkpoint.reshard(source, "out", world_size=4, part=part)
