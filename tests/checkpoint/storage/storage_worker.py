"""What a rank does in test_storage*.py: saves and loads with lowbit.checkpoint.Writer and Reader,
or torch's.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lowbit import checkpoint
from lowbit.sharding import whole

SHAPES = [(512, 512), (77, 1000), (5, 7, 300), (65536,), (3,), (), (2, 300, 64), (0, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) * 50 for shape in SHAPES]
    return {
        f"{i}.{dtype}".replace("torch.", ""): v.to(dtype)
        for i, v in enumerate(values)
        for dtype in DTYPES
    }


def state(dim, seed=0, mesh=None):
    """A state dict of tensors sharded along `dim`, and of values."""
    mesh = mesh or (
        init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    )

    def cut(t):
        return (
            distribute_tensor(t, mesh, [Shard(dim)]) if mesh and t.dim() > dim and t.numel() else t
        )

    return {
        "model": {name: cut(t) for name, t in tensors(seed).items()},
        "groups": [{"lr": 0.1 + seed, "betas": [0.9, 0.999], "amsgrad": bool(seed)}],
        "step": 7 + seed,
        "dtype": torch.bfloat16,
    }


def wrong(loaded, seed=0):
    """Names of what is not as `state` of that seed has it."""
    want = tensors(seed)
    bad = [name for name, t in loaded["model"].items() if not torch.equal(whole(t), want[name])]
    values = {"groups": loaded["groups"], "step": loaded["step"], "dtype": loaded["dtype"]}
    expected = {
        "groups": [{"lr": 0.1 + seed, "betas": [0.9, 0.999], "amsgrad": bool(seed)}],
        "step": 7 + seed,
        "dtype": torch.bfloat16,
    }
    return bad + ([] if values == expected else [str(values)])


def writer(kind, path):
    return checkpoint.Writer(path) if kind == "lowbit" else dcp.FileSystemWriter(path)


def reader(kind, path, **options):
    return checkpoint.Reader(path, **options) if kind == "lowbit" else dcp.FileSystemReader(path)


def save(kind, path, dim, seed=0):
    dcp.save(state(dim, seed), storage_writer=writer(kind, path))


def load(kind, path, dim, seed=0, **options):
    """What is wrong after the load, and the bytes that were read."""
    loaded, source = state(dim, seed + 5), reader(kind, path, **options)
    dcp.load(loaded, storage_reader=source)
    return wrong(loaded, seed), getattr(source, "bytes_read", None)


def refusal(path, dim):
    """What a load of a damaged checkpoint says to this rank."""
    try:
        load("lowbit", path, dim)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        return str(error)
    return "no error"


def there_and_back(url, options, dim, other):
    """Saved by cuts along one dimension to a store, and loaded by cuts along another; what is
    wrong, and the bytes that were read and received.
    """
    written = checkpoint.Writer(url, storage_options=options)
    dcp.save(state(dim, 1), storage_writer=written)
    loaded, source = state(other, 5), checkpoint.Reader(url, storage_options=options)
    dcp.load(loaded, storage_reader=source)
    return wrong(loaded, 1), source.bytes_read, source.bytes_received


def load_even(path, dim):
    """The bytes that this rank reads of three tensors [64, 512], cut evenly."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    loaded = {
        f"w{i}": distribute_tensor(torch.zeros(64, 512), mesh, [Shard(dim)]) for i in range(3)
    }
    source = checkpoint.Reader(path)
    dcp.load(loaded, storage_reader=source)
    return source.bytes_read


def saved_async(path, dim):
    """Two saves through one writer, whose host copy is used again."""
    kept, at = checkpoint.Writer(), []
    for seed in (0, 1):
        dcp.async_save(
            state(dim, seed), checkpoint_id=f"{path}{seed}", storage_writer=kept
        ).result()
        at.append(kept._kept["model"]["4.float32"].data_ptr())
    return [load("lowbit", f"{path}{seed}", dim, seed)[0] for seed in (0, 1)], len(set(at))


def staged_values(keep):
    """Whether a host copy has the values of its time, kinds of tensors and all, when the state goes
    on; after a first copy and after a second.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole_step = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
    rows = distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)])
    plain = [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(3)),
    ]
    tree = {
        "step": whole_step,
        "rows": rows,
        "plain": (plain[0], [plain[1], plain[2]]),
        "lr": 0.1,
        "odd": {"a": {1, 2}},
        "none": torch.empty(0, 3),
    }
    kept, right = checkpoint.Writer("unused", cache_staged_state_dict=keep), []

    def values(t):
        return [t["step"]._local_tensor, t["rows"]._local_tensor, t["plain"][0], *t["plain"][1]]

    for _ in range(2):
        now = [v.detach().clone() for v in values(tree)]
        copy = kept.stage(tree)
        with torch.no_grad():
            for t in values(tree):
                t += 1
        tree["lr"] += 1
        tree["odd"]["a"].add(7 + len(right))
        same = all(torch.equal(a, b) for a, b in zip(values(copy), now, strict=True))
        kinds = [type(a) is type(tree[k]) for k, a in copy.items()]
        right.append(
            same and all(kinds) and copy["odd"] != tree["odd"] and copy["lr"] != tree["lr"]
        )
        del copy  # the next may have its memory
    return right


def staged_elsewhere(keep):
    """Whether a host copy lies as what it was made of does,
    where another of the same shapes was copied before.
    """
    kept, right = checkpoint.Writer("unused", cache_staged_state_dict=keep), []
    ranks = list(range(dist.get_world_size()))
    for order in (ranks, ranks[::-1]):
        mesh = DeviceMesh("cpu", order)
        t = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
        copy = kept.stage({"t": t})["t"]
        right.append(copy.device_mesh == mesh and torch.equal(copy._local_tensor, t._local_tensor))
        del copy
    return right


def returned_metadata(path):
    """What dcp.save returns on each rank, and whether it is what the file has."""
    got = dcp.save(state(0), storage_writer=checkpoint.Writer(path))
    before, read = type(got).__name__, dcp.FileSystemReader(path).read_metadata()
    read.storage_meta.load_id = None  # the reader's own
    return before, got == read, type(got).__name__


def saved_with_kept_plans(path):
    """Saves with torch's own cache of plans: the same state, then one that one rank alone changes;
    what a load then finds wrong.
    """
    wrong_names = []
    for seed, dim in ((0, 0), (1, 0), (2, 0)):
        tree = state(dim, seed)
        if seed == 2 and dist.get_rank() == 1:
            tree["only here"] = torch.arange(5.0)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(tree, storage_writer=checkpoint.Writer(f"{path}{seed}"), planner=planner)
        wrong_names += load("lowbit", f"{path}{seed}", dim, seed)[0]
    last = {"only here": torch.zeros(5)}
    dcp.load(last, storage_reader=checkpoint.Reader(f"{path}2"))
    return wrong_names, last["only here"].tolist()


def saved_at_once(path):
    """Saves that begin before the last one has ended, through one writer."""
    kept = checkpoint.Writer()
    saving = [
        dcp.async_save(state(0, seed), checkpoint_id=f"{path}{seed}", storage_writer=kept)
        for seed in range(6)
    ]
    for each in saving:
        each.result()
    return [load("lowbit", f"{path}{seed}", 0, seed)[0] for seed in range(6)]


def fails_on_one(path, dim):
    """A save for which rank 1 may write no large file; what each rank is told."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with contextlib.suppress(AttributeError):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        dcp.save(state(dim, 1), storage_writer=checkpoint.Writer(path))
    except BaseException as error:  # torch's CheckpointException is not an Exception
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "no error"


def stopped_on_one(path):
    """A save, then a load, that the progress callback of rank 1 stops; what this rank is told."""

    def stop(*_):
        raise RuntimeError("no time left")

    stopped = {"progress": stop} if dist.get_rank() == 1 else {}
    told = []
    try:
        dcp.save(state(0), storage_writer=checkpoint.Writer(path, **stopped))
    except BaseException as error:  # torch's CheckpointException is not an Exception
        told.append(str(error))
    dist.barrier()
    assert not os.path.exists(path)
    save("lowbit", f"{path}-whole", 0)
    try:
        dcp.load(state(0), storage_reader=checkpoint.Reader(f"{path}-whole", **stopped))
    except BaseException as error:
        told.append(str(error))
    return told


def goes_on_after_a_failure(path, failing):
    """A save that fails on one rank, then one to the same name from another thread of every rank;
    what this rank is told by the first, and what a load of the second finds.
    """
    kept = checkpoint.Writer(progress=lambda *_: dist.get_rank() != failing)
    told = ""
    try:
        dcp.save(state(0), checkpoint_id=path, storage_writer=kept)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        told = str(error)
    kept.progress = None
    dcp.async_save(state(0, 1), checkpoint_id=path, storage_writer=kept).result()
    return told, load("lowbit", path, 0, 1)[0]


def saved_elsewhere(path):
    """Saves for which rank 1 has a path of its own, or a link to the folder that rank 0 writes
    into, and ones whose folder rank 1 does not have; what this rank is told.
    """
    told = []
    rank = dist.get_rank()

    def attempt(name):
        try:
            dcp.save(state(0), storage_writer=checkpoint.Writer(name))
        except BaseException as error:  # torch's CheckpointException is not an Exception
            told.append(str(error))

    attempt(f"{path}-{rank}")
    attempt(os.path.relpath(f"{path}/a") if rank else f"{path}/a")
    assert not told[1:], told
    before = os.getcwd()
    host = f"{path}/host-{rank}"
    os.makedirs(host)
    try:
        os.chdir(host)
        attempt("run")  # as where a folder is not shared between hosts
    finally:
        os.chdir(before)
    return told


def no_bar_on_one(path):
    """A load in which rank 0 alone asks for a bar, and cannot draw it; what this rank is told."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=30))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "tqdm.auto"}
    sys.modules["tqdm.auto"] = None  # to import it is an ImportError
    progress = True if dist.get_rank() == 0 else None
    source = checkpoint.Reader(path, progress=progress, process_group=group)
    try:
        dcp.load({"w": torch.zeros(1000)}, storage_reader=source, process_group=group)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        return str(error)
    finally:
        del sys.modules["tqdm.auto"]
        sys.modules.update(kept)
    return "no error"


class Dying(dcp.DefaultSavePlanner):
    """Kills this process when its first values are asked for: the others are writing theirs."""

    def resolve_data(self, write_item):
        os.kill(os.getpid(), signal.SIGKILL)


def one_dies(store, path, rank, ranks, who, way):
    """A save during which one rank is killed, in a program of its own; what the others are told,
    and how long that takes.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    save("lowbit", path, 0)
    begin = time.monotonic()
    try:
        planner = Dying() if rank == who else None
        saving = {"save": dcp.save, "async_save": dcp.async_save}[way](
            state(0, 1), storage_writer=checkpoint.Writer(path), planner=planner
        )
        if way == "async_save":
            saving.result()
    except BaseException as error:  # torch's CheckpointException is not an Exception
        print(json.dumps([type(error).__name__, time.monotonic() - begin]), flush=True)
    os._exit(0)  # nobody answers any more: a process group cannot be closed


def until_killed(store, path, rank, ranks, options=None):
    """Saves over and over, with another seed each time; the program that is killed."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for seed in range(10_000):
        writer = checkpoint.Writer(path, sync_files=False, storage_options=options)
        dcp.save(state(0, seed), storage_writer=writer)
        if rank == 0:
            print(seed, flush=True)
