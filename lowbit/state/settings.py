"""The settings of parameter groups: checked where they are given, and those that a state dict has."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowbit.config.arguments import STRUCTURE, check_group
from lowbit.config.hints import outside
from lowbit.config.overrides import clean_name

# What torch's optimizers and schedulers may leave in a group, and a step takes as it is.
_UNCHECKED = ("lr", "foreach", "fused", "differentiable", "capturable")


def check_added(opt: Any, group: Mapping[str, Any]) -> None:
    """Raises what `opt.check_options` does for a group that is added, beside the optimizer's own options."""
    try:
        opt.check_options({**opt.defaults, **group})
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"parameter group {len(opt.param_groups)}: {error}") from None


def check_loaded(
    opt: Any, number: int, group: Mapping[str, Any], loaded: Mapping[str, Any]
) -> None:
    """Raises TypeError or ValueError if a group would get settings of another optimizer, such as another number of betas.

    Args:
        number: of the group.
        group: as it is.
        loaded: as it would be.
    """
    what = f"group {number} of the state dict"
    check_group(what, {"lr": loaded["lr"]})
    try:
        opt.check_options({**loaded, **{key: group[key] for key in _UNCHECKED if key in group}})
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{what} has a setting that {type(opt).__name__} does not take: {error}. Put this optimizer's own in its place: "
            "opt.state_dict()['param_groups']"
        ) from None


def agreed(
    number: int, group: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], keys: Sequence[str] | None = None
) -> dict[str, Any]:  # fmt: skip
    """The settings that a group takes over from the saved groups of its parameters: those in which they agree. The others it keeps, with a warning.

    Args:
        number: of the group, for the warning.
        sources: of each parameter that has any.
        keys: that are taken over; all but how state is laid out by default.
    """
    distinct = list({id(source): source for source in sources}.values())
    if not distinct:
        return {}
    first, *others = distinct
    made = {}
    for key in first if keys is None else keys:
        if key not in first or key in STRUCTURE or key in ("params", "param_names"):
            continue
        if not any(key not in o or not _same(o[key], first[key]) for o in others):
            made[key] = first[key]
        elif key in group:
            said: list[Any] = []
            for value in (source.get(key) for source in distinct):
                if not any(_same(value, before) for before in said):
                    said.append(value)
            warnings.warn(
                f"group {number} has parameters of {len(distinct)} groups of the checkpoint, which differ in {key} "
                f"({', '.join(map(repr, said))}): it keeps its own, {group[key]!r}",
                stacklevel=outside(),
            )
    return made


def settings_by_name(
    saved: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], optional: set[str], named: bool
) -> list[dict[str, Any]]:  # fmt: skip
    """The saved settings of each group: those of the saved groups that have its parameters, which the names decide alike on every rank.

    Args:
        saved: groups, whose `params` are names.
        names: of the parameters of each group here.
        optional: names that need not be in a saved group.
        named: False if the names here are only numbers.
    """
    source = {clean_name(str(name)): group for group in saved for name in group["params"]}
    made = []
    for number, (own, at) in enumerate(zip(names, saved, strict=True)):
        if not named and [*own] != [*map(str, at["params"])]:
            raise ValueError(
                f"group {number} of the state dict has {some(at['params'])} and here {some(own)}: the parameters here have no names, and those of "
                "stages of a pipeline have the same numbers; build both optimizers from model.named_parameters(), and save anew"
            )
        if lacking := [name for name in own if name not in source and name not in optional]:
            raise ValueError(
                f"no group of the state dict has {lacking[0]!r}, of group {number} here; they have {some(source)}. torch.distributed.checkpoint "
                "keeps one rank's param_groups where ranks save different parameters, as stages of a pipeline. Load the state alone, and pass this "
                "optimizer's own groups: get_state_dict(opt)['param_groups']"
            )
        of = {name: source[name] for name in own if name in source}
        distinct = list({id(group): group for group in of.values()}.values())
        if not own:
            distinct = [at]
        settings = agreed(number, {}, distinct) if len(distinct) > 1 else dict(*distinct[:1])
        for key in sorted({key for group in distinct for key in group} - settings.keys()):
            if key not in STRUCTURE and key not in ("params", "param_names"):
                said: dict[str, str] = {}
                for name, group in of.items():
                    said.setdefault(repr(group.get(key)), name)
                raise ValueError(
                    f"group {number} has parameters of {len(distinct)} groups of the state dict, which differ in {key} "
                    f"({', '.join(f'{value} for {name!r}' for value, name in said.items())}): build the groups that were saved, or pass this "
                    "optimizer's own: get_state_dict(opt)['param_groups']"
                )
        settings.pop("param_names", None)
        made.append(settings)
    return made


def _same(a: Any, b: Any) -> bool:
    return bool(torch.as_tensor(a == b).all())


def some(keys: Any) -> str:
    """The first of them, for errors."""
    shown = [repr(key) for key in keys]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
