"""Real training in test_wrappers.py and test_flat_shards.py: forward and backward passes through a
wrapper, the same batches on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

import lowbit
from lowbit import fsdp1
from tests.sharding.wrappers_worker import Kept, kept_of, unequal
from tests.support.wrap import mesh_of

STEPS = 6
MOST = 0.01  # that gradients are clipped to
# A wrapper with such a name in it trains by this; others by AdamW.
RULES = {
    "Schedule-Free": lambda ps: lowbit.ScheduleFreeAdamW(ps, lr=1e-2, warmup_steps=3),
    "cautious": lambda ps: lowbit.AdamW(ps, lr=1e-2, cautious=True),
    "": lambda ps: lowbit.AdamW(ps, lr=1e-2),
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(101, 48)
        self.first = nn.Linear(48, 300)
        self.norm = nn.LayerNorm(300)
        self.second = nn.Linear(300, 77)
        self.unused = nn.Linear(64, 80)  # an expert that never gets a token
        self.head = nn.Linear(77, 101, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(self.embed(ids))))
        return self.head(torch.tanh(self.second(x)))


def wrapped(wrapper: str) -> nn.Module:
    """`wrapper`: one of WRAPPERS with a comma and more, as test_wrappers.py lists them;
    anything else is none.
    """
    model: nn.Module = Small()
    kind, mixed = wrapper.partition(",")[0], "mixed" in wrapper
    if kind in ("FSDP1 orig", "FSDP1 flat"):
        options: dict = {"use_orig_params": kind == "FSDP1 orig", "device_id": torch.device("cpu")}
        if "no shard" in wrapper:
            options["sharding_strategy"] = ShardingStrategy.NO_SHARD
        if "hybrid" in wrapper:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
            options |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        if mixed:
            options["mixed_precision"] = MixedPrecision(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        for name in ("first", "unused"):
            setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
        return FullyShardedDataParallel(model, **options)
    if kind in ("FSDP2", "HSDP 2x2"):
        options = {"mesh": mesh_of(kind)}
        if mixed:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        for name in ("first", "unused"):
            fully_shard(getattr(model, name), **options)
        return fully_shard(model, **options)
    if kind.startswith(("DDP", "Zero")):
        static = (
            {"gradient_as_bucket_view": True, "static_graph": True}
            if "views" in wrapper
            else {"find_unused_parameters": True}
        )
        return nn.parallel.DistributedDataParallel(model, **static)
    return model


@functools.cache
def alone(kind: str, clip: str, rule: str) -> tuple[Kept, list[float]]:
    """What one process has in the end, and the norms of its gradients where they are clipped."""
    model, norms = Small(), []
    opt = RULES[rule](model.named_parameters())
    for step in range(STEPS):
        swap(opt, step)
        for ids in batches(step, kind):
            computed = copy.deepcopy(model).to(torch.bfloat16) if kind == "mixed" else model
            backward(computed, ids)
        if kind == "mixed":
            for p, q in zip(model.parameters(), computed.parameters(), strict=True):
                p.grad = None if q.grad is None else q.grad.float()
        norms += update(model, opt, clip)
    swap(opt, STEPS)
    return kept_of(model, opt), norms


def swap(opt, step: int) -> None:
    """Modes of an optimizer that has them: train mode, but for a look at the average halfway,
    and eval mode in the end.
    """
    if not hasattr(opt, "train"):
        return
    if step in (STEPS // 2, STEPS):
        opt.eval()
    if step < STEPS:
        opt.train()


def update(model: nn.Module, opt, clip: str) -> list[float]:
    """A step behind clipping: "" (not at all), "in place" or "in the step". The norm."""
    norms = []
    if clip == "in the step":
        norm, scale = lowbit.clip_scale(model.parameters(), MOST)
        opt.step(grad_scale=scale)
    else:
        if clip:
            norm = lowbit.clip_grad_norm_(model.parameters(), MOST)
        opt.step()
    if clip:
        norms.append(norm.item())
        assert norm.item() > MOST
    opt.zero_grad()
    return norms


def batches(step: int, kind: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    count = 2 if kind == "no_sync" else 1
    return [torch.randint(0, 101, (8, 16), generator=generator) for _ in range(count)]


def backward(model: nn.Module, ids: torch.Tensor) -> None:
    logits = model(ids)
    nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()


def real(wrapper: str, clip: str = "") -> list[str]:
    """What is not equal after training; but for the streams of random bits, which
    ZeroRedundancyOptimizer renumbers.
    """
    kind = "mixed" if "mixed" in wrapper else "no_sync" if "no_sync" in wrapper else "plain"
    rule = next(rule for rule in RULES if rule in wrapper)
    model = wrapped(wrapper)
    zero = wrapper == "ZeroRedundancyOptimizer"
    if zero:
        opt = ZeroRedundancyOptimizer(model.parameters(), lowbit.AdamW, lr=1e-2)
    else:
        opt = RULES[rule](model.named_parameters())
    if wrapper.startswith("FSDP1"):
        fsdp1.bind(model, opt)
    norms = []
    for step in range(STEPS):
        swap(opt, step)
        several = batches(step, kind)
        for ids in several:
            waits = len(several) > 1 and ids is several[0]
            with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                backward(model, ids)
        norms += update(model, opt, clip)
    swap(opt, STEPS)
    want, their_norms = alone(kind, clip, rule)
    if zero:
        return _zero_unequal(model, opt, want)
    wrong = unequal(opt, want, without=("stream",))
    return wrong if norms == their_norms else [*wrong, f"norms {norms}, not {their_norms}"]


def _zero_unequal(model, opt, want: Kept) -> list[str]:
    """The same of ZeroRedundancyOptimizer, whose state each rank has a part of."""
    states: list = [None] * dist.get_world_size()
    mine = {
        i: dict(opt.optim.state[p])
        for i, p in enumerate(model.parameters())
        if p in opt.optim.state
    }
    dist.all_gather_object(states, mine)
    state = {i: kept for part in states for i, kept in part.items()}
    wrong = []
    for i, (name, p) in enumerate(model.module.named_parameters()):
        found = {"": p.detach(), **state[i]}
        same = found.keys() == want[name].keys()
        if not same or not all(
            torch.equal(t, want[name][key]) for key, t in found.items() if key != "stream"
        ):
            wrong.append(name)
    return wrong
