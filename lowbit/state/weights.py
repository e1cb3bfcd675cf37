"""Float32 weights of a stored parameter and its compensation, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.state.layout import Layout
from lowbit.state.quantize import dequantize_slot
from lowbit.state.slot import Slot

_AT_ONCE = 1 << 20  # values to process at a time


def float32_weights(value: Tensor, lay: Layout, state: Mapping[str, Tensor]) -> Tensor:
    """The float32 weights of a stored parameter and its compensation, a copy."""
    if not lay.compensation:
        return value.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    extra = sharding.local(state[lay.compensation.key]).cpu().contiguous()
    if value.shape == lay.param_part.local:
        return ops.join(value.cpu().contiguous(), extra, lay.param_format).to(value.device)
    rows = lay.part.with_room(value).cpu()  # of a flat shard
    values = ops.join(rows, extra, lay.param_format)
    return lay.part.without_room(values).clone().to(value.device)


def store_weights(value: Tensor, lay: Layout, state: Mapping[str, Tensor], weights: Tensor) -> None:
    """Stores float32 weights in a parameter and its compensation, rounded to the nearest."""
    if not lay.compensation:
        value.copy_(weights.reshape(value.shape))
        return
    part = lay.param_part
    flat = value.shape != part.local
    rows = part.with_room(weights) if flat else weights.reshape(part.local)
    stored, extra = ops.split(rows.cpu().contiguous(), lay.param_format.removesuffix("_stochastic"))
    value.copy_(part.without_room(stored).reshape(value.shape))
    kept = sharding.local(state[lay.compensation.key])
    extra = extra.reshape(kept.shape).to(kept.device)
    if flat:  # what other ranks have of these rows is kept as it is
        size = extra.numel() // max(1, rows.numel())
        begin, end = part.front * size, extra.numel() - part.back * size
        kept.reshape(-1)[begin:end] = extra.reshape(-1)[begin:end]
    else:
        kept.copy_(extra)


def mix(p: Tensor, lay: Layout, state: Mapping[str, Tensor], slot: Slot, share: float) -> None:
    """Sets a parameter's weights to (1 - share) weights + share * state, in double,
    rounded once to float32.

    The weights are then rounded to the nearest, whatever the parameter's format: with `share` and
    with 1 - 1 / (1 - share) in turn they come back, and do not wander off.

    Args:
        p: the parameter, or a flat shard.
        slot: the state of the parameter's size.
        share: of the state; negative moves away from it.
    """
    value = sharding.local(p).detach()
    if lay.home:
        tensors = [sharding.local(state[entry.key]) for entry in lay.of_slots[slot.name]]
        other = sharding.returned(lay.home, dequantize_slot(tensors, lay.at_home, slot))
        _mix_rows(value, lay, state, other, share)
        return
    whole = slot.cross_tile or value.shape != lay.part.local or lay.part.cut != sharding.CUT_NONE
    cols = max(1, lay.part.cols)
    at_once = lay.part.rows if whole or value.ndim == 0 else max(1, _AT_ONCE // cols)
    follow = {entry.key for entry in lay.entries() if entry.dims[:1] == (0,)}
    for begin in range(0, lay.part.rows, max(1, at_once)):
        if begin == 0 and at_once >= lay.part.rows:
            here, some, kept = value, lay, {k: sharding.local(t) for k, t in state.items()}
        else:
            end = min(begin + at_once, lay.part.rows)
            here, some = value[begin:end], lay.at_rows(begin, end)
            kept = {k: sharding.local(t)[begin:end] for k, t in state.items() if k in follow}
        tensors = [kept[entry.key] for entry in slot.entries(some.part)]
        other = some.part.without_room(dequantize_slot(tensors, some, slot))
        _mix(here, some, kept, other, share)


def _mix_rows(
    value: Tensor, lay: Layout, state: Mapping[str, Tensor], other: Tensor, share: float
) -> None:
    """`_mix` of some rows after the other,
    which in double take four times the memory of the weights.
    """
    part = lay.param_part
    at_once = max(1, _AT_ONCE // max(1, part.cols))
    key = lay.compensation.key if lay.compensation else None
    extra = {} if key is None else {key: sharding.local(state[key])}
    for begin in range(0, part.rows, at_once):
        end = min(begin + at_once, part.rows)
        some = replace(lay, home=None, part=part.take_rows(begin, end))
        kept = {key: tensor[begin:end] for key, tensor in extra.items()}
        _mix(value[begin:end], some, kept, other[begin:end], share)


def _mix(
    value: Tensor, lay: Layout, state: Mapping[str, Tensor], other: Tensor, share: float
) -> None:
    own = float32_weights(value, lay, state).reshape(-1)
    made = own.double() * (1.0 - share) + other.reshape(-1).double() * share
    store_weights(value, lay, state, made.to(torch.float32))
