"""Options of single parameters, chosen by name: what a group says, and what `overrides` say against it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lowbit.presets import FACTORED, checked_numel, formats_named

OPTIONS = ("state_format", "param_format", "wide", "min_numel")
_WRAPPERS = re.compile(r"\b(?:module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")


def clean_name(name: str) -> str:
    """A parameter's fully qualified name without what wrappers put into it."""
    return _WRAPPERS.sub("", name)


def override(pattern: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Other options for the parameters of some names: `overrides=lowbit.override("*.attn.*", state_format="4bit") | ...`. Of several that match
    a parameter the first counts.

    Args:
        pattern: as of a file name (`fnmatch`), held against whole names without what wrappers put into them; against "0", "1", ... where
            the optimizer was given no names.
        options: `state_format`, `param_format`, `wide` (True or False, whatever the group's patterns say) or `min_numel`.

    Raises:
        ValueError: an option of another name, or options that contradict each other.
    """
    made = {pattern: options}
    check(made)
    return made


def check(overrides: Any) -> None:
    """Raises ValueError where `overrides` is not a mapping of patterns to options that agree."""
    if not isinstance(overrides, Mapping):
        raise ValueError(
            f"overrides must map name patterns to options, as lowbit.override makes it, not be {overrides!r}"
        )
    for pattern, options in overrides.items():
        what = f"overrides[{pattern!r}]"
        if not isinstance(pattern, str) or not isinstance(options, Mapping):
            raise ValueError(f"{what} must map a name pattern to options, not to {options!r}")
        if unknown := sorted(set(map(str, options)) - set(OPTIONS)):
            raise ValueError(f"{what} has {unknown}; options are {', '.join(OPTIONS)}")
        if not isinstance(options.get("wide", False), bool):
            raise ValueError(f"{what} has wide={options['wide']!r}; it must be True or False")
        if "min_numel" in options:
            checked_numel(options["min_numel"])
        check_together(what, options)


def check_together(what: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError where wide state and another format are asked for in one place (a group may inherit either of them)."""
    if options.get("wide") is not True or options.get("state_format") is None:
        return
    named = set(formats_named(options["state_format"]))
    if FACTORED in named:
        raise ValueError(
            f"{what} has wide=True and factored state: a wide state is kept whole, in float32; leave one of the two out"
        )


def matched(options: Mapping[str, Any], name: str | None, index: int) -> str | None:
    """The pattern of a group's `overrides` that counts for a parameter."""
    known = str(index) if name is None else clean_name(name)
    return next((p for p in options.get("overrides") or () if fnmatch.fnmatch(known, p)), None)


def effective(group: Mapping[str, Any], name: str | None, index: int) -> dict[str, Any]:
    """The OPTIONS of a parameter: its group's, and over them those of the first pattern that matches its name."""
    made = {key: group.get(key) for key in OPTIONS}
    pattern = matched(group, name, index)
    if pattern is not None:
        made.update(group["overrides"][pattern])
    if made["min_numel"] is not None:
        checked_numel(made["min_numel"])
    return made


def check_matched(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValueError for a pattern of `overrides` that no parameter has, and for patterns of `wide` where parameters have no names."""
    found: dict[str, bool] = {}
    count, named = 0, False
    for group in groups:
        names, size = group.get("param_names"), len(group["params"])
        known = [clean_name(n) for n in names] if names else [str(count + i) for i in range(size)]
        count, named = count + size, named or bool(names)
        for pattern in group.get("overrides") or ():
            hit = any(fnmatch.fnmatch(name, pattern) for name in known)
            found[pattern] = found.get(pattern, False) or hit
        wide = group.get("wide") or ()
        if not (names or isinstance(wide, bool) or any(fnmatch.fnmatch("", p) for p in wide)):
            for pattern in wide:
                raise ValueError(
                    f"wide={pattern!r} is held against names, and the optimizer was given none; hand it model.named_parameters()"
                )
    if unmatched := [pattern for pattern, hit in found.items() if not hit]:
        advice = f": there are only numbers, 0 to {count - 1}; hand the optimizer model.named_parameters()"
        raise ValueError(
            f"overrides[{unmatched[0]!r}] matches the name of no parameter{'' if named else advice}"
        )
