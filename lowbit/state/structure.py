"""The groups that state was laid out for."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import Any

from lowbit.config import arguments


class Structure:
    """The groups of an optimizer, with the options that its state was laid out for.

    Attributes:
        removed: the parameters of groups that were removed, while they have state.
    """

    def __init__(self) -> None:
        self.removed: set[Any] = set()
        self._known: dict[int, tuple[Any, dict[str, Any]]] = {}  # by the group's id
        self._came = False  # whether the last check met a group that it did not know

    def check(self, groups: Sequence[dict[str, Any]], decides: Container[str]) -> None:
        """Raises ValueError if a group's layout options changed after its state was laid out.

        Args:
            decides: options that may change.
        """
        self._came = False
        for number, group in enumerate(groups):
            now = {key: group.get(key) for key in arguments.STRUCTURE if key not in decides}
            known, before = self._known.get(id(group), (None, now))
            for key in now if known is group else ():
                if now[key] != before[key]:
                    raise ValueError(
                        f"group {number} has {key}={now[key]!r}, but its state was laid out for "
                        f"{before[key]!r}: build another optimizer with it and load this one's "
                        "state dict into that"
                    )
            self._came |= known is not group
            self._known[id(group)] = (group, now)

    def forget_removed(self, groups: Sequence[dict[str, Any]], state: Collection[Any]) -> None:
        """Forgets groups that are no longer there, but for the parameters that have state. Where
        others came in their place, they were replaced and not removed.
        """
        if len(self._known) > len(groups):
            here = {id(group) for group in groups}
            for key in self._known.keys() - here:
                gone = self._known.pop(key)[0]["params"]
                if not self._came:
                    self.removed.update(gone)
        if self.removed:  # seldom: each step comes here
            self.removed = {p for p in self.removed if p in state}
            if self._came:
                self.removed.difference_update(*(group["params"] for group in groups))

    def forget(self, group: dict[str, Any]) -> None:
        """Forgets a group's options, so that others may be laid out."""
        self._known.pop(id(group), None)
