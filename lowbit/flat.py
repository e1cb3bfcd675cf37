"""Flat slices: an optimizer over vectors that hold parts of parameters,
bound to the parameters themselves.

`lowbit.fsdp1.bind` and `lowbit.integrations.deepspeed.bind` call `bind` for what those wrappers
flatten.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.config.overrides import clean_name
from lowbit.optim.optimizer import LowbitOptimizer
from lowbit.sharding import FlatSlice
from lowbit.state.layout import Layout
from lowbit.state.load import is_by_param, load_by_param
from lowbit.state.quantize import dequantize_slot, quantize_decoded
from lowbit.state.settings import settings_by_name
from lowbit.state.slot import Slot, StateTensor
from lowbit.state.torch_functions import refuse_torch_functions

__all__ = ["FlatSlice", "bind", "get_state_dict", "set_state_dict"]

# Optimizer -> the hooks of its float32 view, or the one that refuses torch's functions.
_views: weakref.WeakKeyDictionary[LowbitOptimizer, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def bind(
    opt: LowbitOptimizer,
    slices: Iterable[FlatSlice],
    *,
    export: str | None = None,
    by_parts: bool = False,
) -> None:
    """Binds an optimizer over vectors to the parameters whose elements the vectors hold.

    State then follows the parameters' shapes and names, and state and weights are the bits of a
    single process. Call it on every rank, with the same parameters in the same order, before the
    first step or load:

        opt = lowbit.AdamW([vector])  # elements [4096 * rank, 4096 * (rank + 1)) of a weight
        lowbit.flat.bind(opt, [lowbit.flat.FlatSlice(vector, "weight", (64, 128), 4096 * rank, 4096,
        start=0)])

    It is a collective of each slice's group, unless each rank holds its parameters by itself. A
    rank without slices, which is an error, tells it to all ranks of the default group. Elements of
    a vector that lie in no slice are padding, which no step changes. A tensor of the optimizer
    without slices stays an ordinary parameter. A slice with `start` keeps its state in a dict of
    states by name. A bound optimizer cannot be copied or pickled, which is a TypeError.

    Args:
        opt: the optimizer of the vectors.
        slices: the parameters, in any order of the vectors; replaces those of an earlier call.
        export: "fp32" makes `opt.state_dict()` return float32 moments in the shape of the vectors,
            and of ordinary parameters beside them, and `load_state_dict` take them. None (default)
            keeps the quantized state dict.
        by_parts: True if something steps one group or one tensor after another, by leaving the
            others out of `opt.param_groups`, as DeepSpeed's ZeRO does. False (default) takes a
            missing one for removed.

    Raises:
        ValueError: a slice does not fit its tensor or parameter; slices overlap; ranks differ in
            their parameters or leave out elements; the optimizer lacks a tensor; or `export`
            cannot express the state.
        TypeError: the optimizer is not one of lowbit's, or is inside a wrapper.
        RuntimeError: the optimizer was stepped before,
            with the tensors unbound or bound to other elements.
    """
    if export not in (None, "fp32"):
        raise ValueError(f"export must be 'fp32' or None, not {export!r}")
    check_own(opt)
    slices = list(slices)
    flat_shards: dict[Tensor, list[sharding.FlatShard]] = {}
    for flat_shard in sharding.flat_shards(slices, _foreign(opt, slices)):
        flat_shards.setdefault(flat_shard.owner, []).append(flat_shard)
    for p, several in flat_shards.items():
        sharding.flats[p] = several[0].flat
    opt.bind_flat_shards(flat_shards, by_parts)
    if export:
        _check_exportable(opt)
    for handle in _views.pop(opt, ()):  # of an earlier call
        handle.remove()
    if export:
        _views[opt] = (
            opt.register_state_dict_post_hook(_exported),
            opt.register_load_state_dict_pre_hook(_imported),
        )
    elif any(several[0].flat.ranks > 1 for several in flat_shards.values()):
        _views[opt] = (opt.register_state_dict_pre_hook(refuse_torch_functions),)


def _foreign(opt: LowbitOptimizer, slices: list[FlatSlice]) -> str | None:
    """The error if there are no slices, or the optimizer lacks a slice's tensor."""
    if not slices:
        return (
            "a rank has no flat slices: pass every parameter on every rank, with length=0 where a "
            "rank has none of it"
        )
    known = {id(p) for group in opt.param_groups for p in group["params"]}
    missing = [each.name for each in slices if id(each.tensor) not in known]
    return (
        (
            f"the tensor of flat slice {missing[0]!r} is not in the optimizer ({len(missing)} "
            f"of {len(slices)} slices): build the optimizer from the tensors that hold the slices"
        )
        if missing
        else None
    )


# Checkpoints


def get_state_dict(opt: LowbitOptimizer, *, param_names: bool | None = None) -> dict[str, Any]:
    """The optimizer's state by original parameter name, as DTensors sharded on dimension 0,
    like FSDP2's. A collective.

    `torch.distributed.checkpoint.save` writes it to files that load under any wrapper. Stages of a
    pipeline need optimizers with names: the state of all others has the same keys, and only one
    rank's is saved.

    Args:
        opt: the optimizer.
        param_names: whether groups have that key, which `torch.distributed.checkpoint.load` wants
            in the file if it is here. None (default) has it where the optimizer was built with
            names. Save with True what slices without it save for optimizers with names; load with
            False, into those, a file without it.

    Returns:
        {"state": {name: {key: tensor}}, "param_groups": [...]}; the groups list names. State of
        flat shards is a copy. All other state (of plain and DTensor parameters, and of parameters
        that one rank has whole) is the optimizer's own, which the next step changes.

    Raises:
        TypeError: `opt` is not an optimizer of lowbit.
        ValueError: `param_names` is True and a parameter has no name.
    """
    check_own(opt)
    opt.check_saving()
    with opt.whole_groups():
        unnamed = [i for _, p, name, i in opt.members() if not _has_name(p, name)]
        if param_names and unnamed:
            raise ValueError(
                f"param_names=True: parameter {unnamed[0]} of the optimizer has no name; build it "
                "from model.named_parameters()"
            )
        return _state_dict(opt, param_names)


def check_own(opt: LowbitOptimizer) -> None:
    """An error where the optimizer is another library's, or a wrapper."""
    if not isinstance(opt, LowbitOptimizer):
        raise TypeError(
            f"this takes one of lowbit's optimizers, not {type(opt).__name__}: pass the one that "
            "it wraps. Of torch's ZeroRedundancyOptimizer, save the state_dict() after "
            "consolidate_state_dict()"
        )


def _state_dict(opt: LowbitOptimizer, param_names: bool | None) -> dict[str, Any]:
    state: dict[str, Any] = {}
    names = _names(opt)
    layouts = {p: lay for _, p, lay in opt.laid_out()}
    for _, p, name, index in opt.members():
        own = _name(p, name, index)
        kept = opt.state_of(p)
        if not kept:
            continue
        if isinstance(p, sharding.FlatShard) and p.flat.ranks > 1:
            entries = layouts[p].entries()
            tensors = sharding.to_chunks(
                p, [_spread(e, layouts[p]) for e in entries], [kept[e.key] for e in entries]
            )
            own_keys = layouts[p].keys
            identity = {key: value.clone() for key, value in kept.items() if key not in own_keys}
            state[own] = {**identity, **dict(zip((e.key for e in entries), tensors, strict=True))}
        else:
            state[own] = dict(kept)
    groups = []
    for group, own_names in zip(opt.param_groups, names, strict=True):
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        if "param_names" in group if param_names is None else param_names:
            settings["param_names"] = own_names
        groups.append({**settings, "params": own_names})
    return {"state": state, "param_groups": groups}


def _name(p: Any, name: str | None, index: int) -> str:
    own = p.name if isinstance(p, sharding.FlatShard) else name
    return str(index) if own is None else clean_name(own)


def _has_name(p: Any, name: str | None) -> bool:
    return isinstance(p, sharding.FlatShard) or name is not None


def _names(opt: LowbitOptimizer) -> list[list[str]]:
    """The names under which a checkpoint has each group's parameters."""
    names: list[list[str]] = [[] for _ in opt.param_groups]
    for number, p, name, index in opt.members():
        names[number].append(_name(p, name, index))
    return names


@torch.no_grad()
def set_state_dict(opt: LowbitOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads a `get_state_dict` that `torch.distributed.checkpoint.load` filled,
    saved under any wrapper. A collective.

    Args:
        opt: the optimizer, bound if its parameters are flat shards.
        state_dict: state by the names of the original parameters, as DTensors or whole tensors.

    Raises:
        TypeError: `opt` is not an optimizer of lowbit.
        ValueError: the number of groups differs, no group has a parameter, the parameters of a
            group had different settings, a parameter has no state, or state has an unknown layout.
    """
    check_own(opt)
    with opt.whole_groups():
        _load_state_dict(opt, state_dict)


def _load_state_dict(opt: LowbitOptimizer, state_dict: Mapping[str, Any]) -> None:
    if len(state_dict["param_groups"]) != len(opt.param_groups):
        raise ValueError(
            f"the state dict has {len(state_dict['param_groups'])} parameter groups and the "
            f"optimizer {len(opt.param_groups)}; build the optimizer "
            "with the groups that were saved"
        )
    members = list(opt.members())
    frozen = {_name(p, name, index) for _, p, name, index in members if not p.requires_grad}
    named = any(_has_name(p, name) for _, p, name, _ in members)
    settings_of = settings_by_name(state_dict["param_groups"], _names(opt), frozen, named)
    known = {clean_name(name): value for name, value in state_dict["state"].items()}
    own = [_name(p, name, index) for _, p, name, index in members]
    for (_, p, _, _), name in zip(members, own, strict=True):
        if p.requires_grad and name not in known:
            raise ValueError(
                f"the state dict has no parameter {name!r}; load a checkpoint of this model"
            )
    load_by_param(opt, map(known.get, own), settings_of)


def _spread(entry: StateTensor, lay: Layout) -> sharding.Spread:
    """How a state tensor lies over the ranks that hold some of a parameter."""
    if not entry.dims or entry.dims[0] != 0:
        return sharding.Spread(entry.shape, entry.local, None, 0)
    row = 1
    for size in entry.local[1:]:
        row *= size
    coded = {slot.key: slot for slot in lay.slots}
    bits = 0  # per element of the parameter; 0 if elements have no bits of their own
    if entry.key in coded:
        bits = ops.state_format(coded[entry.key].format)["bits"]
    elif lay.compensation is not None and entry.key == lay.compensation.key:
        bits = 8 * entry.dtype.itemsize * row // max(lay.part.cols, 1)
    return sharding.Spread(entry.shape, entry.local, row * entry.dtype.itemsize, bits)


# The float32 view


def _check_exportable(opt: LowbitOptimizer) -> None:
    for _, p, lay in opt.laid_out():
        beside = lay.auxiliary or ([lay.compensation] if lay.compensation else [])
        if isinstance(p, sharding.FlatShard) and beside:
            raise ValueError(
                f"export='fp32' cannot express {beside[0].key!r} of parameter {p.name!r}, which "
                "does not have one number per element: use lowbit.fsdp1.get_state_dict and "
                "set_state_dict"
            )


def _expressible(p: Any, lay: Layout) -> bool:
    """Whether one number per element says all of a plain parameter's state."""
    return not (sharding.is_sharded(p) or lay.auxiliary or lay.compensation)


def _exported(opt: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with float32 moments in the shape of the flat shards, and of parameters that
    FSDP1 leaves alone: another wrapping makes them a part of a flat shard.
    """
    key_of = _keys(opt, state_dict)
    state = dict(state_dict["state"])
    made: dict[Any, dict[str, Any]] = {}
    for _, p, lay in opt.laid_out():
        kept = opt.state_of(p)
        flat_shard = isinstance(p, sharding.FlatShard)
        if not kept or not (flat_shard or _expressible(p, lay)):
            continue
        shown = made.setdefault(key_of[p.owner if flat_shard else p], {})
        shown["step"] = kept["step"].clone()
        for slot in lay.slots:
            values = dequantize_slot([kept[e.key] for e in slot.entries(lay.part)], lay, slot)
            if not flat_shard:
                shown[slot.name] = values if slot.coded else values.clone()
                continue
            here = p.part.without_room(values)
            if slot.name not in shown:
                shape = p.owner.shape  # one dimension, unless it is not sharded
                shown[slot.name] = torch.zeros(shape, dtype=torch.float32, device=here.device)
            p.here(shown[slot.name]).copy_(here)
    return {**state_dict, "state": {**state, **made}}


def _imported(opt: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The inverse: all rows that are touched here, from all ranks that hold some of them, to be
    quantized again. A collective.
    """
    if is_by_param():
        return state_dict
    saved = state_dict["state"]
    key_of = _keys(opt, state_dict)
    flat_shards = [(p, lay) for _, p, lay in opt.laid_out() if isinstance(p, sharding.FlatShard)]
    own = [saved.get(key_of[p.owner], {}) for p, _ in flat_shards]
    if any("stream" in value or any(isinstance(v, dict) for v in value.values()) for value in own):
        return state_dict  # of the optimizer itself, not exported
    lacking = [_lacking(p, lay, value) for (p, lay), value in zip(flat_shards, own, strict=True)]
    steps, lacking = _agreed([p for p, _ in flat_shards], [*map(_step, own)], lacking)
    for (p, lay), step, count in zip(flat_shards, steps, lacking, strict=True):
        if step >= 0 and count:  # on all ranks, which would wait for this one's elements
            raise ValueError(
                f"the state of {p.name!r} has no {lay.slots[-count].name!r} on this or another "
                "rank; load a state dict of this optimizer"
            )
    state = dict(saved)
    for p, _ in flat_shards:
        state.pop(key_of[p.owner], None)
    for (p, lay), step in zip(flat_shards, steps, strict=True):
        if step < 0:
            continue  # no rank has state
        value = saved.get(key_of[p.owner], {})
        flats = []
        for slot in lay.slots:
            if slot.name in value:
                flats.append(p.here(value[slot.name]).to(torch.float32))
            else:
                flats.append(torch.zeros(0, dtype=torch.float32, device="cpu"))
        whole = sharding.complete(p, flats)
        loaded: dict[str, Any] = {"step": float(step)}
        for slot, rows in zip(lay.slots, whole, strict=True):
            loaded |= _quantized(rows, lay, slot)
        if p.alone:
            state[key_of[p.owner]] = loaded
        else:
            state.setdefault(key_of[p.owner], {})[p.name] = loaded
    for _, p, lay in opt.laid_out():
        if not _expressible(p, lay):
            continue
        value = saved.get(key_of[p], {})
        if "stream" not in value:
            state[key_of[p]] = dict(value)
            for slot in lay.slots:
                moment = value.get(slot.name)
                if isinstance(moment, Tensor) and moment.shape == p.shape:
                    state[key_of[p]] |= _quantized(moment, lay, slot)
    return {**state_dict, "state": state}


def _quantized(values: Tensor, lay: Layout, slot: Slot) -> dict[str, Tensor]:
    """A whole moment as a state dict has it: with the codes that it came from, as far as its values
    determine them.
    """
    if slot.scale != "block":
        return {slot.name: values}
    tensors = quantize_decoded(values.to(torch.float32).reshape(lay.part.rows, lay.part.cols), slot)
    return {e.key: t for e, t in zip(slot.entries(lay.part), tensors, strict=True)}


def _keys(opt: LowbitOptimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, Any]:
    """The state dict's key for each of the optimizer's parameters."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [p for group in opt.param_groups for p in group["params"]]
    return dict(zip(params, keys, strict=True))


def _step(saved: Mapping[str, Any]) -> int:
    """The step of a flat shard, or -1: torch may not give it to ranks without elements."""
    return int(saved.get("step", -1))


def _lacking(p: sharding.FlatShard, lay: Layout, saved: Mapping[str, Any]) -> int:
    """The number of slots from the first that lacks a moment of elements here; 0 if none does."""
    found = [slot.name in saved or not p.value.numel() for slot in lay.slots]
    return 0 if all(found) else len(found) - found.index(False)


def _agreed(flat_shards: list[sharding.FlatShard], *numbers: list[int]) -> list[list[int]]:
    """The largest over all ranks of each flat shard's numbers. A collective."""
    made = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    groups = {p.flat.group: p for p in flat_shards if p.flat.ranks > 1}
    for group in groups:
        at = [i for i, p in enumerate(flat_shards) if p.flat.group is group]
        some = made[:, at].to(flat_shards[at[0]].owner.device)
        sharding.reduce_over([(some, group, "max")])
        made[:, at] = some.cpu()
    return made.tolist()
