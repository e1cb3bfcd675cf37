"""What a rank does in test_pipeline.py: recipes/pipeline.py with any number of stages, each whole
or sharded; what its stages have in the end.
"""

from __future__ import annotations

import functools
import hashlib
import math
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor

import lowbit
from lowbit.checkpoint import Writer
from lowbit.gradients import clip
from lowbit.sharding import whole
from tests.support.paths import RECIPES

sys.path.insert(0, str(RECIPES))
import pipeline
import toy

HALF, ALL, DEPTH = 2, 4, 4
SIZE = 8  # sequences in a batch: 2 in each micro-batch
# Far below the norms, so that every step depends on the gradients of all stages.
MAX_NORM = 0.01
RULES = {
    "8bit": lowbit.AdamW,
    "4bit": functools.partial(lowbit.AdamW, state_format="4bit", param_format="bfloat16_kahan"),
    "Adafactor": functools.partial(lowbit.Adafactor, beta1=0.9),
    "LAMB": lowbit.LAMB,
}
Digests = dict[str, str]  # of each parameter


class Run:
    def __init__(self, rule: str, schedule: str, stages: int, shards: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = toy.make_model(depth=DEPTH)
        if seed:
            for p in model.parameters():
                nn.init.normal_(p, std=0.1)
        mesh = pipeline.mesh_of("cpu", shards)
        self.group = mesh.get_group("stages")
        self.part, self.schedule = pipeline.build(model, schedule, stages, "cpu", mesh)
        self.opt = RULES[rule](self.part.named_parameters(), lr=1e-2, min_numel=64)
        self.norms: list[float] = []

    def advance(self, begin: int, end: int) -> None:
        """Every shard of a stage has the same data: the mean is exact."""
        for step in range(begin, end):
            loss = pipeline.train_step(self.schedule, self.part, toy.batch(step, size=SIZE))
            assert (loss is not None) == hasattr(self.part, "head")
            norm = lowbit.clip_grad_norm_(self.part.parameters(), MAX_NORM, group=self.group)
            assert norm > 10 * MAX_NORM
            self.norms.append(float(norm))
            self.opt.step()
            self.opt.zero_grad()

    def digests(self) -> Digests:
        """Of weights and state."""
        found = {}
        for name, p in self.part.named_parameters():
            h = hashlib.sha256()
            for key, value in sorted({"": p.detach(), **self.opt.state[p]}.items()):
                value = whole(value).contiguous()
                h.update(key.encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes())
            found[name] = h.hexdigest()
        return found


# By rule the local state half way and in the end, and the norms of the steps between.
Found = dict[str, tuple[Digests, Digests, list[float]]]


def trained(rules: list[str], schedule: str, stages: int, shards: int, folder: str) -> Found:
    """Saves half way."""
    found = {}
    for rule in rules:
        run = Run(rule, schedule, stages, shards)
        run.advance(0, HALF)
        pipeline.save(run.part, run.opt, HALF, pathlib.Path(folder) / rule)
        saved = run.digests()
        run.advance(HALF, ALL)
        found[rule] = saved, run.digests(), run.norms[HALF:]
    return found


def resumed(rules: list[str], schedule: str, stages: int, shards: int, folder: str) -> Found:
    """What was saved half way."""
    found = {}
    for rule in rules:
        run = Run(rule, schedule, stages, shards, seed=1)
        assert pipeline.load(run.part, run.opt, pathlib.Path(folder) / rule) == HALF
        loaded = run.digests()
        run.advance(HALF, ALL)
        found[rule] = loaded, run.digests(), run.norms
    return found


def nested(folder: str) -> dict[str, str]:
    """What is said where stages save nested names, in torch's way and in lowbit's,
    and load them again.
    """
    run = Run("8bit", "1F1B", 2, 1)
    run.advance(0, 1)
    said = {}

    def attempt(how: str, get, put) -> None:
        saved = {"optim": get()}
        try:
            dcp.save(saved, storage_writer=Writer(f"{folder}/{how}"))
        except dcp.CheckpointException as error:
            said[f"{how}, Writer"] = str(error)
        dcp.save(saved, checkpoint_id=f"{folder}/{how}")
        dcp.load(saved, checkpoint_id=f"{folder}/{how}")
        try:
            put(saved["optim"])
            said[how] = "loaded"
        except ValueError as error:
            said[how] = str(error)
        # What both say to do.
        before = run.digests()
        put({**saved["optim"], "param_groups": get()["param_groups"]})
        assert run.digests() == before

    attempt(
        "torch",
        lambda: get_optimizer_state_dict(run.part, run.opt),
        lambda saved: set_optimizer_state_dict(run.part, run.opt, saved),
    )
    attempt(
        "lowbit",
        lambda: lowbit.flat.get_state_dict(run.opt),
        lambda saved: lowbit.flat.set_state_dict(run.opt, saved),
    )
    return said


def counted_twice() -> str:
    """What is said where `group` has the ranks that shard a stage."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    p = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    p.grad = torch.ones_like(p)
    clip.total_norm(p, 2.0)
    try:
        clip.total_norm(p, 2.0, dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return "nothing"


def norms() -> list[str]:
    """Norms over ranks with different parameters beside those of all of them, also where a rank has
    no gradient or no parameter.
    """
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    params = [nn.Parameter(torch.zeros(n, 40, dtype=torch.bfloat16)) for n in (3, 50, 7, 11)]
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).bfloat16()
    whole_of = [p.grad.clone() for p in params]
    for power in (2.0, 1.0, 3.0, math.inf):
        for without in ([], [1]):  # the last case: rank 1 has no parameters at all
            mine = [p for i, p in enumerate(params) if i % ranks == rank and rank not in without]
            every = [p for i, p in enumerate(params) if i % ranks not in without]
            want = clip.total_norm(every, power)
            if not torch.equal(clip.total_norm(mine, power, dist.group.WORLD), want):
                wrong.append(f"norm {power} without {without}")
    mine = params[rank::ranks]
    want, divisor = lowbit.clip_scale(params, 0.5)
    found = lowbit.clip_scale(mine, 0.5, group=dist.group.WORLD)
    wrong += [] if all(map(torch.equal, found, (want, divisor))) else ["clip_scale"]
    lowbit.clip_grad_norm_(mine, 0.5, group=dist.group.WORLD)
    clipped = [p.grad.clone() for p in mine]
    for p, grad in zip(params, whole_of, strict=True):
        p.grad = grad
    lowbit.clip_grad_norm_(params, 0.5)
    wrong += [] if all(map(torch.equal, clipped, (p.grad for p in mine))) else ["clip_grad_norm_"]
    for p in params:
        p.grad = None
    wrong += [] if clip.total_norm(mine, 2.0, dist.group.WORLD) == 0 else ["no gradient"]
    if rank == 0:
        params[0].grad = torch.full_like(params[0], math.inf)
    norm = clip.total_norm(mine, 2.0, dist.group.WORLD)
    return wrong + ([] if norm.isinf() else ["an infinity on one rank"])
