"""Float32 weights from 16-bit parameters and their compensation, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lowbit import ops, sharding
from lowbit.config.overrides import clean_name
from lowbit.optim.optimizer import LowbitOptimizer
from lowbit.state.layout import Layout

_COMPILED = "_orig_mod"  # where torch.compile keeps the module that it wraps


@torch.no_grad()
def get_fp32_model_state_dict(model: nn.Module, opt: LowbitOptimizer) -> dict[str, Any]:
    """The model's state dict with float32 weights, as exact as the parameter formats hold them.

    A parameter whose format has compensation (Kahan, split) gives its full value, under each of its
    names where it is tied. Other floating tensors are widened to float32; float64 and everything
    else stays as it is. Sharded parameters stay DTensors of the same placement; those of FSDP1 are
    DTensors sharded on dimension 0, which takes a collective. All tensors are copies.

    Args:
        model: as trained; what DDP, FSDP1 and torch.compile put into names is left out.
        opt: the optimizer of its parameters.
    """
    kept = _kept(opt)
    copies: dict[int, Any] = {}
    entries = _entries(model, opt)
    for value in entries.values():
        if id(value) in copies:
            continue
        if isinstance(value, sharding.FlatShard):
            copies[id(value)] = _gathered(value, kept.get(id(value)), opt)
        elif id(value) in kept:
            copies[id(value)] = _joined(*kept[id(value)], opt)
        elif isinstance(value, Tensor):
            narrow = value.is_floating_point() and value.dtype != torch.float64
            dtype = torch.float32 if narrow else value.dtype
            copies[id(value)] = value.detach().to(dtype, copy=True)
        else:  # what a module's get_extra_state gives
            copies[id(value)] = value
    return {name: copies[id(value)] for name, value in entries.items()}


@torch.no_grad()
def set_fp32_model_state_dict(
    model: nn.Module, opt: LowbitOptimizer, state_dict: Mapping[str, Any]
) -> None:
    """The inverse of `get_fp32_model_state_dict`: stores float32 weights in the model's parameters
    and their compensation.

    Works on an optimizer that has never stepped. A collective under FSDP1. Tensors that are not in
    `state_dict` stay; step and moments are not touched.

    Raises:
        ValueError: a name that the model does not have, another shape, or another dtype than
            float32 (than the model's, of integers; float64 stores both). Nothing is changed then.
    """
    opt.init_state()
    kept = _kept(opt)
    own = _entries(model, opt)
    if unknown := sorted(set(state_dict) - set(own)):
        raise ValueError(f"the model has no {unknown[0]!r} ({len(unknown)} unknown names)")
    kinds = (Tensor, sharding.FlatShard)
    tensors = {name: value for name, value in own.items() if isinstance(value, kinds)}
    for name in tensors.keys() & state_dict.keys():
        given, value = state_dict[name], tensors[name]
        if tuple(given.shape) != tuple(value.shape):
            raise ValueError(f"{name!r} is {tuple(given.shape)}, the model's {tuple(value.shape)}")
        floating = value.dtype.is_floating_point
        both = value.dtype == given.dtype == torch.float64
        if floating and given.dtype != torch.float32 and not both:
            raise ValueError(
                f"{name!r} is {given.dtype}, not float32: its low bits are gone already, and "
                "storing it would clear those kept here; use .float() if that is meant"
            )
        if not floating and given.dtype != value.dtype:
            raise ValueError(f"{name!r} is {given.dtype}, the model's {value.dtype}")
    sharding.reshard_flat(model)  # FSDP1 may hold the gathered weights of before
    for name, given in state_dict.items():
        value = own[name]
        if id(value) in kept:
            store_precise(*kept[id(value)], opt, _like(value, given))
        elif isinstance(value, sharding.FlatShard):
            value.value.copy_(value.part.without_room(_like(value, given)))
        elif name in tensors:
            sharding.local(value.detach()).copy_(_like(value, given))
    rest = {name: given for name, given in state_dict.items() if name not in tensors}
    if rest:
        _unwrapped(model).load_state_dict(rest, strict=False)


@torch.no_grad()
def store_precise(p: Tensor, lay: Layout, opt: LowbitOptimizer, values: Tensor) -> None:
    """Stores local float32 `values`, of a flat shard the rows that it touches,
    as parameter p and its compensation.
    """
    assert lay.compensation is not None
    local = sharding.local(p)
    flat = values.to(torch.float32).cpu().contiguous()
    # to the nearest: random bits would have to know where in the whole parameter this part lies
    stored, extra = ops.split(flat, lay.param_format.removesuffix("_stochastic"))
    local.copy_(lay.part.without_room(stored).reshape(local.shape))
    sharding.local(opt.state_of(p)[lay.compensation.key]).copy_(
        extra.reshape(lay.compensation.local)
    )


@torch.no_grad()
def to_master_free(
    model: nn.Module,
    make: Any,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> LowbitOptimizer:
    """Turns a float32 model (its weights, or master weights that were loaded into it) into a 16-bit
    one in place, and makes its optimizer; no bit that the parameter format can hold is lost.
    Parameters that need no gradient have no format and are rounded. Gradients are dropped.

    Under FSDP1 it is refused: there, wrap a 16-bit model, bind its optimizer, and give the weights
    to `set_fp32_model_state_dict`.

    Batch and instance norms stay float32, as their running statistics do: torch takes no norm whose
    weights and statistics differ in dtype.

    Args:
        make: called with the model's named parameters once they are 16-bit: `lambda params:
            lowbit.AdamW(params, param_format="bfloat16_split16")`. Where there are norms that stay
            float32 it gets two groups of them instead, the second with param_format="auto".
        dtype: of the parameters from then on; buffers stay.

    Returns:
        The optimizer, whose state holds the compensation of the parameters.

    Raises:
        ValueError: FSDP1, or the optimizer has parameters that the model had before.
    """
    if any(sharding.is_flat(p) for p in model.parameters()):
        raise ValueError(
            "to_master_free cannot change the dtype of what FSDP1 (FullyShardedDataParallel) has "
            "flattened: wrap a model that is 16-bit already, lowbit.fsdp1.bind its optimizer, and "
            "give the float32 weights to lowbit.set_fp32_model_state_dict; or use fully_shard"
        )
    # By name: `_apply` makes other parameters where torch.__future__ says so.
    before = dict(model.named_parameters(remove_duplicate=False))
    norms = _in_norms(model)
    values = {}
    for name, p in before.items():
        if p.is_floating_point() and id(p) not in norms:
            values[name] = sharding.local(p).detach().to(torch.float32)
            p.grad = None
    moved = {id(before[name]) for name in values}
    # As model.to(dtype) does it: fully_shard's modules follow.
    model._apply(lambda t: t.to(dtype) if id(t) in moved and t.dtype != dtype else t)
    named, norms = list(model.named_parameters()), _in_norms(model)
    full_precision = [(name, p) for name, p in named if id(p) in norms]
    rest = [(name, p) for name, p in named if id(p) not in norms]
    groups = [{"params": rest}, {"params": full_precision, "param_format": "auto"}]
    opt: LowbitOptimizer = make(groups if full_precision and rest else named)
    names = {id(p): name for name, p in named}
    old = {id(p): name for name, p in before.items() if id(p) not in names}
    for p in (p for group in opt.param_groups for p in group["params"]):
        if id(p) in old:
            raise ValueError(
                f"the optimizer has {old[id(p)]!r} as it was before the conversion, and the model "
                "has another parameter there now, which would never be stepped: build the "
                "optimizer of what `make` is called with"
            )
    for kept, lay in _kept(opt).values():
        name = names.get(id(kept), "")
        if name in values:
            store_precise(kept, lay, opt, values[name])
    return opt


def _in_norms(model: nn.Module) -> set[int]:
    """The ids of the parameters of batch and instance norms."""
    return {id(p) for m in model.modules() if isinstance(m, _NormBase) for p in m.parameters()}


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and torch.compile.
    A submodule that is merely called `module` stays.
    """
    while True:
        if isinstance(getattr(model, _COMPILED, None), nn.Module):
            model = getattr(model, _COMPILED)
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            model = model.module  # type: ignore[assignment]
        else:
            return model


def _entries(model: nn.Module, opt: LowbitOptimizer) -> dict[str, Any]:
    """The live parameters and buffers by name, tied ones under each, and whatever else the state
    dict has; under FSDP1 pieces, the optimizer's own where it has them."""
    flat_shards = list(sharding.flat_shards_of(model, clean_name))
    if not flat_shards:
        entries = _unwrapped(model).state_dict(keep_vars=True)
        return {name.replace(f"{_COMPILED}.", ""): value for name, value in entries.items()}
    mine = {
        (id(p.owner), p.name): p
        for _, p, _, _ in opt.members()
        if isinstance(p, sharding.FlatShard)
    }
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):  # as it lies here
        module._save_to_state_dict(found, path + "." if path else "", keep_vars=True)
    rest = {k: v for k, v in found.items() if not (isinstance(v, Tensor) and sharding.is_flat(v))}
    made = {clean_name(name): value for name, value in rest.items()}
    for flat_shard in flat_shards:
        for name in (flat_shard.name, *flat_shard.also):
            made[name] = mine.get((id(flat_shard.owner), flat_shard.name), flat_shard)
    return made


def _kept(opt: LowbitOptimizer) -> dict[int, tuple[Any, Layout]]:
    """The parameters that have compensation, by id. Those that need no gradient have no state."""
    laid_out = opt.laid_out()
    return {id(p): (p, lay) for _, p, lay in laid_out if lay.compensation and opt.state_of(p)}


def _values(p: Any, lay: Layout, opt: LowbitOptimizer) -> Tensor:
    """The local float32 values; of a flat shard, the rows that it touches."""
    assert lay.compensation is not None
    local = sharding.local(p).detach()
    if isinstance(p, sharding.FlatShard):
        local = p.part.with_room(local)
    extra = sharding.local(opt.state_of(p)[lay.compensation.key])
    values = ops.join(local.cpu().contiguous(), extra.cpu().contiguous(), lay.param_format)
    return values.to(local.device)


def _joined(p: Tensor, lay: Layout, opt: LowbitOptimizer) -> Tensor:
    return sharding.like(p, _values(p, lay, opt), tuple(p.shape))


def _gathered(
    p: sharding.FlatShard, kept: tuple[sharding.FlatShard, Layout] | None, opt: LowbitOptimizer
) -> Tensor:
    """A flat shard's float32 values, from all ranks with a part of the parameter. A collective."""
    rows = _values(*kept, opt) if kept else p.part.with_room(p.value.to(torch.float32))
    if p.flat.ranks == 1:
        return rows
    spread = sharding.Spread(tuple(p.shape), p.part.local, 4 * p.cols, 32)
    return sharding.to_chunks(p, [spread], [rows])[0]


def _like(value: Any, given: Tensor) -> Tensor:
    """The part of `given` that `value` holds here."""
    part = sharding.part(value, "a tensor of the model")
    dims = range(len(part.shape))
    return sharding.take(
        given, value, part.shape, part.local, part.offset, list(dims), "the given tensor"
    )
