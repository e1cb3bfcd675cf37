"""Accumulation, steps in backward and clipping in the wrong places: what the ranks of
gradients_worker.py are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import lowbit
from tests.gradients.gradients_nets import (
    Found,
    agreed,
    batch,
    grads_of,
    net,
    optimizer,
    sharded,
)
from tests.gradients.test_gradients import Net


def refused(text: str, call: Callable[[], Any]) -> bool:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert text in str(error), str(error)
        return True
    return False


def kept_on_each_rank() -> Found:
    """What is said of a last micro-batch that DDP does not reduce."""

    def around() -> None:
        with model.no_sync(), accumulator.micro(last=True):
            model(batch(0)).backward()

    def inside() -> None:
        with accumulator.micro(last=True):
            with model.no_sync():
                loss = model(batch(0))
            loss.backward()

    def before() -> None:
        with model.no_sync():
            loss = model(batch(0))
        with accumulator.micro(last=True):
            loss.backward()

    found = {}
    for case in (around, inside, before):
        model = net("ddp")
        accumulator = lowbit.accumulate(model)
        text = "last micro-batch ran under no_sync() of DistributedDataParallel"
        found[f"no_sync, {case.__name__}"] = refused(text, case)
        with accumulator.micro(last=False), model.no_sync():
            model(batch(0)).backward()
        with accumulator.micro(last=True):
            model(batch(1)).backward()
        found[f"no_sync, {case.__name__}, run again"] = agreed(grads_of(model))
    return found


def wrong_places(ranks: int) -> Found:
    found = {}
    model = Net()
    accumulator = lowbit.accumulate(model)
    sharded(model)
    text = "fully_shard was called after lowbit.accumulate"
    found["before fully_shard, forward"] = refused(text, lambda: model(batch(0)))
    found["before fully_shard, micro"] = refused(text, accumulator.micro(last=True).__enter__)

    inner = Net()
    lowbit.accumulate(inner)
    ddp = DistributedDataParallel(inner, find_unused_parameters=True)
    found["inside DDP"] = refused("call it on the DistributedDataParallel", lambda: ddp(batch(0)))
    model = Net()
    lowbit.step_in_backward(model, optimizer(model))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    text = "lowbit.step_in_backward was called on a module inside"
    found["inside DDP, steps"] = refused(text, lambda: ddp(batch(0)))
    outer = nn.Sequential(net("ddp"))
    text = "this Sequential contains a DistributedDataParallel; call lowbit"
    found["inside DDP, around it"] = refused(text, lambda: lowbit.accumulate(outer))
    found["inside DDP, steps around it"] = refused(
        text, lambda: lowbit.step_in_backward(outer, optimizer(outer))
    )
    model = Net()
    lowbit.step_in_backward(model, optimizer(model))
    sharded(model)
    text = "fully_shard was called after lowbit.step_in_backward"
    found["before fully_shard, steps"] = refused(text, lambda: model(batch(0)))
    ddp = net("ddp")
    found["assign_hooks on DDP"] = refused(
        "before DistributedDataParallel reduces",
        lambda: lowbit.StochasticAccumulator.assign_hooks(ddp),
    )
    lowbit.accumulate(ddp)
    loss = ddp(batch(0))
    found["DDP outside of micro"] = refused("outside `with accumulator.micro", loss.backward)

    found |= kept_on_each_rank()

    for orig in (True, False):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
        fsdp = FullyShardedDataParallel(plain, use_orig_params=orig, device_id=torch.device("cpu"))
        text = "flat shard of FSDP1"
        found[f"FSDP1, {orig}"] = refused(text, lambda fsdp=fsdp: lowbit.accumulate(fsdp))
        found[f"clip FSDP1, {orig}"] = refused(
            text, lambda fsdp=fsdp: lowbit.clip_grad_norm_(fsdp.parameters(), 1.0)
        )
        total = None
        accumulator = lowbit.accumulate(fsdp, rounding="kahan", hooks=False)
        for i in range(4):
            x = torch.randn(
                4, 16, generator=torch.Generator().manual_seed(10 * i + dist.get_rank())
            ).bfloat16()
            fsdp(x).square().mean().backward()
            local = torch.cat(
                [p.grad.double().flatten() for p in fsdp.parameters() if p.grad is not None]
            )
            total = local if total is None else total + local
            accumulator.add()
        accumulator.finish()
        local = torch.cat(
            [p.grad.double().flatten() for p in fsdp.parameters() if p.grad is not None]
        )
        found[f"FSDP1 after the backward pass, {orig}"] = (
            float((local - total).norm() / total.norm()) < 4e-3
        )
    return found
