"""`lowbit.accumulate`: the gradients of micro-batches, added up in a chosen format."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal, overload

import torch
from torch import nn

from lowbit.config.arguments import check_model
from lowbit.gradients.accumulator import Accumulator
from lowbit.gradients.exact import ExactAccumulator

_FORMATS = {
    "stochastic": "bfloat16_stochastic",
    "nearest": "bfloat16",
    "kahan": "bfloat16_kahan",
}
_DTYPES: Mapping[Any, torch.dtype] = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    torch.bfloat16: torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    torch.float32: torch.float32,
}


@overload
def accumulate(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    *,
    rounding: Literal["exact"],
    average: int | None = None,
    seed: int = 0,
    hooks: bool = True,
    group: Any = None,
    ranks_per_node: int | None = None,
) -> ExactAccumulator: ...


@overload
def accumulate(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    rounding: Literal["stochastic", "kahan", "nearest"] = "stochastic",
    *,
    average: int | None = None,
    seed: int = 0,
    hooks: bool = True,
) -> Accumulator: ...


def accumulate(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    rounding: str = "stochastic",
    *,
    average: int | None = None,
    seed: int = 0,
    hooks: bool = True,
    group: Any = None,
    ranks_per_node: int | None = None,
) -> Accumulator | ExactAccumulator:
    """Accumulates the gradients of micro-batches in buffers of `dtype`,
    and hands over each sum as `p.grad`.

    The addition runs inside each backward pass:

        accumulator = lowbit.accumulate(model, average=len(micro_batches))
        for i, micro_batch in enumerate(micro_batches):
            with accumulator.micro(last=i == len(micro_batches) - 1):
                loss(model(micro_batch)).backward()
        opt.step()
        opt.zero_grad()

    An exception inside `micro` discards the whole step (`reset`). A `p.grad` that exists when a
    step's first `micro` begins is added undivided, as torch does. Without `micro`, such a gradient
    looks like the first one: clear it before.

    Call it on the model as it is trained: after `fully_shard`, on the `DistributedDataParallel`
    module, after `.to(device)`. On FSDP2 each micro-batch is reduced, and its shard is added. Under
    DDP all micro-batches but the last run under `no_sync`, and the sum is reduced once.

    Args:
        model: the model. Each of its parameters that requires a gradient gets one buffer;
            shared parameters get one.
        dtype: of the buffers: "bf16" (by default) or "float32". `p.grad` has this dtype even if the
            parameter has another (`p.grad_dtype`). Under DDP, whose buckets have the parameter's
            dtype, the sum is converted to that.
        rounding: of bf16 buffers. "stochastic" (default) is unbiased. "kahan" is close to float32
            and takes twice the memory until the last micro-batch. "nearest" is what torch does; it
            is biased, since it loses small gradients. "exact" has the same bits on any number of
            ranks: it adds without rounding, over micro-batches and ranks, and rounds each mean once
            to the parameter's dtype, or to `dtype`. See `ExactAccumulator`.
        average: the number of micro-batches; each gradient is divided by it in float32 as it is
            added. None (default) sums the gradients. With rounding="exact" it counts the
            micro-batches of all ranks, at most 4,095.
        seed: of the random bits; 0 by default. They depend on the seed, the parameter's name, the
            element's position in the whole parameter and the number of earlier additions, so they
            are the same for any sharding. Under DDP, where every rank adds its own gradients, they
            also depend on the rank.
        hooks: True (default) installs hooks. False does nothing in the backward pass: call
            `accumulator.add()` after each one. FSDP1 requires False.
        group: with rounding="exact" and without a wrapper, the process group whose ranks hold the
            same parameters, such as the replicas of a pipeline's stage or of a tensor-parallel
            model. They begin with the same weights. None (default): there are no replicas.
        ranks_per_node: with rounding="exact", adds up inside each node of so many ranks first, and
            sends the sums between nodes: for clusters of more than some 1,000 GPUs
            (docs/bits/exact.md). None (default) sends every addend to its rank at once. The result
            is the same.

    Raises:
        TypeError: `model` is not a module, such as `model.parameters()`.
        ValueError: FSDP1 or composable DDP (`replicate`) with hooks; a parameter that already has
            an accumulator, is stepped in the backward pass, is not float32, bfloat16 or float16,
            or is one of DDP's `delay_all_reduce_named_params`; or an argument out of range.
        RuntimeError: in the first forward or backward pass, if `fully_shard` or DDP wrapped the
            model after this call, or a parameter is trained that was frozen or not there; or if a
            DDP backward pass runs outside `micro`, or the last one under `no_sync()`.
    """
    check_model("accumulate", model)
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype should be 'bf16' or 'float32' but is: {dtype!r}")
    if rounding not in (*_FORMATS, "exact"):
        names = ", ".join(map(repr, (*_FORMATS, "exact")))
        raise ValueError(f"rounding should be one of {names} but is: {rounding!r}")
    if average is not None and not (isinstance(average, Integral) and average >= 1):
        raise ValueError(f"average should be the number of micro-batches but is: {average!r}")
    if rounding == "exact":
        if not hooks:
            raise ValueError('rounding="exact" replaces the reduction, for which it needs hooks')
        if ranks_per_node is not None and not ranks_per_node >= 1:
            raise ValueError(f"ranks_per_node should be at least 1 but is: {ranks_per_node!r}")
        exact = None if dtype is None else _DTYPES[dtype]
        return ExactAccumulator(model, exact, average, seed, group, ranks_per_node)
    if group is not None or ranks_per_node is not None:
        raise ValueError('group and ranks_per_node belong to rounding="exact"')
    kind = torch.bfloat16 if dtype is None else _DTYPES[dtype]
    form = _FORMATS[rounding] if kind == torch.bfloat16 else "float32"
    return Accumulator(model, kind, form, 1.0 if average is None else 1.0 / average, seed, hooks)
