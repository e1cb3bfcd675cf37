"""Float32 weights out of 16-bit parameters that keep something beside them, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import ops, shard
from lowbit.layout import Layout, clean_name
from lowbit.optim import LowbitOptimizer


def get_fp32_model_state_dict(model: nn.Module, opt: LowbitOptimizer) -> dict[str, Tensor]:
    """The model's state dict with float32 weights, as exact as the parameter formats hold them.

    A parameter whose format keeps something beside it (Kahan, split) gives its full value, under each of its names where it is tied; other floating
    tensors are widened; the rest is as it is. Sharded parameters stay DTensors of the same placement.

    Args:
        model: as trained; what DDP and torch.compile put into names is left out.
        opt: the optimizer of its parameters.
    """
    layouts = dict(_laid_out(opt))
    by_tensor = {id(p): p for p in layouts}
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        p = by_tensor.get(id(value))
        if p is not None and layouts[p].extra is not None:
            out[clean_name(name)] = _joined(p, layouts[p], opt)
        elif value.is_floating_point():
            out[clean_name(name)] = value.detach().to(torch.float32)
        else:
            out[clean_name(name)] = value.detach()
    return out


@torch.no_grad()
def set_fp32_model_state_dict(
    model: nn.Module, opt: LowbitOptimizer, state_dict: Mapping[str, Tensor]
) -> None:
    """The inverse of `get_fp32_model_state_dict`: stores float32 weights in the model's parameters and in what their formats keep beside them.

    Works on an optimizer that has never stepped. Tensors that are not in `state_dict` stay; step and moments are not touched.

    Raises:
        ValueError: a name that the model does not have, or another shape.
    """
    layouts = dict(_laid_out(opt))
    by_tensor = {id(p): p for p in layouts}
    own = {clean_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    if unknown := sorted(set(state_dict) - set(own)):
        raise ValueError(f"the model has no {unknown[0]!r} ({len(unknown)} unknown names)")
    for name, given in state_dict.items():
        value = own[name]
        if tuple(given.shape) != tuple(value.shape):
            raise ValueError(f"{name!r} is {tuple(given.shape)}, the model's {tuple(value.shape)}")
    for name, given in state_dict.items():
        value, p = own[name], by_tensor.get(id(own[name]))
        if p is not None and layouts[p].extra is not None:
            store_precise(p, layouts[p], opt, _like(p, given))
        else:
            shard.local(value).copy_(_like(value, given))


@torch.no_grad()
def store_precise(p: Tensor, lay: Layout, opt: LowbitOptimizer, values: Tensor) -> None:
    """Stores local float32 `values` as parameter p and what its format keeps beside it."""
    assert lay.extra is not None
    local = shard.local(p)
    flat = values.to(torch.float32).cpu().contiguous()
    stored, extra = ops.split(flat, lay.param_format, stream=lay.stream)
    local.copy_(stored.reshape(local.shape))
    shard.local(opt.state[p][lay.extra.key]).copy_(extra.reshape(lay.extra.local))


@torch.no_grad()
def to_master_free(
    model: nn.Module,
    make: Any,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> LowbitOptimizer:
    """Turns a float32 model (its weights, or master weights that were loaded into it) into a 16-bit one in place, and makes its optimizer; no bit
    that the parameter format can hold is lost.

    Args:
        make: called with the model's named parameters once they are 16-bit: `lambda params: lowbit.AdamW(params, param_format="bfloat16_split16")`.
        dtype: of the parameters from then on; buffers stay.

    Returns:
        The optimizer, whose state holds what the formats keep beside the parameters.
    """
    values = {}
    for name, p in model.named_parameters():
        values[name] = shard.local(p).detach().to(torch.float32).clone()
        p.data = p.data.to(dtype)
    opt: LowbitOptimizer = make(model.named_parameters())
    layouts = dict(_laid_out(opt))
    for name, p in model.named_parameters():
        if p in layouts and layouts[p].extra is not None and opt.state.get(p):
            store_precise(p, layouts[p], opt, values[name])
    return opt


def _laid_out(opt: LowbitOptimizer) -> Iterator[tuple[Tensor, Layout]]:
    for _, p, lay in opt._laid_out():
        yield p, lay


def _joined(p: Tensor, lay: Layout, opt: LowbitOptimizer) -> Tensor:
    assert lay.extra is not None
    local = shard.local(p.detach())
    extra = shard.local(opt.state[p][lay.extra.key])
    values = ops.join(local.cpu().contiguous(), extra.cpu().contiguous(), lay.param_format)
    return shard.like(p, values.to(local.device), tuple(p.shape))


def _like(value: Tensor, given: Tensor) -> Tensor:
    """The part of `given` that `value` holds here."""
    part = shard.part(value, "a tensor of the model")
    dims = range(len(part.shape))
    return shard.take(
        given, value, part.shape, part.local, part.offset, list(dims), "the given tensor"
    )
