"""Digests of what each rank saves under a name, of which torch's planner keeps one rank's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.distributed.checkpoint.planner import SavePlanner

Key = TypeVar("Key")


class Flattened(NamedTuple):
    """What a planner saves: values and their paths in the state dict, by flat name."""

    values: Mapping[str, Any]
    paths: Mapping[str, Sequence[Any]]


def flattened(planner: SavePlanner) -> Flattened | None:
    """None of a planner that does not flatten, or has nothing."""
    values, paths = getattr(planner, "state_dict", None), getattr(planner, "mappings", None)
    return Flattened(values, paths) if values and paths else None


def first_difference(ranks: Sequence[Mapping[Key, str]]) -> tuple[int, int, Key] | None:
    """The first two ranks that have other digests of one name, and that; None if all agree."""
    first: dict[Key, tuple[int, str]] = {}
    for rank, digests in enumerate(ranks):
        for key, digest in digests.items():
            before, expected = first.setdefault(key, (rank, digest))
            if digest != expected:
                return before, rank, key
    return None
