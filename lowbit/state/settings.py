"""The settings of parameter groups: checked where they are given,
and those that a state dict has.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from lowbit.config.arguments import STRUCTURE, check_seed
from lowbit.config.hints import outside
from lowbit.config.overrides import clean_name

# What no load asks about: schedules write the rate, and the others are how torch would run a step.
_UNCHECKED: Mapping[str, Any] = {
    "lr": 0.0,
    "foreach": None,
    "fused": None,
    "differentiable": False,
    "capturable": False,
}


def check_added(opt: Any, group: Mapping[str, Any]) -> None:
    """Raises what `opt.check_options` does for a group that is added,
    beside the optimizer's own options.

    A copy of a live group is not checked, since schedules may have changed it. Neither is the
    learning rate if the group leaves it out, shares it with another group, or has `initial_lr`,
    which schedules leave behind.
    """
    live = opt.param_groups
    if any(
        all(key in group and group[key] is other.get(key) for key in opt.defaults) for other in live
    ):
        return
    given = {**opt.defaults, **group}
    if (
        "lr" not in group
        or "initial_lr" in group
        or any(group["lr"] is other.get("lr") for other in live)
    ):
        given["lr"] = _UNCHECKED["lr"]
    try:
        opt.check_options(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"parameter group {len(opt.param_groups)}: {error}") from None


def check_loaded(opt: Any, number: int, loaded: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError if a loaded group has a setting that this optimizer does not
    take: something other than a number, the wrong number of betas, or an unknown word.

    Ranges and combinations are not checked: schedules write a rate a little below 0, or no momentum
    beside `nesterov`.

    Args:
        number: of the group.
        loaded: the group as it would be.
    """
    error = _no_setting(opt, loaded)
    if error is not None:
        raise type(error)(
            f"group {number} of the state dict has a setting that {type(opt).__name__} does not "
            f"take: {error}. Replace it by this optimizer's own: "
            "opt.state_dict()['param_groups']"
        ) from None


def _no_setting(opt: Any, loaded: Mapping[str, Any]) -> Exception | None:
    try:
        if not _is_number(loaded["lr"]):
            raise TypeError(f"lr should be a number but is: {loaded['lr']!r}")
        check_seed(loaded.get("seed", 0))
    except (TypeError, ValueError) as error:
        return error
    if _refusal(opt, {**opt.defaults, **loaded, **_UNCHECKED}) is None:
        return None
    # Something is out of range, or is not a setting: check each alone,
    # beside the optimizer's own.
    structure = {key: loaded[key] for key in STRUCTURE if key in loaded}
    own = {**opt.defaults, **structure, **_UNCHECKED}
    before = str(_refusal(opt, own))  # of a default that is a tensor, in which something wrote
    for key in sorted(loaded.keys() & opt.defaults.keys() - {*STRUCTURE, *_UNCHECKED}):
        value = _plain(loaded[key], opt.defaults[key])
        refused = _refusal(opt, {**own, key: value})
        if refused is None or str(refused) == before:
            continue
        if isinstance(refused, TypeError) or not _alike(value, opt.defaults[key]):
            return refused
    return None


def _refusal(opt: Any, group: Mapping[str, Any]) -> Exception | None:
    try:
        opt.check_options(group)
    except (TypeError, ValueError, RuntimeError) as error:
        return error
    return None


def _is_number(value: Any) -> bool:
    """Whether it is a real number, or a tensor or an array of one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(_plain(value, None), Real)


def _plain(value: Any, default: Any) -> Any:
    """A setting without tensors and arrays; a flag that is None, as torch's may be, is False."""
    if value is None and isinstance(default, bool):
        return False
    if isinstance(value, Sequence) and not isinstance(value, str):
        made = [_plain(one, None) for one in value]
        return tuple(made) if isinstance(value, tuple) else made
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value.tolist() if hasattr(value, "tolist") else value  # tensors, and NumPy's


def _alike(value: Any, default: Any) -> bool:
    """Whether a value that is out of range is a number,
    or as many numbers as the default: it is a setting nevertheless.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        many = isinstance(default, Sequence) and len(default) == len(value)
        return many and all(one is None or isinstance(one, Real) for one in value)
    return isinstance(value, Real)


def agreed(
    number: int,
    group: Mapping[str, Any],
    sources: Sequence[Mapping[str, Any]],
    keys: Sequence[str] | None = None,
    counted: Container[str] = (),
) -> dict[str, Any]:
    """The settings that a group takes over from the saved groups of its parameters: those in which
    they agree. The others it keeps, with a warning.

    Args:
        number: of the group, for the warning.
        sources: of each parameter that has any.
        keys: that are taken over; all but how state is laid out by default.
        counted: those that steps write, in which the saved groups must agree.

    Raises:
        ValueError: they differ in what steps write, which no setting of the group can replace.
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
            differing: list[Any] = []
            for value in (source.get(key) for source in distinct):
                if not any(_same(value, before) for before in differing):
                    differing.append(value)
            found = (
                f"group {number} has parameters of {len(distinct)} groups of the checkpoint, "
                f"which differ in {key} ({', '.join(map(repr, differing))})"
            )
            if key in counted:
                raise ValueError(
                    f"{found}: steps have counted it for each of them, and one group cannot go on "
                    "with both; build the optimizer with the groups that were saved"
                )
            warnings.warn(
                f"{found}: it keeps its own, {group[key]!r}",
                stacklevel=outside(),
            )
    return made


def settings_by_name(
    saved: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    optional: set[str],
    named: bool,
) -> list[dict[str, Any]]:
    """The saved settings of each group: those of the saved groups that have its parameters, which
    the names decide alike on every rank.

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
                f"group {number} of the state dict has {some(at['params'])} and here {some(own)}: "
                "the parameters here have no names, and those of stages of a pipeline have the "
                "same numbers; build both optimizers from model.named_parameters(), and save again"
            )
        if lacking := [name for name in own if name not in source and name not in optional]:
            raise ValueError(
                f"no group of the state dict has {lacking[0]!r}, of group {number} here; they have "
                f"{some(source)}. torch.distributed.checkpoint keeps one rank's param_groups where "
                "ranks save different parameters, as stages of a pipeline. Load the state alone, "
                "and pass this optimizer's own groups: get_state_dict(opt)['param_groups']"
            )
        of = {name: source[name] for name in own if name in source}
        distinct = list({id(group): group for group in of.values()}.values())
        if not own:
            distinct = [at]
        settings = agreed(number, {}, distinct) if len(distinct) > 1 else dict(*distinct[:1])
        for key in sorted({key for group in distinct for key in group} - settings.keys()):
            if key not in STRUCTURE and key not in ("params", "param_names"):
                by_value: dict[str, str] = {}
                for name, group in of.items():
                    by_value.setdefault(repr(group.get(key)), name)
                raise ValueError(
                    f"group {number} has parameters of {len(distinct)} groups of the state dict, "
                    f"which differ in {key} "
                    f"({', '.join(f'{value} for {name!r}' for value, name in by_value.items())}): "
                    "build the groups that were saved, or pass this optimizer's own: "
                    "get_state_dict(opt)['param_groups']"
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
