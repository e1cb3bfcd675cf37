"""Float32 weights in and out of a model whose 16-bit parameters keep their low bits in the optimizer.

A parameter in a Kahan or split format is only the upper part of the weight that is trained; `model.state_dict()` has that part alone. What is
here reads, writes and creates the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lowbit import ops, shard
from lowbit.optim import LowbitOptimizer

PREFIX = "param_"  # of the state key; what follows is the kind, as in bfloat16_split8
KINDS = ("kahan", "split8", "split16")


@torch.no_grad()
def get_fp32_model_state_dict(model: nn.Module, opt: LowbitOptimizer | None) -> dict[str, Any]:
    """The model's state dict in float32, with the exact value of every parameter whose format keeps an extra.

    Args:
        model: seen through DDP and torch.compile: names are those of the model itself.
        opt: the optimizer that trains it; None where no parameter keeps an extra.

    Returns:
        What `model.state_dict()` has, as copies: floating parameters and buffers as float32 (DTensors stay DTensors), all else
        unchanged. Every name of a tied parameter has the precise value.
    """
    entries = _unwrapped(model).state_dict(keep_vars=True)
    copies: dict[int, Tensor] = {}
    for value in entries.values():
        if isinstance(value, Tensor) and id(value) not in copies:
            copies[id(value)] = _weight(value, opt)
    return {
        name: copies[id(value)] if isinstance(value, Tensor) else value
        for name, value in entries.items()
    }


@torch.no_grad()
def set_fp32_model_state_dict(
    model: nn.Module,
    opt: LowbitOptimizer | None,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
) -> None:
    """Takes what `get_fp32_model_state_dict` gave, or any float32 state dict of the model, in place.

    Where a parameter's format keeps an extra the low bits go there, also before the first step; elsewhere the value is rounded to nearest.
    Moments and step counts are left as they are.

    Args:
        state_dict: by name, whole tensors or DTensors of any placement, or this rank's parts.
        strict: names that are missing or unknown are an error; otherwise they are passed over.

    Raises:
        ValueError: names, shapes or dtypes do not fit; nothing has been changed then.
    """
    model = _unwrapped(model)
    if opt is not None:
        opt.init_state()
    entries = model.state_dict(keep_vars=True)
    missing, unknown = (
        sorted(set(entries) - set(state_dict)),
        sorted(set(state_dict) - set(entries)),
    )
    if strict and (missing or unknown):
        raise ValueError(
            f"the state dict does not fit the model: missing {missing}, unknown {unknown}; strict=False passes them over"
        )
    common = [name for name in entries if name in state_dict]
    tensors = [name for name in common if isinstance(entries[name], Tensor)]
    for name in tensors:
        _check(name, state_dict[name], entries[name])
    parts = {name: _part_of(state_dict[name], entries[name], name) for name in tensors}
    for name in tensors:
        _set_weight(entries[name], opt, parts[name])
    rest = {name: state_dict[name] for name in common if name not in parts}
    if rest:  # what a module's get_extra_state gave
        model.load_state_dict(rest, strict=False)


@torch.no_grad()
def to_master_free(
    model: nn.Module,
    opt: LowbitOptimizer | None = None,
    dtype: torch.dtype = torch.bfloat16,
    param_format: str | None = None,
    *,
    master: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Makes the parameters of a float32 model 16-bit, in place, with the low bits in the optimizer instead of a master copy.

    Batch and instance norms stay float32, as do all buffers. Gradients are dropped. Moments and step counts stay. Without an optimizer yet:

        weights = to_master_free(model)
        opt = lowbit.AdamW(model.named_parameters(), param_format="bfloat16_split16")
        set_fp32_model_state_dict(model, opt, weights, strict=False)

    Args:
        opt: the optimizer of these parameters; its groups get `param_format`.
        dtype: bfloat16 or float16.
        param_format: a format of that dtype which keeps an extra; None is split16, the nearest to float32.
        master: float32 values by parameter name, for a model that is in 16 bits already and has its master weights elsewhere.

    Returns:
        The float32 values of those parameters whose low bits found no place: all without `opt`, else the ones it does not train.

    Raises:
        ValueError: the format does not fit, or a group has both parameters that become 16-bit and others; nothing has been changed then.
    """
    model = _unwrapped(model)
    word = str(dtype).removeprefix("torch.")
    kind = (param_format or f"{word}_split16").removeprefix(word + "_")
    format = f"{word}_{kind}"
    if kind not in KINDS:
        raise ValueError(
            f"param_format={param_format!r} keeps no low bits beside a {word} parameter; take one of "
            + ", ".join(f"{word}_{kind}" for kind in KINDS)
        )
    ops.param_format(format)  # raises where there is none
    norms = {id(p) for m in model.modules() if isinstance(m, _NormBase) for p in m.parameters()}
    names: dict[Tensor, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.is_floating_point() and id(p) not in norms:
            names.setdefault(p, []).append(name)
    if opt is not None:
        opt.init_state()
        _check_groups(opt, names)
    given: dict[Tensor, Tensor] = {}
    for p, own in names.items():
        if p.is_meta:
            raise ValueError(f"{own[0]} is on the meta device; materialise the model first")
        for name in own:
            if master is not None and name in master:
                _check(name, master[name], p)
                given[p] = _part_of(master[name], p, name)
        if p not in given and p.dtype != torch.float32 and not _kept(p, opt):
            raise ValueError(
                f"{own[0]} is {p.dtype}, so its low bits are not in the model; give its float32 value in master="
            )
    by_id = {id(p): p for p in names}
    left: dict[str, Tensor] = {}

    def convert(t: Tensor) -> Tensor:
        p = by_id.pop(id(t), None)  # a tied parameter comes again, converted
        if p is None:
            return t
        local = given.pop(p, None)
        if local is None:
            local = shard.local(_weight(p, opt)) if _kept(p, opt) else shard.local(p.detach())
        local = local.to(shard.local(p).device).contiguous()
        stored, extra = ops.split(local, format, seed=0, stream=0)  # the KINDS draw no random bits
        p.grad = None
        state = opt.state.get(p) if opt is not None else None
        if state:
            for other in [key for key in state if key.startswith(PREFIX)]:
                del state[other]
            state[PREFIX + kind] = shard.like(p, extra, p.shape)
        else:
            whole = shard.like(p, local, p.shape)
            left.update(dict.fromkeys(names[p], whole))
        return shard.like(p, stored, p.shape)

    model._apply(convert)  # as model.to(dtype) does it: FSDP2 and tied parameters follow
    if opt is not None:
        for group in opt.param_groups:
            if any(p in names for p in group["params"]):
                group["param_format"] = format
        opt._layouts.clear()
        opt._plans.clear()
    return left


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and torch.compile."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            model = model.module  # type: ignore[assignment]
        else:
            return model


def _kept(p: Tensor, opt: LowbitOptimizer | None) -> tuple[Tensor, str] | None:
    """What the optimizer keeps beside p, and p's format; None where it keeps nothing."""
    for key, value in (opt.state.get(p) or {}).items() if opt is not None else ():
        if key.startswith(PREFIX) and key.removeprefix(PREFIX) in KINDS:
            return value, f"{str(p.dtype).removeprefix('torch.')}_{key.removeprefix(PREFIX)}"
    return None


def _weight(value: Tensor, opt: LowbitOptimizer | None) -> Tensor:
    """A float32 copy of a floating parameter or buffer, precise where it can be; a copy of anything else."""
    kept = _kept(value, opt)
    if kept is not None:
        extra, format = kept
        local = ops.join(
            shard.local(value.detach()).contiguous(), shard.local(extra).contiguous(), format
        )
        return shard.like(value, local, value.shape)
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return value.detach().to(dtype, copy=True)


def _set_weight(value: Tensor, opt: LowbitOptimizer | None, new: Tensor) -> None:
    """Writes `new`, the local part, to a parameter or buffer and to the extra where there is one."""
    here = shard.local(value.detach())
    kept = _kept(value, opt)
    if kept is None:
        here.copy_(new)
        return
    extra, format = kept
    stored, low = ops.split(new.to(here.device).contiguous(), format, seed=0, stream=0)
    here.copy_(stored)
    shard.local(extra).copy_(low)


def _check(name: str, new: Any, value: Tensor) -> None:
    """ValueError unless `new` can be the float32 value of `value`: copy_ would broadcast and cast."""
    if not isinstance(new, Tensor):
        raise ValueError(f"{name} is {type(new).__name__}, not a tensor")
    if tuple(new.shape) not in (tuple(value.shape), tuple(shard.local(value).shape)):
        raise ValueError(
            f"{name} has the shape {tuple(new.shape)}, the model's is {tuple(value.shape)}"
        )
    if value.is_floating_point() and new.dtype != torch.float32:
        raise ValueError(
            f"{name} is {new.dtype}, not float32: what it had below {new.dtype} is lost already. Load it with "
            "model.load_state_dict, or convert it first if that is meant"
        )
    if not value.is_floating_point() and new.dtype != value.dtype:
        raise ValueError(f"{name} is {new.dtype}, the model's is {value.dtype}")


def _part_of(new: Tensor, value: Tensor, name: str) -> Tensor:
    """This rank's part of `new`."""
    if not shard.is_sharded(value) and not shard.is_sharded(new):
        return new.detach()
    return shard.take(new.detach(), value, shard.part(value, name), name)


def _check_groups(opt: LowbitOptimizer, converted: Mapping[Tensor, list[str]]) -> None:
    """ValueError where a group, which has one parameter format, would be left with parameters of two dtypes."""
    for number, group in enumerate(opt.param_groups):
        others = [i for i, p in enumerate(group["params"]) if p not in converted]
        if others and len(others) < len(group["params"]):
            known = group.get("param_names") or [
                f"parameter {i}" for i in range(len(group["params"]))
            ]
            raise ValueError(
                f"group {number} has parameters that become 16-bit and others that stay as they are "
                f"({', '.join(known[i] for i in others)}: batch or instance norms, or not the model's); give them a group of their own"
            )
