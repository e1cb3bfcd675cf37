"""The names of an optimizer's parameters, which follow them where groups are edited by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lowbit.config import overrides


class _Part(NamedTuple):
    """A group that is part of a group of `lowbit.param_groups`."""

    group: Mapping[str, Any]
    names: list[str]
    whole: list[str]  # all names that it came with


class ParamNames:
    """Names by parameter.

    A group's `param_names` count where they fit its parameters. Where a parameter was removed or
    moved by hand, each keeps the name that it had.

    ZeroRedundancyOptimizer copies group entries between this optimizer and the whole one. The names
    of a part of a group of `lowbit.param_groups` are therefore no group entry: the whole optimizer
    and its state dicts keep their own.

    Attributes:
        by_parts: whether names are no group entries, because a group is part of another.
    """

    def __init__(self) -> None:
        self.by_parts = False
        self._of: dict[Any, str] = {}
        self._parts: list[_Part] = []

    def of(self, number: int, group: Mapping[str, Any], flat: Container[Any]) -> list[str] | None:
        """The names of a group's parameters; None if it has none, or has those of the parameters
        inside of its vectors.

        Args:
            number: of the group, for the error.
            flat: the vectors.

        Raises:
            ValueError: the group was edited, and which name is whose is unknown.
        """
        part = self._part_of(group)
        params, names = group["params"], group.get("param_names") if part is None else part.names
        if names is None:
            return None
        known = [self._of.get(p) for p in params]
        if len(names) == len(params):
            pairs = zip(known, names, strict=True)
            if all(own in (None, name) or own not in names for own, name in pairs):
                return list(names)
        made = [name for name in known if name is not None]
        if len(made) == len(params):
            return made
        if any(p in flat for p in params):
            return None
        raise ValueError(
            f"group {number} was edited, and which name is whose is unknown: it has {len(params)} "
            f"parameters and {len(names)} names. Give it param_names, the name of each parameter "
            "in the order of params; opt.add_param_group adds parameters"
        )

    def of_whole(self, group: Mapping[str, Any]) -> list[str] | None:
        """All names of the group that this one is part of; None if it is no part."""
        part = self._part_of(group)
        return None if part is None else part.whole

    def _part_of(self, group: Mapping[str, Any]) -> _Part | None:
        return next((part for part in self._parts if part.group is group), None)

    def moved(self, before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> None:
        """Takes each group for the one that was in its place before."""
        place = {id(group): i for i, group in enumerate(before)}
        kept = [part for part in self._parts if id(part.group) in place]
        self._parts = [part._replace(group=now[place[id(part.group)]]) for part in kept]

    def remember(self, group: Mapping[str, Any]) -> None:
        """Takes a group's `param_names` for those of its parameters now."""
        params, names = group["params"], group.get("param_names") or ()
        if len(names) == len(params) == len(set(params)):
            self._of.update(zip(params, names, strict=True))

    def keep(self, groups: Sequence[Mapping[str, Any]], flat: Container[Any]) -> None:
        """Remembers the names of these groups alone. ValueError as in `of`."""
        made = ParamNames()
        for number, group in enumerate(groups):
            names = self.of(number, group, flat)
            made.remember({"params": group["params"], "param_names": names})
        self._of = made._of
        self.moved(groups, groups)

    @contextlib.contextmanager
    def adding(self, added: dict[str, Any], groups: list[dict[str, Any]]) -> Iterator[None]:
        """A context that adds a group to `groups`, and its names with it; undone if that fails.

        Raises:
            ValueError: the numbers of names and parameters differ, and it is unknown which name is
                whose.
        """
        before = self.by_parts, dict(self._of), list(self._parts)
        entries = [(group, group.get("param_names")) for group in (*groups, added)]
        part = self._part(added)
        try:
            if part is not None:
                # torch requires names in all groups or in none: from here on, in none.
                self.by_parts = True
                for group, names in entries[:-1]:
                    if names is not None and self._part_of(group) is None:
                        self._parts.append(_Part(group, list(names), list(names)))
                for group, _ in entries:
                    group.pop("param_names", None)
                self._parts.append(part)
                self._of.update(zip(added["params"], part.names, strict=True))
            yield
            self.remember(added)
        except BaseException:
            self.by_parts, self._of, self._parts = before
            for group, names in entries:
                group |= {} if names is None else {"param_names": names}
            raise

    def _part(self, added: Mapping[str, Any]) -> _Part | None:
        """The group as a part; None if it is an ordinary one."""
        names, params = added.get("param_names"), added["params"]
        if names is None or not isinstance(params, list):
            return None
        if any(isinstance(p, tuple) for p in params):
            return None  # pairs, from which torch takes the names
        known = overrides.names_of_subset(params, names)
        if known is None and len(names) != len(params):
            raise ValueError(
                f"a parameter group has the names of {len(names)} parameters for {len(params)}, "
                "and it is not known which name is whose. Give a wrapper that hands over parts of "
                "groups, such as ZeroRedundancyOptimizer, those of lowbit.param_groups(model), or "
                "groups without param_names"
            )
        known = list(names) if known is None else known
        ordinary = not self.by_parts and known == list(names)
        return None if ordinary else _Part(added, known, list(names))
