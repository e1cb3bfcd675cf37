"""FSDP1 (FullyShardedDataParallel): gives its flat shards their places in the original parameters, and writes checkpoints as FSDP2 has them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import ops, shard
from lowbit.coding import decode_slot, encode_decoded
from lowbit.layout import Entry, Layout
from lowbit.optim import LowbitOptimizer
from lowbit.overrides import clean_name

# Optimizer -> the hooks of its float32 view.
_views: weakref.WeakKeyDictionary[LowbitOptimizer, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def bind(model: nn.Module, opt: LowbitOptimizer, *, export: str | None = None) -> None:
    """Tells an optimizer over FSDP1's parameters what they are shards of. State is then laid out by the original parameters, and state and weights
    are the bits of a single process.

    Call it after wrapping and building the optimizer, before the first step or load, and before Accelerate's `prepare(opt)`, on every rank:

        model = FullyShardedDataParallel(model, use_orig_params=True)
        opt = lowbit.AdamW(model.named_parameters())
        lowbit.fsdp1.bind(model, opt)

    With `use_orig_params=False` options go by the original names too; a flattened parameter's state holds that of each original one by name, and
    all of them step where torch gives the flattened one a gradient.

    Args:
        model: the module that FSDP1 wrapped, or one that holds such modules.
        opt: of its parameters.
        export: "fp32": `opt.state_dict()` gives float32 moments of the shape of the flat shards and `load_state_dict` takes them, so that
            torch's `FSDP.optim_state_dict` and `torch.distributed.checkpoint.state_dict` work. What is kept is encoded again on loading, which gives back
            the very values in all formats but `log8`, `log8_signed` and `log16` (docs/sharding.md).

    Raises:
        ValueError: a flat shard of the optimizer, or all that it has, is not in `model`; state that `export` cannot show.
        RuntimeError: the optimizer was stepped before its parameters became flat shards.
    """
    if export not in (None, "fp32"):
        raise ValueError(f"export must be 'fp32' or None, not {export!r}")
    pieces: dict[Tensor, list[shard.Piece]] = {}
    for piece in pieces_of(model):
        pieces.setdefault(piece.owner, []).append(piece)
    wanted = [p for group in opt.param_groups for p in group["params"]]
    if pieces and not any(p in pieces for p in wanted):
        raise ValueError(
            f"None of the optimizer's {len(wanted)} parameters is in the model that was given; use_orig_params=False puts flattened ones in their place, so "
            "build the optimizer from the wrapped model"
        )
    flat = [p for p in wanted if shard.is_flat(p)]
    if missing := sum(p not in pieces for p in flat):
        raise ValueError(
            f"{missing} of the optimizer's {len(flat)} flat shards are not in the model that was given: build the optimizer from the parameters of the "
            "wrapped model"
        )
    for p, several in pieces.items():  # the optimizer's or not: clipping takes all of a model
        shard.flats[p] = several[0].flat
    opt._bind_pieces({p: pieces[p] for p in wanted if p in pieces})
    if export:
        _check_exportable(opt)
    for handle in _views.pop(opt, ()):  # of a call before this one
        handle.remove()
    if export:
        _views[opt] = (
            opt.register_state_dict_post_hook(_exported),
            opt.register_load_state_dict_pre_hook(_imported),
        )


def flattened_weights(model: nn.Module, modules: Iterable[nn.Module]) -> list[str]:
    """The original names of those of the modules' weights that FSDP1 has flattened into others (`use_orig_params=False`), which then are no parameters."""
    wanted = {(id(module), "weight") for module in modules}
    found = []
    for path, handle, flat in _handles(model):
        if handle._use_orig_params:
            continue
        first = {  # of tied ones
            (id(info.prim_module), info.prim_param_name)
            for info in flat._shared_param_infos
            if (id(info.module), info.param_name) in wanted
        }
        for info, fqn in zip(flat._param_infos, flat._fqns, strict=True):
            if (id(info.module), info.param_name) in wanted | first:
                found.append(_original(path, fqn))
    return found


def _handles(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """The handles of all FSDP1 modules and their flat parameters, with the modules' names, in the order that all ranks have them in."""
    for path, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is not None:
            yield path, handle, flat


def _original(path: str, fqn: str) -> str:
    return clean_name(f"{path}._fsdp_wrapped_module.{fqn}".removeprefix("."))


def pieces_of(model: nn.Module) -> Iterator[shard.Piece]:
    """The original parameters of all FSDP1 modules; tied ones under their first name."""
    for path, handle, flat in _handles(model):
        alone = bool(handle._use_orig_params)
        if handle.uses_sharded_strategy:
            size = flat._sharded_size.numel()
            place = shard.flat_of(handle.process_group, size)
        else:
            place = shard.Flat(None, 0, 1, flat._unpadded_unsharded_size.numel())
        runs = zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
        offsets = [run for run, padding in runs if not padding]
        owners = flat._params if alone else [flat] * len(flat._fqns)
        also: dict[str, list[str]] = {}
        for name, _, inside, first, _, first_inside in flat._shared_param_infos:
            of = f"{first_inside}.{first}".removeprefix(".")
            also.setdefault(of, []).append(f"{inside}.{name}".removeprefix("."))

        for owner, fqn, shape, (begin, _) in zip(owners, flat._fqns, flat._shapes, offsets, strict=True):  # fmt: skip
            others = [_original(path, name) for name in also.get(fqn, ())]
            yield shard.Piece(owner, _original(path, fqn), shape, place, begin, alone, others)


# Checkpoints


def get_state_dict(opt: LowbitOptimizer) -> dict[str, Any]:
    """The optimizer's state as FSDP2 has it: for each original parameter by name, DTensors sharded on dimension 0. What
    `torch.distributed.checkpoint.save` writes of it loads under any wrapper. A collective.

    Returns:
        {"state": {name: {key: tensor}}, "param_groups": [...]}, whose groups list names. What lay in flat shards was
        copied; all else (plain and DTensor parameters, and what one rank has whole) is the optimizer's own state, which the next step writes to.
    """
    state: dict[str, Any] = {}
    names: list[list[str]] = [[] for _ in opt.param_groups]
    layouts = {p: lay for _, p, lay in opt._laid_out()}
    for number, p, name, index in opt._members():
        own = p.name if isinstance(p, shard.Piece) else name
        own = str(index) if own is None else clean_name(own)
        names[number].append(own)
        kept = opt._state_of(p)
        if not kept:
            continue
        if isinstance(p, shard.Piece) and p.flat.ranks > 1:
            entries = layouts[p].entries()
            tensors = shard.to_chunks(
                p, [_spread(e, layouts[p]) for e in entries], [kept[e.key] for e in entries]
            )
            own_keys = layouts[p].keys
            told = {key: value.clone() for key, value in kept.items() if key not in own_keys}
            state[own] = {**told, **dict(zip((e.key for e in entries), tensors, strict=True))}
        else:
            state[own] = dict(kept)
    groups = []
    for group, own_names in zip(opt.param_groups, names, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        if "param_names" in group:
            settings["param_names"] = own_names
        groups.append({**settings, "params": own_names})
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def set_state_dict(opt: LowbitOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads what `get_state_dict` gave, filled by `torch.distributed.checkpoint.load`, or the same of any other wrapper: state by the names of the original
    parameters, in DTensors or whole tensors. A collective.

    Raises:
        ValueError: other groups than here, a parameter has no state there, or state of an unknown layout.
    """
    if len(state_dict["param_groups"]) != len(opt.param_groups):
        raise ValueError(
            f"the state dict has {len(state_dict['param_groups'])} parameter groups and the optimizer {len(opt.param_groups)}; build it with the groups "
            "that it was saved with"
        )
    known = {clean_name(name): value for name, value in state_dict["state"].items()}
    state: dict[int, Any] = {}
    for _, p, name, index in opt._members():
        own = clean_name(p.name if isinstance(p, shard.Piece) else name or str(index))
        if own not in known:
            if p.requires_grad:
                raise ValueError(f"the state dict has no parameter {own!r}")
            continue
        if isinstance(p, shard.Piece) and not p.alone:
            state.setdefault(index, {})[p.name] = known[own]
        else:
            state[index] = known[own]
    groups, at = [], 0
    for group, saved in zip(opt.param_groups, state_dict["param_groups"], strict=True):
        size = len(group["params"])
        groups.append({**saved, "params": list(range(at, at + size))})
        at += size
    opt.load_state_dict({"state": state, "param_groups": groups})


def _spread(entry: Entry, lay: Layout) -> shard.Spread:
    """How a state tensor lies over the holders of a parameter."""
    if not entry.dims or entry.dims[0] != 0:
        return shard.Spread(entry.shape, entry.local, None, 0)
    row = 1
    for size in entry.local[1:]:
        row *= size
    coded = {slot.key: slot for slot in lay.slots}
    bits = 0  # of one of the parameter's elements, where each has some of its own
    if entry.key in coded:
        bits = ops.state_format(coded[entry.key].format)["bits"]
    elif lay.extra is not None and entry.key == lay.extra.key:
        bits = 8 * entry.dtype.itemsize * row // max(lay.part.cols, 1)
    return shard.Spread(entry.shape, entry.local, row * entry.dtype.itemsize, bits)


# The float32 view


def _check_exportable(opt: LowbitOptimizer) -> None:
    for _, p, lay in opt._laid_out():
        beside = lay.others or ([lay.extra] if lay.extra else [])
        if isinstance(p, shard.Piece) and beside:
            raise ValueError(
                f"export='fp32' cannot show {beside[0].key!r} of parameter {p.name!r}, which has not a number for each element: use "
                "lowbit.fsdp1.get_state_dict and set_state_dict"
            )


def _exported(opt: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with float32 moments of the flat shards' shape."""
    key_of = _keys(opt, state_dict)
    state = dict(state_dict["state"])
    made: dict[Any, dict[str, Any]] = {}
    for _, p, lay in opt._laid_out():
        kept = opt._state_of(p)
        if not isinstance(p, shard.Piece) or not kept:
            continue
        shown = made.setdefault(key_of[p.owner], {})
        shown["step"] = kept["step"].clone()
        for slot in lay.slots:
            values = decode_slot([kept[e.key] for e in slot.entries(lay.part)], lay, slot)
            here = p.part.without_room(values)
            if slot.name not in shown:
                shape = p.owner.shape  # one dimension, but for what is not sharded
                shown[slot.name] = torch.zeros(shape, dtype=torch.float32, device=here.device)
            p.here(shown[slot.name]).copy_(here)
    return {**state_dict, "state": {**state, **made}}


def _imported(opt: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The inverse: all rows that are touched here, from all their holders, to be encoded again. A collective."""
    saved = state_dict["state"]
    if any("stream" in value or any(isinstance(v, dict) for v in value.values()) for value in saved.values()):  # fmt: skip
        return state_dict  # the optimizer's own
    key_of = _keys(opt, state_dict)
    pieces = [(p, lay) for _, p, lay in opt._laid_out() if isinstance(p, shard.Piece)]
    steps = _steps([p for p, _ in pieces], [saved.get(key_of[p.owner], {}) for p, _ in pieces])
    state = dict(saved)
    for p, _ in pieces:
        state.pop(key_of[p.owner], None)
    for (p, lay), step in zip(pieces, steps, strict=True):
        if step < 0:
            continue  # nobody has any
        value = saved.get(key_of[p.owner], {})
        flats = []
        for slot in lay.slots:
            if slot.name in value:
                flats.append(p.here(value[slot.name]).to(torch.float32))
            elif p.value.numel():
                raise ValueError(f"the state of {p.name!r} has no {slot.name!r}")
            else:
                flats.append(torch.zeros(0))
        whole = shard.complete(p, flats)
        loaded: dict[str, Any] = {"step": float(step)}
        for slot, rows in zip(lay.slots, whole, strict=True):
            if slot.scale == "block":  # the very codes, as far as the values tell them
                tensors = encode_decoded(rows.reshape(p.part.rows, p.cols), slot)
                entries = slot.entries(lay.part)
                loaded |= {e.key: t for e, t in zip(entries, tensors, strict=True)}
            else:
                loaded[slot.name] = rows
        if p.alone:
            state[key_of[p.owner]] = loaded
        else:
            state.setdefault(key_of[p.owner], {})[p.name] = loaded
    return {**state_dict, "state": state}


def _keys(opt: LowbitOptimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, Any]:
    """The state dict's key of each of the optimizer's parameters."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [p for group in opt.param_groups for p in group["params"]]
    return dict(zip(params, keys, strict=True))


def _steps(pieces: list[shard.Piece], saved: list[Mapping[str, Any]]) -> list[int]:
    """The step of each piece, which torch may not give those who hold nothing of it; -1 where nobody knows one."""
    steps = torch.tensor(
        [int(value.get("step", -1)) for value in saved], dtype=torch.int64, device="cpu"
    )
    groups = {p.flat.group: p for p in pieces if p.flat.ranks > 1}
    for group in groups:
        at = [i for i, p in enumerate(pieces) if p.flat.group is group]
        some = steps[at].to(pieces[at[0]].owner.device)
        shard.reduce_over([(some, group, "max")])
        steps[at] = some.cpu()
    return steps.tolist()
