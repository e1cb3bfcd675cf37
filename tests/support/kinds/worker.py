"""What a rank does for tests/support/kinds: makes the kinds of checkpoints that it is told to,
each under FOLDER/<kind>.

torchrun --nproc-per-node N tests/support/kinds/worker.py FOLDER KIND...
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.kinds import runs as run
from tests.support.ranks.leaving import leave

MAKERS: dict[str, Callable[[pathlib.Path], None]] = {}


def makes(name: str) -> Callable[[Callable[[pathlib.Path], None]], Any]:
    """Registers what writes the kind `name`; it is given the path."""

    def register(maker: Callable[[pathlib.Path], None]) -> Callable[[pathlib.Path], None]:
        MAKERS[name] = maker
        return maker

    return register


def world() -> int:
    return dist.get_world_size()


def rank0_saves(content: Callable[[], Any], path: pathlib.Path, **options: Any) -> None:
    """A file, as scripts have it: all ranks gather, one writes."""
    made = content()
    if dist.get_rank() == 0:
        torch.save(made, path, **options)
    dist.barrier()


# Wrapped and trained, each once.


def as_placed(g: Tensor, p: Tensor) -> Tensor:
    """The part of a global gradient that is here; nothing is sent, for every rank knows it all."""
    if not isinstance(p, DTensor):
        return g
    return distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)


@functools.cache
def fsdp2(which: str = "adamw") -> tuple[nn.Module, torch.optim.Optimizer]:
    net = run.net_for(which)
    mesh = init_device_mesh("cpu", (world(),))
    fully_shard(net.body, mesh=mesh)
    fully_shard(net, mesh=mesh)
    opt = run.optimizer(which, net.named_parameters())
    run.train(net, opt, as_placed)
    return net, opt


@functools.cache
def ddp(which: str = "adamw") -> tuple[nn.Module, torch.optim.Optimizer]:
    net = run.net_for(which)
    wrapped = nn.parallel.DistributedDataParallel(net)
    opt = run.optimizer(which, net.named_parameters())
    run.train(net, opt, as_placed)
    return wrapped, opt


@functools.cache
def fsdp1(mesh: bool, original: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Flat parameters, so the gradients come from a backward;
    the mean over the ranks of what all of them have is exact.
    """
    options = {"device_mesh": init_device_mesh("cpu", (world(),))} if mesh else {}
    net = run.Net()
    here = {"device_id": torch.device("cpu"), "use_orig_params": original, **options}
    net.body = FSDP1(net.body, **here)
    net = FSDP1(net, **here)
    shapes = {name: p.shape for name, p in run.Net().named_parameters()}

    def clean(name: str) -> str:
        return name.replace("_fsdp_wrapped_module.", "")

    if original:  # a rank's part of a parameter has one dimension: the groups go by the whole one's
        matrices = [p for n, p in net.named_parameters() if len(shapes[clean(n)]) >= 2]
        others = [p for n, p in net.named_parameters() if len(shapes[clean(n)]) < 2]
        groups = [
            {"params": matrices, "weight_decay": run.DECAY},
            {"params": others, "weight_decay": 0.0},
        ]
    else:
        groups = [{"params": list(net.parameters()), "weight_decay": run.DECAY}]
    opt = torch.optim.AdamW(groups, lr=run.LR, betas=run.BETAS)
    for step in range(run.STEPS):
        net({name: run.gradient(name, shape, step) for name, shape in shapes.items()}).backward()
        opt.step()
        opt.zero_grad()
    return net, opt


def state_of(net: nn.Module, opt: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    said = StateDictOptions(**options)
    model_said = StateDictOptions(full_state_dict=said.full_state_dict)
    return {
        "model": get_model_state_dict(net, options=model_said),
        "optim": get_optimizer_state_dict(net, opt, options=said),
    }


# torch's state, as torch's tools write it.


def fsdp1_state(mesh: bool, full: bool) -> dict[str, Any]:
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    # Of a full state dict with original parameters all states of a flat parameter are views of one
    # buffer in torch 2.13: exp_avg has exp_avg_sq's values.
    net, opt = fsdp1(mesh, original=not full)
    if full:  # offload_to_cpu kills rank 0 of torch 2.13 on gloo
        said: tuple[Any, ...] = (
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True),
            FullOptimStateDictConfig(rank0_only=True),
        )
    else:
        said = (
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        )
    with FSDP1.state_dict_type(net, *said):
        return {"model": net.state_dict(), "optim": FSDP1.optim_state_dict(net, opt)}


@makes("ddp_file")
def _(path: pathlib.Path) -> None:
    net, opt = ddp()
    rank0_saves(lambda: {"model": net.state_dict(), "optimizer": opt.state_dict()}, path)


@makes("raw")
def _(path: pathlib.Path) -> None:
    net, opt = fsdp2()
    dcp.save({"model": net.state_dict(), "optim": opt.state_dict()}, checkpoint_id=path)


@makes("hsdp")
def _(path: pathlib.Path) -> None:
    net = run.Net()
    mesh = init_device_mesh("cpu", (2, world() // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net.body, mesh=mesh)
    fully_shard(net, mesh=mesh)
    opt = run.optimizer("adamw", net.named_parameters())
    run.train(net, opt, as_placed)
    dcp.save(state_of(net, opt), checkpoint_id=path)


@makes("tp_fsdp2")
def _(path: pathlib.Path) -> None:
    """The columns of the matrix over one dimension of the mesh,
    rows of everything over the other.
    """
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    tp = min(2, world())
    mesh = init_device_mesh("cpu", (world() // tp, tp), mesh_dim_names=("dp", "tp"))
    net = run.Net()
    parallelize_module(net, mesh["tp"], {"body.linear": RowwiseParallel()})
    fully_shard(net.body, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    assert Shard(1) in net.body.linear.weight.placements
    opt = run.optimizer("adamw", net.named_parameters())
    run.train(net, opt, as_placed)
    dcp.save(state_of(net, opt), checkpoint_id=path)


def written_by(path: pathlib.Path, **options: Any) -> None:
    writer = dcp.FileSystemWriter(path, **options)
    dcp.save(state_of(*fsdp2()), storage_writer=writer)


@makes("zstd")
def _(path: pathlib.Path) -> None:
    from torch.distributed.checkpoint._extension import ZStandard

    written_by(path, _extensions=[ZStandard()])


def saved(content: Callable[[], Any], **options: Any) -> Callable[[pathlib.Path], None]:
    """What saves a directory of all ranks."""
    return lambda path: dcp.save(content(), checkpoint_id=path, **options)


def sharded_kind(which: str) -> Callable[[pathlib.Path], None]:
    return saved(lambda: state_of(*fsdp2(which)))


def raw_file(which: str) -> Callable[[pathlib.Path], None]:
    def save(path: pathlib.Path) -> None:
        net, opt = run.plain(which)
        torch.save({"model": net.state_dict(), "optimizer": opt.state_dict()}, path)

    return save


MAKERS |= {
    "fsdp2_nested": sharded_kind("adamw"),
    "fsdp2_flattened": saved(lambda: state_of(*fsdp2(), flatten_optimizer_state_dict=True)),
    "fsdp2_optim_only": saved(lambda: get_optimizer_state_dict(*fsdp2())),
    "fsdp2_full": lambda path: rank0_saves(lambda: state_of(*fsdp2(), full_state_dict=True), path),
    "fsdp1_sharded": saved(lambda: fsdp1_state(mesh=False, full=False)),
    "fsdp1_dtensor": saved(lambda: fsdp1_state(mesh=True, full=False)),
    "fsdp1_full": lambda path: rank0_saves(lambda: fsdp1_state(mesh=False, full=True), path),
    "ddp": saved(lambda: state_of(*ddp())),
    "async_save": lambda path: dcp.async_save(state_of(*fsdp2()), checkpoint_id=path).result(),
    "no_collectives": saved(lambda: state_of(*fsdp2()), use_collectives=False),
    "two_threads": lambda path: written_by(path, thread_count=2),
    "file_per_item": lambda path: written_by(path, single_file_per_rank=False),
    "zip_file": raw_file("adamw"),
    "optimizer_file": lambda path: torch.save(run.plain("adamw")[1].state_dict(), path),
    "model_file": lambda path: torch.save(run.plain("adamw")[0].state_dict(), path),
}
for which in ("adam", "amsgrad", "sgd"):
    MAKERS[which] = sharded_kind(which)
    MAKERS[f"{which}_file"] = raw_file(which)
for preset in ("8bit", "4bit", "fp8", "log8", "factored4", "kahan"):
    MAKERS[f"lowbit_{preset}"] = sharded_kind(f"lowbit {preset}")
    MAKERS[f"lowbit_{preset}_file"] = raw_file(f"lowbit {preset}")
for preset in ("8bit", "4bit", "fp8"):
    MAKERS[f"torchao_{preset}"] = sharded_kind(f"ao {preset}")
    MAKERS[f"torchao_{preset}_file"] = raw_file(f"ao {preset}")
MAKERS["adafactor_file"] = raw_file("adafactor")
MAKERS["bnb_file"] = raw_file("bnb")


@makes("adafactor")
def _(path: pathlib.Path) -> None:
    """Replicated: torch's own reduces over the local shard alone."""
    dcp.save(state_of(*ddp("adafactor")), checkpoint_id=path)


@makes("bnb")
def _(path: pathlib.Path) -> None:
    """Replicated: bitsandbytes steps no DTensors. Its nested entries become flat keys."""
    net, opt = ddp("bnb")
    dcp.save({"model": net.module.state_dict(), "optim": opt.state_dict()}, checkpoint_id=path)


@makes("flashoptim")
def _(path: pathlib.Path) -> None:
    """Its moments under FSDP2: every rank's codes and scales,
    each as if of a tensor as long as all of them together.
    """
    from tests.support.kinds.peers import EVEN, flash_even, groups

    mesh = init_device_mesh("cpu", (world(),))

    def placed(t: Tensor) -> Tensor:
        if t.ndim == 0:
            return t
        return distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)

    model, state = {}, {}
    for name in EVEN:
        weight, entry = flash_even(name)
        model[name] = placed(weight)
        state[name] = {key: placed(t) for key, t in entry.items()}
    said = {"initial_lr": run.LR, "master_bytewidth": 3, "quantize": True}
    optim = {"state": state, "param_groups": groups(state, **said)}
    dcp.save({"model": model, "optim": optim}, checkpoint_id=path)


@makes("master")
def _(path: pathlib.Path) -> None:
    net, opt = fsdp2()
    saved = state_of(net, opt)
    saved["master"] = saved["model"]
    saved["model"] = {name: w.bfloat16() for name, w in saved["model"].items()}
    dcp.save(saved, checkpoint_id=path)


# Files of one process.


@makes("legacy_file")
def _(path: pathlib.Path) -> None:
    net, opt = run.plain("adamw")
    content = {"model": net.state_dict(), "optimizer": opt.state_dict()}
    torch.save(content, path, _use_new_zipfile_serialization=False)


@makes("safetensors_model")
def _(path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    save_file(run.plain_model("adamw"), str(path), metadata={"format": "pt"})


def main() -> None:
    from tests.support.kinds import peers

    warnings.filterwarnings("ignore")
    folder, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    makers = {**MAKERS, **peers.MAKERS}
    for path in names:
        begin = time.perf_counter()
        try:
            makers[pathlib.PurePath(path).stem](folder / path)
        except BaseException:
            print(f"the kind {path} failed on rank {dist.get_rank()}", file=sys.stderr)
            raise
        if "KINDS_TIMES" in os.environ and dist.get_rank() == 0:
            print(f"{path} {time.perf_counter() - begin:.2f}", file=sys.stderr)


@contextlib.contextmanager
def left_in_peace() -> Iterator[None]:
    """Drops caches, so that no sharded tensor outlives gloo."""
    try:
        yield
    finally:
        for cached in (fsdp2, ddp, fsdp1):
            cached.cache_clear()
    leave()


if __name__ == "__main__":
    with left_in_peace():
        main()
