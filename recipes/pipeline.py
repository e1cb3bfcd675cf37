"""Pipeline parallelism: each rank has some stages of the model. The run resumes with another number
of stages, under another schedule or in one process.

    torchrun --nproc-per-node 2 recipes/pipeline.py
    torchrun --nproc-per-node 4 recipes/pipeline.py
    torchrun --nproc-per-node 2 recipes/pipeline.py --schedule ZBVZeroBubble --stages 4
    torchrun --nproc-per-node 4 recipes/pipeline.py --shards 2
    torchrun --nproc-per-node 1 recipes/pipeline.py --schedule GPipe

The first run has 2 stages under 1F1B. Each of the others resumes from the run before it: with 4
stages, with 2 stages on each rank, with 2 stages that FSDP2 shards over 2 ranks each, and in one
process.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from toy import batch, make_model

import lowbit

STEPS, DEPTH, MICRO_BATCHES = 20, 4, 4
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Stage(nn.Module):
    """Consecutive blocks; the first stage has the embedding too, the last one the head."""

    def __init__(self, model: nn.Module, number: int, stages: int) -> None:
        super().__init__()
        depth = len(model.blocks)
        first, end = number * depth // stages, (number + 1) * depth // stages
        self.compute = model.compute
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, end)})
        if number == 0:
            self.tokens, self.places = model.tokens, model.places
        if number == stages - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
            x = x if self.compute is None else x.to(self.compute)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


class Part(nn.Module):
    """The modules of a rank's stages, under their names in the whole model: those of a checkpoint,
    and of random bits.
    """

    def __init__(self, stages: list[Stage]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict()
        for stage in stages:
            self.blocks.update(stage.blocks)
            for name, module in stage.named_children():
                if name != "blocks":
                    self.add_module(name, module)


def numbers_of(schedule: str, rank: int, ranks: int, stages: int) -> list[int]:
    """The stages of a rank: in turn, or there and back under the schedules with a V."""
    count = stages // ranks
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return [rank, 2 * ranks - 1 - rank]
    return [rank + k * ranks for k in range(count)]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def mesh_of(device: str, shards: int = 1) -> DeviceMesh:
    """Stages along the first dimension; along the second,
    the ranks among which each stage is sharded.
    """
    shape = (dist.get_world_size() // shards, shards)
    return init_device_mesh(device, shape, mesh_dim_names=("stages", "shards"))


def build(
    model: nn.Module, name: str, stages: int, device: str, mesh: DeviceMesh
) -> tuple[Part, Any]:
    """This rank's modules, and the schedule that runs them."""
    group = mesh.get_group("stages")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    kind = get_schedule_class(name)
    single = issubclass(kind, PipelineScheduleSingle)
    if stages % ranks or single != (stages == ranks) or stages > len(model.blocks):
        raise SystemExit(
            f"{stages} stages on {ranks} ranks: {name} takes {'one' if single else 'several'} on "
            f"each, and at most {len(model.blocks)}"
        )
    numbers = numbers_of(name, rank, ranks, stages)
    mine = [Stage(model, number, stages) for number in numbers]
    if mesh["shards"].size() > 1:
        for stage in mine:
            for block in stage.blocks.values():
                fully_shard(block, mesh=mesh["shards"])
            fully_shard(stage, mesh=mesh["shards"])
    placed = [
        PipelineStage(stage, number, stages, torch.device(device), group=group)
        for stage, number in zip(mine, numbers, strict=True)
    ]
    return Part(mine), kind(placed[0] if single else placed, MICRO_BATCHES, loss_fn=loss_of)


def train_step(schedule: Any, part: Part, ids: torch.Tensor) -> float | None:
    """Forward and backward passes of all micro-batches. The mean of their losses,
    on the rank with the last stage.
    """
    losses: list[torch.Tensor] = []
    inputs = (ids[:, :-1],) if hasattr(part, "tokens") else ()
    targets = {"target": ids[:, 1:], "losses": losses} if hasattr(part, "head") else {}
    schedule.step(*inputs, **targets)
    return torch.stack(losses).mean().item() if losses else None


def save(part: Part, opt: torch.optim.Optimizer, step: int, path: pathlib.Path) -> None:
    """Each rank saves what its stages have.
    Flat names of state know nothing of groups and stages.
    """
    state = get_optimizer_state_dict(part, opt, options=FLAT)
    content = {"model": get_model_state_dict(part), "optim": state, "step": torch.tensor(step)}
    # A save that is killed leaves the one that this run resumed from.
    dcp.save(content, storage_writer=lowbit.checkpoint.Writer(path))


def load(part: Part, opt: torch.optim.Optimizer, path: pathlib.Path) -> int:
    """Each rank reads what its stages have, whichever ranks wrote it.
    The number of steps that were taken.
    """
    state = get_optimizer_state_dict(part, opt, options=FLAT)
    content = {"model": get_model_state_dict(part), "optim": state, "step": torch.tensor(0)}
    dcp.load(content, checkpoint_id=path)
    set_model_state_dict(part, content["model"])
    set_optimizer_state_dict(part, opt, content["optim"], options=FLAT)
    return int(content["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--schedule",
        default="1F1B",
        help="GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble",
    )
    parser.add_argument("--stages", type=int, help="as many as ranks by default")
    parser.add_argument(
        "--shards",
        type=int,
        default=1,
        help="ranks among which FSDP2 shards each stage; 1 by default",
    )
    parser.add_argument("--folder", type=pathlib.Path, default="out/pipeline")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = mesh_of(device, args.shards)
    shard = mesh["shards"].get_local_rank()

    # Of a large model each rank makes its own stages alone.
    model = make_model(depth=DEPTH).to(device)
    part, schedule = build(model, args.schedule, args.stages or mesh["stages"].size(), device, mesh)
    del model
    opt = lowbit.AdamW(part.named_parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    begin = load(part, opt, args.folder) if (args.folder / ".metadata").exists() else 0
    recent: list[float] = []
    for step in range(begin, begin + STEPS):
        loss = train_step(schedule, part, batch(step, shard, args.shards).to(device))
        # The norm of all stages.
        lowbit.clip_grad_norm_(part.parameters(), 1.0, group=mesh.get_group("stages"))
        opt.step()
        opt.zero_grad()
        if loss is not None and shard == 0:
            recent = [*recent[-9:], loss]
            if step % 10 == 0 or step == begin + STEPS - 1:
                print(f"step {step}, loss {sum(recent) / len(recent):.3f}", flush=True)
    save(part, opt, begin + STEPS, args.folder)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
