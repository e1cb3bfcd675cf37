"""Float32 weights out of 16-bit parameters that keep something beside them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lowbit import ops, shard
from lowbit.layout import Layout
from lowbit.optim import LowbitOptimizer


@torch.no_grad()
def get_fp32_model_state_dict(model: nn.Module, opt: LowbitOptimizer) -> dict[str, Any]:
    """The model's state dict with float32 weights, as exact as the parameter formats hold them.

    A parameter whose format keeps something beside it (Kahan, split) gives its full value, under each of its names where it is tied; other floating
    tensors are widened; the rest is as it is. Sharded parameters stay DTensors of the same placement. All tensors are copies.

    Args:
        model: as trained; what DDP and torch.compile put into names is left out.
        opt: the optimizer of its parameters.
    """
    kept = _kept(opt)
    copies: dict[int, Any] = {}
    entries = _entries(model)
    for value in entries.values():
        if id(value) in copies:
            continue
        if id(value) in kept:
            copies[id(value)] = _joined(*kept[id(value)], opt)
        elif isinstance(value, Tensor):
            dtype = torch.float32 if value.is_floating_point() else value.dtype
            copies[id(value)] = value.detach().to(dtype, copy=True)
        else:  # what a module's get_extra_state gives
            copies[id(value)] = value
    return {name: copies[id(value)] for name, value in entries.items()}


@torch.no_grad()
def set_fp32_model_state_dict(
    model: nn.Module, opt: LowbitOptimizer, state_dict: Mapping[str, Any]
) -> None:
    """The inverse of `get_fp32_model_state_dict`: stores float32 weights in the model's parameters and in what their formats keep beside them.

    Works on an optimizer that has never stepped. Tensors that are not in `state_dict` stay; step and moments are not touched.

    Raises:
        ValueError: a name that the model does not have, another shape, or another dtype than float32 (than the model's, of integers). Nothing is
            changed then.
    """
    opt.init_state()
    kept = _kept(opt)
    own = _entries(model)
    if unknown := sorted(set(state_dict) - set(own)):
        raise ValueError(f"the model has no {unknown[0]!r} ({len(unknown)} unknown names)")
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    for name in tensors.keys() & state_dict.keys():
        given, value = state_dict[name], tensors[name]
        if tuple(given.shape) != tuple(value.shape):
            raise ValueError(f"{name!r} is {tuple(given.shape)}, the model's {tuple(value.shape)}")
        if value.is_floating_point() and given.dtype != torch.float32:
            raise ValueError(
                f"{name!r} is {given.dtype}, not float32: its low bits are gone already, and storing it would clear those kept here; "
                "use .float() if that is meant"
            )
        if not value.is_floating_point() and given.dtype != value.dtype:
            raise ValueError(f"{name!r} is {given.dtype}, the model's {value.dtype}")
    for name, given in state_dict.items():
        value = own[name]
        if id(value) in kept:
            store_precise(*kept[id(value)], opt, _like(value, given))
        elif name in tensors:
            shard.local(value.detach()).copy_(_like(value, given))
    rest = {name: given for name, given in state_dict.items() if name not in tensors}
    if rest:
        _unwrapped(model).load_state_dict(rest, strict=False)


@torch.no_grad()
def store_precise(p: Tensor, lay: Layout, opt: LowbitOptimizer, values: Tensor) -> None:
    """Stores local float32 `values` as parameter p and what its format keeps beside it."""
    assert lay.extra is not None
    local = shard.local(p)
    flat = values.to(torch.float32).cpu().contiguous()
    # to the nearest: random bits would have to know where in the whole parameter this part lies
    stored, extra = ops.split(flat, lay.param_format.removesuffix("_stochastic"))
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
    that the parameter format can hold is lost. Parameters that need no gradient have no format and are rounded. Gradients are dropped.

    Batch and instance norms stay float32, as their running statistics do: torch takes no norm whose weights and statistics differ in dtype.

    Args:
        make: called with the model's named parameters once they are 16-bit: `lambda params: lowbit.AdamW(params, param_format="bfloat16_split16")`.
            Where there are norms that stay float32 it gets two groups of them instead, the second with param_format="auto".
        dtype: of the parameters from then on; buffers stay.

    Returns:
        The optimizer, whose state holds what the formats keep beside the parameters.
    """
    norms = {id(p) for m in model.modules() if isinstance(m, _NormBase) for p in m.parameters()}
    values = {}
    for p in model.parameters():
        if p.is_floating_point() and id(p) not in norms:
            values[id(p)] = shard.local(p).detach().to(torch.float32)
            p.grad = None
    # As model.to(dtype) does it: fully_shard's modules follow.
    model._apply(lambda t: t.to(dtype) if id(t) in values and t.dtype != dtype else t)
    named = list(model.named_parameters())
    wide = [(name, p) for name, p in named if id(p) in norms]
    rest = [(name, p) for name, p in named if id(p) not in norms]
    groups = [{"params": rest}, {"params": wide, "param_format": "auto"}]
    opt: LowbitOptimizer = make(groups if wide and rest else named)
    for kept, lay in _kept(opt).values():
        if id(kept) in values:
            store_precise(kept, lay, opt, values[id(kept)])
    return opt


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and torch.compile. A submodule that is merely called `module` stays."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            model = model.module  # type: ignore[assignment]
        else:
            return model


def _entries(model: nn.Module) -> dict[str, Any]:
    """The live parameters and buffers by name, tied ones under each, and whatever else the state dict has."""
    entries = _unwrapped(model).state_dict(keep_vars=True)
    return {name.replace("_orig_mod.", ""): value for name, value in entries.items()}


def _kept(opt: LowbitOptimizer) -> dict[int, tuple[Tensor, Layout]]:
    """The parameters that something is kept beside, by id: not those that need no gradient, which have no state."""
    made = {}
    for _, p, lay in opt._laid_out():
        if lay.extra is None or not opt._state_of(p):
            continue
        if isinstance(p, shard.Piece):
            raise ValueError(
                f"{p.name!r} is a flat shard of FSDP1, whose model has no entry of its own: save with lowbit.fsdp1.get_state_dict and load it under "
                "fully_shard or in a single process for float32 weights"
            )
        made[id(p)] = (p, lay)
    return made


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
