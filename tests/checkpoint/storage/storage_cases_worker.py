"""What a rank does in test_torch_storage_cases.py: the ways in which torch's own tests save and
load, with any writer and reader.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict,
    _load_state_dict_from_keys,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.storage.storage_worker import reader, whole, writer

DIRECTIONS = [("lowbit", "lowbit"), ("lowbit", "torch"), ("torch", "lowbit")]


def cut(t, placement=None):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(t, mesh, [Shard(0) if placement is None else placement])


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(37, 24, generator=generator), torch.randn(8, 6, generator=generator)


def nested(seed=0, placement=None, other=None):
    a, b = values(seed)
    return {
        "layer": {"weight": cut(a, placement), "list": [cut(b, other), {"bias": b[0].clone()}]},
        "step": 3 + seed,
        "groups": [{"lr": 0.1 + seed, "betas": (0.9, 0.99)}],
    }


def check(got, want, at="state"):
    """AssertionError that names where two states differ."""
    assert type(got) is type(want) or isinstance(want, torch.Tensor), (at, type(got), type(want))
    if isinstance(want, torch.Tensor):
        assert torch.equal(whole(got), whole(want)), at
    elif isinstance(want, dict):
        # Not their order: of a directory that is loaded without a state dict,
        # Reader gives names in order.
        assert set(got) == set(want), (at, list(got))
        for key in want:
            check(got[key], want[key], f"{at}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), at
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            check(g, w, f"{at}.{i}")
    else:
        assert got == want, (at, got, want)


def save(kind, path, state, **options):
    dcp.save(state, storage_writer=writer(kind, path), **options)


def load(kind, path, state, **options):
    dcp.load(state, storage_reader=reader(kind, path), **options)
    return state


def refused(kind, path, state, **options):
    try:
        load(kind, path, state, **options)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        return str(error)
    raise AssertionError("the load succeeded")


def case_nested(saves, loads, path):
    save(saves, path, nested())
    check(load(loads, path, nested(5)), nested())


def case_flattened(saves, loads, path):
    a, b = values()
    flat = {
        "layer.weight": cut(a),
        "layer.list.0": cut(b),
        "step": 3,
        "text": "words",
        "bytes0": [1],
        "none": None,
    }
    save(saves, path, flat)
    got = {
        "layer.weight": cut(a + 1),
        "layer.list.0": cut(b + 1),
        "step": 0,
        "text": "",
        "bytes0": [],
        "none": 1,
    }
    check(load(loads, path, got), flat)


def case_not_flattened(saves, loads, path):
    """Each value of the state dict is one item: a nested one is pickled with the tensors in it."""
    a, b = values()
    state = {"top": cut(a), "model": {"w": b, "deep": {"w": b * 2}, "pair": (b, 1)}, "step": 3}
    as_it_is = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    save(saves, path, state, planner=dcp.DefaultSavePlanner(**as_it_is))
    got = {"top": cut(a + 1), "model": None, "step": 0}
    load(loads, path, got, planner=dcp.DefaultLoadPlanner(**as_it_is))
    check(got, state)


def case_other_shards(saves, loads, path):
    for number, (before, after) in enumerate([(0, 1), (1, 0), (0, None), (None, 1)]):
        way = [Replicate() if dim is None else Shard(dim) for dim in (before, after)]
        save(saves, f"{path}{number}", nested(0, way[0], way[1]))
        check(load(loads, f"{path}{number}", nested(5, way[1], way[0])), nested())


def sharded(t, dim):
    """A ShardedTensor of those values."""
    ranks = dist.get_world_size()
    spec = ChunkShardingSpec(dim=dim, placements=[f"rank:{r}/cpu" for r in range(ranks)])
    made = sharded_tensor.zeros(spec, t.shape)
    fill(made, t)
    return made


def boxes(made):
    for shard in made.local_shards():
        m = shard.metadata
        yield (
            shard.tensor,
            tuple(slice(o, o + s) for o, s in zip(m.shard_offsets, m.shard_sizes, strict=True)),
        )


def fill(made, t):
    for part, box in boxes(made):
        part.copy_(t[box])


def case_sharded_tensors(saves, loads, path):
    a, _ = values()
    save(saves, path, {"a": sharded(a, 0)})
    for dim in (0, 1):
        got = {"a": sharded(torch.zeros_like(a), dim)}
        load(loads, path, got)
        assert all(torch.equal(part, a[box]) for part, box in boxes(got["a"])), dim
    check(load(loads, path, {"a": torch.zeros_like(a)}), {"a": a})  # of a shard a plain one
    check(load(loads, path, {"a": cut(torch.zeros_like(a), Shard(1))}), {"a": a})


def case_async(saves, loads, path):
    written = writer(saves, None if saves == "lowbit" else f"{path}0")
    for number in (0, 1):
        state = nested(number)
        options = {"checkpoint_id": f"{path}{number}", "storage_writer": written}
        done = dcp.async_save(state, **options)
        done.result()
    for number in (0, 1):
        check(load(loads, f"{path}{number}", nested(5)), nested(number))


def case_async_stager(saves, loads, path):
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
    done = dcp.async_save(nested(), storage_writer=writer(saves, path), async_stager=stager)
    getattr(done, "upload_completion", done).result()
    stager.close()
    check(load(loads, path, nested(5)), nested())


def case_partial(saves, loads, path):
    state = nested()
    save(saves, path, state)
    got = {**nested(5), "more": torch.full((3,), 7.0)}
    load(loads, path, got, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    check(got, {**nested(), "more": torch.full((3,), 7.0)})
    part = {"layer": {"weight": nested(5)["layer"]["weight"]}}  # less than there is, strict
    check(load(loads, path, part)["layer"]["weight"], state["layer"]["weight"])


def case_strict(saves, loads, path):
    save(saves, path, nested())
    got = {**nested(5), "more": torch.full((3,), 7.0)}
    assert "Missing key in checkpoint state_dict: more" in refused(loads, path, got)
    wrong = {"layer": {"weight": cut(torch.zeros(37, 25))}}
    assert "ize mismatch" in refused(loads, path, wrong)
    check(got, {**nested(5), "more": torch.full((3,), 7.0)})  # and nothing was changed


class Halves(dcp.DefaultSavePlanner):
    """Saves tensors as bfloat16."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.bfloat16
        return plan

    def transform_object(self, write_item, object):
        data = super().transform_object(write_item, object)
        return data if write_item.type == WriteItemType.BYTE_IO else data.bfloat16()


class Renamed(dcp.DefaultLoadPlanner):
    """Loads what is called "old.*" there as "new.*"."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        self.given = state_dict
        there = {"old." + key.removeprefix("new."): value for key, value in state_dict.items()}
        super().set_up_planner(there, metadata, is_coordinator)

    def load_bytes(self, read_item, value):
        self.given["new." + read_item.dest_index.fqn.removeprefix("old.")] = torch.load(value)


def case_own_planners(saves, loads, path):
    a, b = values()
    state = {"old.a": cut(a), "old.b": b, "old.step": 3}
    save(saves, path, state, planner=Halves())
    got = {"new.a": cut(torch.zeros_like(a)), "new.b": torch.zeros_like(b), "new.step": 0}
    load(loads, path, got, planner=Renamed())
    check(got, {"new.a": a.bfloat16().float(), "new.b": b.bfloat16().float(), "new.step": 3})


class Counter:
    """An object with a state of its own, as torch's Stateful protocol has it."""

    def __init__(self, seed):
        self.seed, self.t = seed, cut(values(seed)[0])

    def state_dict(self):
        return {"seed": self.seed, "t": self.t}

    def load_state_dict(self, state):
        self.seed, self.t = state["seed"], state["t"]


def case_stateful(saves, loads, path):
    save(saves, path, {"counter": Counter(1), "step": 4})
    counter = Counter(5)
    load(loads, path, {"counter": counter, "step": 0})
    check(counter.state_dict(), Counter(1).state_dict())


def case_without_a_state_dict(saves, loads, path):
    """What torch's converters do: the whole, or some keys, of what is there."""
    save(saves, path, nested())
    want = {
        "layer": {"weight": values()[0], "list": [values()[1], {"bias": values()[1][0]}]},
        "step": 3,
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
    }
    got: dict = {}
    _load_state_dict(
        got, storage_reader=reader(loads, path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert sorted(got) == sorted(want)
    check({key: got[key] for key in want}, want)
    some = functools.partial(_load_state_dict_from_keys, storage_reader=reader(loads, path))
    check(some({"layer.weight", "step"}), {"layer": {"weight": want["layer"]["weight"]}, "step": 3})


def case_module_and_optimizer(saves, loads, path):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
        opt = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
        model(torch.ones(2, 6)).sum().backward()
        opt.step()
        return model, opt

    model, opt = made(0)
    save(saves, path, dict(zip(("model", "optim"), get_state_dict(model, opt), strict=True)))
    other = made(1)
    state = dict(zip(("model", "optim"), get_state_dict(*other), strict=True))
    load(loads, path, state)
    set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optim"])
    check(dict(other[0].state_dict()), dict(model.state_dict()))
    check(other[1].state_dict(), opt.state_dict())


CASES = [name.removeprefix("case_") for name in list(globals()) if name.startswith("case_")]


def run(case, path):
    """A case in all directions; AssertionError where one goes wrong."""
    warnings.simplefilter("ignore")
    for saves, loads in DIRECTIONS:
        try:
            globals()[f"case_{case}"](saves, loads, f"{path}-{saves}-{loads}")
        except AssertionError as error:
            raise AssertionError(f"{saves} to {loads}: {error}") from error
        dist.barrier()
    return True


def alone(path):
    """A directory that ranks wrote each for itself."""
    dcp.save(nested(), storage_writer=dcp.FileSystemWriter(path), use_collectives=False)
    dist.barrier()
    check(load("lowbit", path, nested(5)), nested())
    return sorted(name for name in os.listdir(path) if name.endswith("metadata"))


def dedup(path, lowest):
    """The sizes of the files of a save of replicas, dealt out over the ranks."""
    state = {f"w{i}": torch.full((256, 128), float(i)) for i in range(8)}
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    save("lowbit", path, state, planner=planner)
    dist.barrier()
    check(load("lowbit", path, {name: torch.zeros_like(t) for name, t in state.items()}), state)
    return [file.stat().st_size for file in sorted(pathlib.Path(path).glob("*.distcp"))]


def save_in_a_process(store, path, rank, ranks):
    """An asynchronous save from a process that torch starts for it,
    which a worker of a pool may not.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK=rank, WORLD_SIZE=ranks)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks)
    )
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    done = dcp.async_save(
        nested(2), storage_writer=writer("lowbit", path), async_checkpointer_type=kind
    )
    done.result()
    check(load("lowbit", path, nested(5)), nested(2))
    print("equal", flush=True)


if __name__ == "__main__":
    save_in_a_process(*sys.argv[1:])
