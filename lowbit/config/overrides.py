"""Options of single parameters: the group's, and those that `overrides` selects by name."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lowbit import ops
from lowbit.config.hints import warn_once
from lowbit.config.presets import FACTORED, checked_numel, formats_named

OPTIONS = ("state_format", "param_format", "full_precision", "min_numel")

# Of a parameter, for each group of `lowbit.param_groups` that has it: (all names of the group, its
# index among them). An attribute, since torch swaps no tensor that is a key of weak references:
# `model.to_empty()` of DTensors does.
_PLACES = "_lowbit_places"


def remember_names(params: Sequence[Tensor], names: Sequence[str]) -> None:
    """Records the group's names and each parameter's index,
    for optimizers that get part of a group.
    """
    whole = tuple(names)
    for i, p in enumerate(params):
        others = [place for place in getattr(p, _PLACES, ()) if place[0] != whole]
        setattr(p, _PLACES, [*others, (whole, i)])


def names_of_subset(params: Sequence[Any], names: Sequence[str]) -> list[str] | None:
    """The names of parameters that were passed together with `names`,
    the names of their whole group.

    The parameters may be any part of a group of `lowbit.param_groups` in any order, as torch's
    ZeroRedundancyOptimizer passes them. None if they are not known to be part of a group.
    """
    whole, made = tuple(names), []
    for p in params:
        places = getattr(p, _PLACES, ()) if isinstance(p, Tensor) else ()
        place = next((place for place in places if place[0] is whole or place[0] == whole), None)
        if place is None:
            return None
        whole = place[0]  # the same object, so that later comparisons are immediate
        made.append(whole[place[1]])
    return made


@functools.cache
def _wrappers() -> re.Pattern[str]:
    """The prefixes of wrappers where a component of a name begins,
    as csrc/policy/names.cpp finds them.
    """
    prefixes = "|".join(map(re.escape, ops.policy("wrapper_prefixes")))
    return re.compile(rf"(?<![A-Za-z0-9_\x80-\U0010ffff])(?:{prefixes})")


def clean_name(name: str) -> str:
    """A parameter's fully qualified name without the prefixes of wrappers."""
    return _wrappers().sub("", name)


def override(pattern: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Options for the parameters whose name matches a pattern.

    Combine several with `|`: `overrides=lowbit.override("*.attn.*", state_format="4bit") | ...`.
    The first pattern that matches a parameter decides.

    Args:
        pattern: a file-name pattern (`fnmatch`) for the whole name without wrapper prefixes. If the
            optimizer got no names, it is compared with "0", "1", ...
        options: `state_format`, `param_format`, `full_precision` (True or False; the group's
            patterns do not count) or `min_numel`.

    Returns:
        {pattern: options}, for the argument `overrides`.

    Raises:
        ValueError: an option has an unknown name, or options contradict each other.
    """
    made = {pattern: options}
    check(made)
    return made


def check(overrides: Any) -> None:
    """Raises ValueError unless `overrides` maps patterns to options that do not contradict each
    other.
    """
    if not isinstance(overrides, Mapping):
        raise ValueError(
            "overrides must map name patterns to options, as lowbit.override makes it, not be "
            f"{overrides!r}"
        )
    for pattern, options in overrides.items():
        what = f"overrides[{pattern!r}]"
        if not isinstance(pattern, str) or not isinstance(options, Mapping):
            raise ValueError(f"{what} must map a name pattern to options, not to {options!r}")
        if unknown := sorted(set(map(str, options)) - set(OPTIONS)):
            raise ValueError(f"{what} has {unknown}; options are {', '.join(OPTIONS)}")
        if not isinstance(options.get("full_precision", False), bool):
            raise ValueError(
                f"{what} has full_precision={options['full_precision']!r}; it must be True or False"
            )
        if "min_numel" in options:
            checked_numel(options["min_numel"])
        check_together(what, options)


def check_together(what: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError if one place asks for full precision and for factored state;
    a group may inherit either.
    """
    if options.get("full_precision") is not True or options.get("state_format") is None:
        return
    named = set(formats_named(options["state_format"]))
    if FACTORED in named:
        raise ValueError(
            f"{what} has full_precision=True and factored state: a full-precision state is kept "
            "whole, in float32; leave one of the two out"
        )


def matched(options: Mapping[str, Any], name: str | None, index: int) -> str | None:
    """The pattern of a group's `overrides` that applies to a parameter, or None."""
    known = str(index) if name is None else clean_name(name)
    return next((p for p in options.get("overrides") or () if fnmatch.fnmatch(known, p)), None)


def effective(group: Mapping[str, Any], name: str | None, index: int) -> dict[str, Any]:
    """The OPTIONS of a parameter: its group's,
    replaced by those of the first pattern that matches its name.
    """
    made = {key: group.get(key) for key in OPTIONS}
    pattern = matched(group, name, index)
    if pattern is not None:
        made.update(group["overrides"][pattern])
    if made["min_numel"] is not None:
        checked_numel(made["min_numel"])
    return made


def check_matched(
    groups: Iterable[Mapping[str, Any]],
    named: Mapping[int, Sequence[str]] | None = None,
    warned: set[str] | None = None,
) -> None:
    """Raises ValueError for patterns that can match no parameter, and warns of those of
    `full_precision` that match none here.

    These are patterns of `overrides` without a match, and patterns of `full_precision` if the
    parameters have no names.

    Args:
        groups: of the optimizer.
        named: group number -> names to use instead of `param_names`;
            they include parameters that other ranks step.
        warned: the patterns that were warned of, which are not again; updated.
            None (default) warns of all.
    """
    found: dict[str, bool] = {}
    kept: dict[str, None] = {}  # the patterns of full_precision
    every: list[str] = []  # names of all groups
    count, any_names = 0, False
    for number, group in enumerate(groups):
        names, size = (named or {}).get(number, group.get("param_names")), len(group["params"])
        known = [clean_name(n) for n in names] if names else [str(count + i) for i in range(size)]
        count, any_names = count + size, any_names or bool(names)
        for pattern in group.get("overrides") or ():
            hit = any(fnmatch.fnmatch(name, pattern) for name in known)
            found[pattern] = found.get(pattern, False) or hit
        full_precision = group.get("full_precision") or ()
        if isinstance(full_precision, str):
            full_precision = (full_precision,)
        if names:
            every += known
            kept |= dict.fromkeys(() if isinstance(full_precision, bool) else full_precision)
        if not (
            names
            or isinstance(full_precision, bool)
            or any(fnmatch.fnmatch("", p) for p in full_precision)
        ):
            for pattern in full_precision:
                raise ValueError(
                    f"full_precision={pattern!r} is compared with names, and the optimizer was "
                    "given none; pass it model.named_parameters()"
                )
    if unmatched := [pattern for pattern, hit in found.items() if not hit]:
        advice = (
            f": there are only numbers, 0 to {count - 1}; pass the optimizer "
            "model.named_parameters()"
        )
        raise ValueError(
            f"overrides[{unmatched[0]!r}] matches the name of no "
            f"parameter{'' if any_names else advice}"
        )
    for pattern in (pattern for pattern in kept if not fnmatch.filter(every, pattern)):
        warn_once(
            set() if warned is None else warned,
            f"full_precision {pattern}",
            f"full_precision={pattern!r} matches the name of no parameter, so it has no effect: a "
            "pattern is for the whole name, such as '*embed*' for 'model.embed.weight'",
        )
