"""Which parameter of a checkpoint is which of an optimizer's: by names, by the order of the model,
by equal groups, or it is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from lowbit import sharding
from lowbit.checkpoint.contents import Model, Param
from lowbit.config.hints import outside
from lowbit.config.overrides import clean_name
from lowbit.optim.optimizer import LowbitOptimizer
from lowbit.state.load import cuts


def matched(
    opt: LowbitOptimizer, saved: Model, model: nn.Module | None, path: str
) -> tuple[list[Param | None], bool]:
    """The checkpoint's parameter for each of the optimizer's,
    and whether they were told by their numbers alone.
    """
    members = [p for _, p, _, _ in opt.members()]
    names = _names(opt, model)
    theirs = _names_there(saved, names, model, path, opt.numbered_groups)
    flattened = any(isinstance(p, sharding.FlatShard) and not p.alone for p in members)
    if theirs is None and not flattened:
        return _in_order(opt, saved, len(members), model, path), True
    if names is None:
        raise ValueError(
            f"{path} names its parameters, and the optimizer has no names; pass model=, or build "
            "the optimizer from named parameters"
        )
    found = theirs or {}
    missing = [n for n, p in zip(names, members, strict=True) if n not in found and p.requires_grad]
    if missing and theirs is None:
        raise ValueError(
            f"{path} numbers its parameters, and FSDP1 has flattened those here, whose parts are "
            "found by name: save again by name, as lowbit.fsdp1.get_state_dict and "
            "torch.distributed.checkpoint do"
        )
    if missing:
        there = f"; the first name there is {next(iter(found))!r}" if found else ""
        raise ValueError(
            f"{path} has no parameter {missing[0]!r} ({len(missing)} missing of "
            f"{len(names)}){there}"
        )
    return [found.get(name) for name in names], False


def _names(opt: LowbitOptimizer, model: nn.Module | None) -> list[str] | None:
    """Clean names of the parameters in the optimizer's order, original ones in place of flattened,
    or None.
    """
    if opt.flat_shards:
        members = list(opt.members())
        known = [p.name if isinstance(p, sharding.FlatShard) else name for _, p, name, _ in members]
        return None if None in known else [clean_name(str(name)) for name in known]
    params = [p for group in opt.param_groups for p in group["params"]]
    named = [opt.names_of(number) for number in range(len(opt.param_groups))]
    if all(names is not None for names in named):
        return [clean_name(name) for names in named for name in names or ()]
    if model is None:
        return None
    of = {id(p): clean_name(name) for name, p in model.named_parameters()}
    if missing := sum(id(p) not in of for p in params):
        raise ValueError(
            f"{missing} of the optimizer's parameters are not in the model that was given"
        )
    return [of[id(p)] for p in params]


def _grouped(saved: Model) -> list[Param]:
    """The checkpoint's parameters in the order of its groups."""
    return [saved.params[i] for group in saved.groups for i in group.params]


def _names_there(
    saved: Model,
    names: Sequence[str] | None,
    model: nn.Module | None,
    path: str,
    numbered: Sequence[Sequence[str]],
) -> dict[str, Param] | None:
    """The checkpoint's parameters by clean names, as the optimizer has them;
    None where there are only numbers.

    Args:
        numbered: names in the groups and the order in which the program that wrote the checkpoint
            numbers them; empty where nobody knows.
    """
    grouped = _grouped(saved)
    if not saved.params or any(param.index < 0 for param in grouped or saved.params):
        return {clean_name(param.name or str(param.index)): param for param in saved.params}
    if names is None:
        return None
    if grouped and all(param.name for param in grouped):
        return {clean_name(param.name): param for param in grouped}
    if numbered and [len(group.params) for group in saved.groups] == [*map(len, numbered)]:
        known = [clean_name(name) for group in numbered for name in group]
        return dict(zip(known, grouped, strict=True))
    if model is None or len(saved.groups) > 1:
        return None
    if grouped:
        order = _order(model, names, len(grouped), len(grouped) - 1, path)
        _warn_of_two_orders(model, order, names, path)
        return dict(zip(order, grouped, strict=True))
    order = _order(model, names, None, max(param.index for param in saved.params), path)
    return {order[param.index]: param for param in saved.params}


def _warn_of_two_orders(
    model: nn.Module, order: Sequence[str], names: Sequence[str], path: str
) -> None:
    """Says that the order of the model was taken,
    where the optimizer's own is another and would fit all shapes too.
    """
    shapes = {clean_name(n): p.shape for n, p in model.named_parameters(remove_duplicate=False)}
    fits = len(order) == len(names) and all(
        shapes[a] == shapes[b] for a, b in zip(order, names, strict=True)
    )
    if not fits or list(order) == list(names):
        return
    first = next((a, b) for a, b in zip(order, names, strict=True) if a != b)
    warnings.warn(
        f"{path} numbers its parameters, and they were taken in the order of the model; this "
        f"optimizer has them in another, and every shape fits both: {first[0]!r} would be "
        f"{first[1]!r}. If it was saved from an optimizer in that other order, the states are "
        "swapped: save again from named parameters, such as model.named_parameters()",
        stacklevel=outside(),
    )


def _order(
    model: nn.Module, names: Sequence[str], total: int | None, last: int, path: str
) -> list[str]:
    """The names, as the optimizer has them,
    of parameters that a checkpoint numbers as those of the model.

    Args:
        names: of the optimizer's parameters.
        total: how many the checkpoint has; None where only those with state are known.
        last: the largest number of those.
    """
    first: dict[int, str] = {}  # of a tied parameter the name that counts
    alias: dict[str, str] = {}
    trained: list[str] = []
    for name, p in model.named_parameters(remove_duplicate=False):
        name = clean_name(name)
        if id(p) not in first and p.requires_grad:
            trained.append(name)
        alias[name] = first.setdefault(id(p), name)
    every = list(first.values())
    if unknown := [name for name in names if name not in alias]:
        raise ValueError(
            f"{path} numbers its parameters, and the model that was given, which tells their "
            f"order, has no {unknown[0]!r} ({len(unknown)} of the "
            f"optimizer's {len(names)} are not in it)"
        )
    here = {alias[name]: name for name in names}
    own = [name for name in every if name in here]
    orders = [
        order
        for order in dict.fromkeys(map(tuple, (every, trained, own)))
        if len(order) == total or (total is None and last < len(order))
    ]
    if len(orders) != 1:
        found = (
            f"numbers {total} parameters"
            if total is not None
            else f"has state of parameter {last} and does not say how many there are"
        )
        raise ValueError(
            f"{path} {found}; the model that was given has {len(every)}, of which {len(trained)} "
            f"are trained and {len(own)} are in this optimizer: which parameter is which cannot be "
            "told. Save again from an optimizer of named parameters, such as "
            "model.named_parameters()"
        )
    return [here.get(name, name) for name in orders[0]]


def _in_order(
    opt: LowbitOptimizer, saved: Model, count: int, model: nn.Module | None, path: str
) -> list[Param | None]:
    """The checkpoint's parameters as torch takes them: numbers are counted group by group.

    ValueError where the groups are not cut alike,
    so that numbers do not mean the optimizer's order.
    """
    here = [len(group["params"]) for group in opt.param_groups]
    grouped = _grouped(saved)
    if not grouped:
        if len(here) == 1:
            of = {param.index: param for param in saved.params}
            return [of.get(i) for i in range(count)]
        raise ValueError(
            f"{path} numbers its parameters and has no groups, and here are groups of {here}: "
            "which is which cannot be told; pass model=, if they are in the order of the model"
        )
    if [len(group.params) for group in saved.groups] == here:
        return list(grouped)
    prefix = (
        f"the checkpoint's optimizer has {len(grouped)} parameters, this one {count}: "
        if len(grouped) != count
        else ""
    )
    known = any("param_names" in group.settings for group in saved.groups)
    advice = (
        "pass model=, whose order they are in"
        if (len(saved.groups) == 1 and model is None) or known
        else (
            "groups follow no order that a model tells, so give this optimizer the same groups in "
            "the same order, or save again from an optimizer of named parameters"
        )
    )
    there = [{"params": group.params} for group in saved.groups]
    raise ValueError(
        f"{prefix}{path} numbers its parameters, and {cuts(there, opt.param_groups)}: "
        f"which is which cannot be told; {advice}"
    )
