"""The parameters that each rank's groups have. torch's planner keeps one rank's word where several
save a value under one name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.storage.rank_digests import first_difference, flattened

_GROUPS = "param_groups"


def group_names(planner: SavePlanner) -> dict[str, str]:
    """Digests of the parameters in each `param_groups` of what a planner saves, by its flat name.
    None of a planner that does not flatten.
    """
    saved = flattened(planner)
    if saved is None:
        return {}
    parameters: dict[str, list[tuple[Any, ...]]] = {}
    for name, value in saved.values.items():
        path = saved.paths.get(name, ())
        if _GROUPS not in path:
            continue
        at = path.index(_GROUPS) + 1
        found = parameters.setdefault(".".join(map(str, path[:at])), [])
        found += _parameters(path[at:], value)
    return {
        name: hashlib.blake2b(repr(sorted(found, key=repr)).encode(), digest_size=16).hexdigest()
        for name, found in parameters.items()
    }


def _parameters(path: Sequence[Any], value: Any) -> list[tuple[Any, ...]]:
    """(group, place, parameter) of all in a value, which is all groups, one of them,
    its parameters or one parameter.
    """
    if not path:
        groups = value if isinstance(value, Sequence) else ()
        return [one for i, group in enumerate(groups) for one in _parameters((i,), group)]
    if len(path) == 1:
        params = value.get("params") if isinstance(value, Mapping) else None
        return [] if params is None else _parameters((*path, "params"), params)
    if path[1] != "params":
        return []
    if len(path) > 2:
        return [(path[0], path[2], value)]
    return [(path[0], i, one) for i, one in enumerate(value)]


def check_group_names(ranks: Sequence[Mapping[str, str]]) -> None:
    """Raises CheckpointError if ranks have other parameters in groups of one name: only one rank's
    would be in the checkpoint.
    """
    if found := first_difference(ranks):
        before, rank, name = found
        raise CheckpointError(
            f"ranks {before} and {rank} have other parameters in {name}, as stages of a pipeline "
            "do, and torch keeps those of one rank: the others could not load their settings. "
            "Save flat names: StateDictOptions(flatten_optimizer_state_dict=True)"
        )
