"""Whether ranks list the same parameters in the same order. Collectives of a step take them one
after another, so other orders would mix the numbers of different parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from lowbit.sharding.collective import gathered_objects, host_device, reduce_over

Listed = tuple[str | None, tuple[int, ...]]  # name, shape


def first_difference(told: Sequence[Sequence[Listed]]) -> str | None:
    """Where the list of a rank differs from that of rank 0; None if none does."""
    first, *others = told
    for rank, other in enumerate(others, start=1):
        for i in range(max(len(first), len(other))):
            here, there = (listed[i] if i < len(listed) else None for listed in (first, other))
            if here != there:
                return f"{i} is {_shown(here)} on rank 0 and {_shown(there)} on rank {rank}"
    return None


def disagreement(listed: Sequence[Listed], group: Any, device: torch.device) -> str | None:
    """`first_difference` over the ranks of a process group. A collective of two numbers, and where
    they differ another one of all names.
    """
    hashed = hashlib.blake2b(repr(listed).encode(), digest_size=7).digest()
    mine = [int.from_bytes(hashed, "big"), -int.from_bytes(hashed, "big")]
    both = torch.tensor(mine, dtype=torch.int64, device=host_device([group], device))
    reduce_over([(both, group, "max")])
    if both.tolist() == mine:  # the largest of all, and the smallest
        return None
    return first_difference(gathered_objects(list(listed), group))


def _shown(listed: Listed | None) -> str:
    if listed is None:
        return "missing"
    name, shape = listed
    return f"{'without a name' if name is None else repr(name)} of shape {shape}"
