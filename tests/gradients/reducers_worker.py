"""What a rank does in test_reducers.py: hooks on gradients beside reducers that are not torch's
DistributedDataParallel as usual.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lowbit

X = torch.ones(2, 8)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def released(model: nn.Module, **options: Any) -> Any:
    opt = lowbit.AdamW(model.named_parameters(), lr=1e-2)
    return lowbit.step_in_backward(model, opt, **options)


USES: dict[str, Callable[[nn.Module], Any]] = {
    "steps": released,
    "steps beside": lambda model: released(model, overlap=True),
    "sums": lambda model: lowbit.accumulate(model, average=2),
    "exact": lambda model: lowbit.accumulate(model, rounding="exact", average=2),
}


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def under_replicate(use: str, when: str) -> str:
    """What is said of composable DDP on the model or near it, before or after the hooks."""
    model = layers()
    if when == "the model":
        replicate(model)
        return said(lambda: USES[use](model))
    if when == "a part":
        replicate(model[0])
        return said(lambda: USES[use](model))
    if when == "later":
        USES[use](model)
        replicate(model)
        return said(lambda: model(X))
    replicate(model)
    USES[use](model[0])
    return said(lambda: model(X))


def joined(unused: bool, rounding: str = "stochastic") -> list[str]:
    """What is said of micro-batches under join(), of which rank 1 has more, and whether the ranks
    end with other weights; and what after it.
    """
    model = DistributedDataParallel(layers(), find_unused_parameters=unused)
    opt = lowbit.AdamW(model.named_parameters(), lr=1e-2)
    accumulator = lowbit.accumulate(model, rounding=rounding, average=4)

    def run(steps: int) -> None:
        for _ in range(steps):
            for last in (False, True):
                with accumulator.micro(last=last):
                    model(X).square().mean().backward()
            opt.step()
            opt.zero_grad()

    def uneven() -> None:
        with model.join():
            run(1 + dist.get_rank())

    inside = said(uneven)
    total = sum(p.detach().double().sum() for p in model.parameters())
    both = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(both, total)
    agree = all(torch.equal(t, total) for t in both)
    after = said(lambda: run(1))
    with model.join(enable=False):
        run(1)
    return [inside, after, "" if agree else "other weights"]


def with_fsdp(use: str) -> bool:
    """Whether training under replicate_with_fsdp, a kind of FSDP2, leaves the weights of ordinary
    steps on the mean of both ranks' gradients.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

    model, plain = layers(), DistributedDataParallel(layers())
    replicate_with_fsdp(model)
    opt = lowbit.AdamW(model.named_parameters(), lr=1e-2)
    ordinary = lowbit.AdamW(plain.module.named_parameters(), lr=1e-2)
    accumulator = None
    if use == "steps":
        lowbit.step_in_backward(model, opt)
    else:
        accumulator = lowbit.accumulate(model, dtype="float32")
    x = X * (1 + dist.get_rank())
    for _ in range(2):
        if accumulator is None:
            model(x).square().mean().backward()
        else:
            with accumulator.micro(last=True):
                model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        plain(x).square().mean().backward()
        ordinary.step()
        ordinary.zero_grad()
    pairs = zip(model.parameters(), plain.module.parameters(), strict=True)
    return all(torch.equal(p.full_tensor(), q) for p, q in pairs)


class Checkpointed(nn.Module):
    """Layers, of which some have backward passes nested in the model's."""

    def __init__(self, nested: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.nested = nested

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=True) if i in self.nested else layer(x)
        return x


NESTED = {"all": (0, 1, 2), "the first": (0,), "the last": (2,), "the middle": (1,)}


def checkpointed(options: dict[str, Any]) -> list[str]:
    """Under which reentrant checkpoints steps in the backward pass leave other weights, norms or
    ranks than steps after it.
    """
    wrong = []
    for which, nested in NESTED.items():
        made = []
        for early in (True, False):
            model = DistributedDataParallel(Checkpointed(nested), **options)
            opt = lowbit.AdamW(model.named_parameters(), lr=1e-2)
            handle = lowbit.step_in_backward(model, opt, max_norm=1e9) if early else None
            for step in range(3):
                model(X * (1 + dist.get_rank() + step)).square().mean().backward()
                if handle is not None and not (options.get("static_graph") and step == 0):
                    assert all(p.grad is None for p in model.parameters())
                norm = lowbit.clip_scale(model.parameters(), 1e9)[0]
                opt.step()
                opt.zero_grad()
            norm = norm if handle is None else handle.norm
            made.append([norm, *(p.detach() for p in model.parameters())])
        wrong += [which for a, b in zip(*made, strict=True) if not torch.equal(a, b)]
        total = torch.cat([t.flatten() for t in made[0]])
        both = [torch.empty_like(total) for _ in range(dist.get_world_size())]
        dist.all_gather(both, total)
        wrong += [f"{which}, ranks" for t in both if not torch.equal(t, total)]
    return wrong


def delayed(use: str) -> str:
    """What is said where DDP reduces a layer apart from its buckets."""
    model = layers()
    late = [(f"1.{name}", p) for name, p in model[1].named_parameters()]
    ddp = DistributedDataParallel(
        model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model[0].weight
    )
    if use == "added":
        return said(lambda: lowbit.accumulate(ddp, hooks=False))
    return said(lambda: USES[use](ddp))


def hooked() -> str:
    """What exact means say of a DDP that has a communication hook."""
    ddp = DistributedDataParallel(layers())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return said(lambda: USES["exact"](ddp))


def freed() -> bool:
    """Whether a DDP is freed after exact means were removed from it."""
    ddp = DistributedDataParallel(layers())
    accumulator = USES["exact"](ddp)
    for last in (False, True):
        with accumulator.micro(last=last):
            ddp(X).sum().backward()
    accumulator.remove()
    ddp.zero_grad()
    ddp(X).sum().backward()  # averaged, as without the hook
    kept = weakref.ref(ddp)
    del ddp, accumulator
    gc.collect()
    return kept() is None


def added_in_views(buckets: float) -> bool:
    """Whether `add()` sums what torch sums, where gradients are views of buckets of so many MB."""
    made = []
    for adds in (True, False):
        ddp = DistributedDataParallel(
            layers(), gradient_as_bucket_view=True, bucket_cap_mb=buckets, broadcast_buffers=False
        )
        sums = lowbit.accumulate(ddp, dtype="float32", hooks=False) if adds else None
        for step in range(2):  # torch makes its buckets anew after the first pass
            ddp.zero_grad()
            for i in range(3):
                ddp(X * (1 + i + step)).square().mean().backward()
                if sums is not None:
                    sums.add()
            if sums is not None:
                sums.finish()
        made.append([p.grad for p in ddp.parameters()])
    return all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(*made, strict=True))
