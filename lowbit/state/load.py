"""A state dict put into a live optimizer: the groups' settings merged,
and each parameter's state converted.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from lowbit import sharding
from lowbit.config.arguments import STRUCTURE
from lowbit.config.hints import outside
from lowbit.config.overrides import clean_name, matched
from lowbit.state import choose
from lowbit.state.convert import Converted, convert_state, holds
from lowbit.state.layout import Layout
from lowbit.state.replaced import check_bound
from lowbit.state.saved import (
    is_lazy,
    lost_compensation,
    with_step_of_momentum,
    without_filled_in,
)
from lowbit.state.settings import agreed, check_loaded, some
from lowbit.state.state_dict import check_entries, check_type
from lowbit.state.stateful import StatefulOptimizer
from lowbit.state.torch_functions import options_of_load


class _ByParam(NamedTuple):
    """A load by `load_by_param`."""

    shared: sharding.SharedFailure | None


# While one runs; a program's own `load_state_dict` may lie between.
_BY_PARAM: ContextVar[_ByParam | None] = ContextVar("by param", default=None)


def is_by_param() -> bool:
    """Whether what is being loaded has the moments of whole parameters, whatever holds them here:
    whether `load_by_param` runs.
    """
    return _BY_PARAM.get() is not None


def load_by_param(
    opt: StatefulOptimizer,
    states: Iterable[Mapping[str, Any] | None],
    settings: Iterable[Mapping[str, Any]],
    shared: sharding.SharedFailure | None = None,
) -> None:
    """`opt.load_state_dict` of what is in the optimizer's own order.

    Args:
        states: of each of `opt.members()`; None or empty for parameters without state.
        settings: of each group.
        shared: what this rank and others tell each other of failures.
    """
    state: dict[int, Any] = {}
    for (_, p, _, place), value in zip(opt.members(), states, strict=True):
        if value and isinstance(p, sharding.FlatShard) and not p.alone:
            state.setdefault(place, {})[p.name] = value
        elif value:
            state[place] = value
    groups, at = [], 0
    for group, given in zip(opt.named_groups(), settings, strict=True):
        # Without names, numbers may be taken in the order of another program.
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        size = len(group["params"])
        groups.append({**given, **names, "params": list(range(at, at + size))})
        at += size
    token = _BY_PARAM.set(_ByParam(shared))
    try:
        opt.load_state_dict({"state": state, "param_groups": groups})
    finally:
        _BY_PARAM.reset(token)


@torch.no_grad()
def restore(opt: StatefulOptimizer, state_dict: dict[str, Any]) -> None:
    """`LowbitOptimizer.load_state_dict`. Nothing is changed before all of it is known to fit."""
    check_type(state_dict)
    state_dict = state_dict.copy()
    for hook in opt._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(opt, state_dict)
        if changed is not None:
            state_dict = changed
    check_entries(state_dict)
    check_bound(opt)
    saved = _by_name(opt, deepcopy(state_dict["param_groups"]))
    groups = _groups(opt, saved)
    laid_out, names = _laid_out(opt, groups)
    ids = [key for group in saved for key in group["params"]]
    params = [p for group in groups for p in group["params"]]
    key_of = dict(zip(params, ids, strict=True))
    by_param = _BY_PARAM.get()
    shared = by_param.shared if by_param is not None else None
    saved_states: Iterable[_Saved] = _saved_states(opt, state_dict["state"], laid_out, key_of)
    options = options_of_load()
    if options is not None and options.full_state_dict:
        saved_states = [
            one._replace(value=with_step_of_momentum(one.lay, one.value)) for one in saved_states
        ]
    with _together(options):
        conversions = [_conversion(opt, one, names[one.p], options, shared) for one in saved_states]
    coded = [(c.key, c.name) for c in conversions if any(slot.coded for slot in c.lay.slots)]
    warn_of_quantized(coded, state_dict["param_groups"])
    _warn_of_uncorrected(conversions)
    known = set(ids)
    if not conversions:
        _check_nothing_is_lost(laid_out, state_dict["state"], known)
    if shared is not None:
        shared.check()
    state: defaultdict[Any, Any] = defaultdict(dict)
    state.update({k: value for k, value in state_dict["state"].items() if k not in known})
    opt.lay_out_again()  # a prepared step holds the old tensors

    def keep(p: Any, made: dict[str, Any]) -> None:
        opt.set_state_of(p, made, state)
        opt.set_state_of(p, made)  # what was here is free before the next is made

    for one in conversions:  # all of them fit
        made = one.convert(opt.state_of(one.p), one.in_place)
        if shared is None:
            keep(one.p, made)
        else:  # after a failure this goes on to what other ranks wait in
            shared.attempt(keep, one.p, made)
    if shared is not None:
        shared.raise_failure()
    loaded = {one.p for one in conversions}
    for group, p, lay in laid_out:
        if p.requires_grad and not p.is_meta and p not in loaded:
            opt.set_state_of(p, opt.fresh_state(group, p, lay), state)
    opt.__setstate__({"state": state, "param_groups": groups})
    for post_hook in opt._optimizer_load_state_dict_post_hooks.values():
        post_hook(opt)


def _together(options: Any) -> AbstractContextManager[object]:
    """Makes an error of one rank one of all, where ranks have what rank 0 sent them: rank 0 alone
    may see that it does not fit.
    """
    if options is None or not options.broadcast_from_rank0:
        return nullcontext()
    return sharding.SharedFailure((), _refused_elsewhere, everywhere=True).together()


def _refused_elsewhere(rank: int, cause: str) -> ValueError:
    return ValueError(f"rank {rank} refused the state that is loaded; its own error says why")


class _Saved(NamedTuple):
    """What a state dict has for a parameter."""

    p: Any
    lay: Layout
    key: Any
    value: Mapping[str, Any]


def _saved_states(
    opt: StatefulOptimizer,
    state: Mapping[Any, Any],
    laid_out: Sequence[tuple[dict[str, Any], Any, Layout]],
    key_of: Mapping[Any, Any],
) -> Iterator[_Saved]:
    """Of each parameter that has any."""
    for _, p, lay in laid_out:
        flat_shard = isinstance(p, sharding.FlatShard)
        key = key_of[p.owner if flat_shard else p]
        value = state.get(key, {})
        if flat_shard and not p.alone:
            _check_names(key, value, [q.name for q in opt.flat_shards[p.owner]])
            value = value.get(p.name, {})
        if value:
            yield _Saved(p, lay, key, value)


class _Conversion(NamedTuple):
    """A parameter's saved state on its way to the optimizer's."""

    p: Any
    lay: Layout
    key: Any
    name: str | None
    convert: Converted
    in_place: bool
    uncorrected: str | None  # the format of correction bits that are lost


def _conversion(
    opt: StatefulOptimizer,
    saved: _Saved,
    name: str | None,
    options: Any,
    shared: sharding.SharedFailure | None,
) -> _Conversion:
    """ValueError where saved state does not fit, with the parameter's name."""
    p, lay, key, value = saved
    try:
        if options is not None and options.full_state_dict:
            broadcast = options.broadcast_from_rank0
            value = without_filled_in(lay, value, opt.state_of(p), key, broadcast)
        in_place = is_lazy(value) or holds(value, opt.state_of(p))
        convert = convert_state(p, lay, value, key, opt.state_memory, shared)
    except ValueError as error:
        if name in (None, key):
            raise
        raise ValueError(f"parameter {name!r}: {error}") from None
    return _Conversion(p, lay, key, name, convert, in_place, lost_compensation(lay, value))


def warn_of_quantized(
    coded: Sequence[tuple[Any, str | None]], saved_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Warns of parameters whose state is coded here, and which the saved groups keep in float32.

    Args:
        coded: the saved key and the name of each parameter with coded state.
    """
    group_of = {key: group for group in saved_groups for key in group["params"]}

    def kept(key: Any, name: str | None) -> bool:
        group = group_of[key]
        options = (group.get("overrides") or {}).get(matched(group, name, key), {})
        named = options.get("full_precision", group.get("full_precision"))
        return choose.names_full_precision(name, named or ())

    if wide := [name or key for key, name in coded if kept(key, name)]:
        warnings.warn(
            f"the saved groups keep float32 state for {some(wide)}, and this optimizer's do not: "
            "it was converted to this optimizer's format. To keep float32, build the optimizer "
            "with lowbit.param_groups(model, embeddings='float32', heads='float32') for embeddings "
            "and heads, or with full_precision= by name",
            stacklevel=outside(),
        )


def _warn_of_uncorrected(conversions: Iterable[_Conversion]) -> None:
    names_of: dict[str, list[Any]] = {}  # by the format of the bits
    for one in conversions:
        if one.uncorrected:
            names_of.setdefault(one.uncorrected, []).append(one.name or one.key)
    for stored, names in names_of.items():
        warnings.warn(
            f"the state that is loaded has correction bits for {some(names)}, and this optimizer "
            "keeps none: these weights continue from their 16-bit values. To keep the bits, build "
            f"the optimizer with param_format={stored!r}",
            stacklevel=outside(),
        )


def _check_names(key: Any, value: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises ValueError if the saved state of a vector is of parameters that this one holds nothing
    of.
    """
    if lost := [name for name in value if name not in names]:
        raise ValueError(
            f"the vector {key!r} was cut otherwise: its saved state has {some(lost)}, and the "
            f"vector here holds {some(names)}. Save with lowbit.flat.get_state_dict and load with "
            "lowbit.flat.set_state_dict, which go by the whole parameters"
        )


def _groups(opt: StatefulOptimizer, saved_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups with the saved settings,
    in torch's words where the two are cut otherwise.
    """
    if len(saved_groups) != len(opt.param_groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: "
            f"{cuts(saved_groups, opt.param_groups)}; {_SETTLED}"
        )
    made = []
    numbered = opt.names.by_parts or any(map(_goes_by_number, opt.param_groups))
    for i, (saved, group) in enumerate(zip(saved_groups, opt.param_groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                f"optimizer's group: {cuts(saved_groups, opt.param_groups)}; {_SETTLED}"
            )
        own = {key: group[key] for key in STRUCTURE if key in group}
        saved = {key: value for key, value in saved.items() if key not in STRUCTURE}
        if "param_names" in group or numbered:
            saved.pop("param_names", None)
        if "param_names" in group and not opt.names.by_parts:
            own["param_names"] = opt.names_of(i) or group["param_names"]
        made.append({**group, **saved, **own, "params": group["params"]})
        check_loaded(opt, len(made) - 1, made[-1])
    return made


def _goes_by_number(group: Mapping[str, Any]) -> bool:
    """Whether names would change which parameters of a group its options choose."""
    patterns = group.get("overrides") or isinstance(group.get("split"), Mapping)
    return bool(patterns or not isinstance(group.get("full_precision") or False, bool))


def cuts(saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> str:
    """How many parameters the groups have there and here, for errors."""
    there, here = (
        [len(group.get("params", ())) for group in some] for some in (saved_groups, groups)
    )
    return f"there are groups of {there} parameters there, and here of {here}"


_SETTLED = (
    "numbers alone do not say which parameter is which. Save it to a file and call "
    "lowbit.load_optimizer(opt, path, model=model), which goes by the order of the model; or build "
    "both optimizers from named parameters, such as model.named_parameters()"
)


def _names(groups: Sequence[Mapping[str, Any]], *, saved: bool = False) -> list[str] | None:
    """Clean names of all parameters in the order of the groups; None where they are not all named,
    or two alike.
    """
    made: list[str] = []
    for group in groups:
        # torch.distributed.checkpoint keys state by names, in the order here, and leaves
        # `param_names` in that of the saved optimizer.
        keyed = saved and all(isinstance(key, str) for key in group["params"])
        names = group["params"] if keyed else group.get("param_names") or ()
        if len(names) != len(group["params"]):
            return None
        made += map(clean_name, names)
    return made if len(set(made)) == len(made) else None


def _by_name(opt: StatefulOptimizer, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups, cut and ordered as the optimizer's where both name the same parameters.

    ValueError where some names are the same and their places are not.
    """
    if _names(saved, saved=True) is None and _sizes(saved) == [*map(len, opt.numbered_groups)]:
        pairs = zip(saved, opt.numbered_groups, strict=True)
        saved = [{**group, "param_names": names} for group, names in pairs]
    theirs, ours = _names(saved, saved=True), _names(opt.named_groups())
    if (
        theirs is None
        or ours is None
        or (theirs == ours and _sizes(saved) == _sizes(opt.param_groups))
    ):
        return saved
    if set(theirs) != set(ours):
        place = {name: i for i, name in enumerate(ours)}
        for i, name in enumerate(theirs):
            if place.get(name, i) != i:
                raise ValueError(
                    f"{name!r} is parameter {i} there and {place[name]} here, and not all names "
                    f"are the same ({len(set(theirs) - set(ours))} of those there are not here, "
                    f"such as {next((n for n in theirs if n not in place), None)!r}): neither "
                    "names nor numbers say which parameter is which; build this optimizer from "
                    "the same named parameters"
                )
        return saved
    source = {}
    names = iter(theirs)
    for group in saved:
        source.update({next(names): (key, group) for key in group["params"]})
    made, names = [], iter(ours)
    for number, group in enumerate(opt.param_groups):
        found = [source[next(names)] for _ in group["params"]]
        settings = agreed(number, group, [of for _, of in found], counted=opt.counted)
        made.append({**settings, "params": [key for key, _ in found]})
    return made


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _check_nothing_is_lost(
    laid_out: Sequence[tuple[dict[str, Any], Any, Layout]], state: Mapping[Any, Any], ids: set[Any]
) -> None:
    """What to say where no parameter was given state: ValueError where there is some under other
    keys, else a warning.
    """
    waiting = sum(p.requires_grad and bool(lay.slots or lay.auxiliary) for _, p, lay in laid_out)
    if not waiting:
        return
    if lost := [
        key for key, value in state.items() if isinstance(value, dict) and value and key not in ids
    ]:
        raise ValueError(
            f"the state dict's state is under {some(lost)}, but its param_groups has {some(ids)}: "
            "none of it is any parameter's. Keys must be the same there, numbers or names; some "
            "formats make text of numbers"
        )
    warnings.warn(
        f"there is no state for any of the {waiting} parameters, as where an optimizer was never "
        "stepped: settings are loaded, and state starts empty",
        stacklevel=outside(),
    )


def _laid_out(
    opt: StatefulOptimizer, groups: list[dict[str, Any]]
) -> tuple[list[tuple[dict[str, Any], Any, Layout]], dict[Any, str | None]]:
    """Every parameter with its group and layout as they will be,
    and their names: the rule follows the loaded settings.
    """
    before = opt.param_groups, opt.layouts
    opt.param_groups, opt.layouts = groups, {}
    try:
        return list(opt.laid_out()), {member.p: member.name for member in opt.members()}
    finally:
        opt.param_groups, opt.layouts = before
