"""Versions of parameters: autograd compares them,
and so refuses a backward pass that needs what a step has overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lowbit import sharding


def versioned(params: Iterable[Any]) -> list[Tensor]:
    """The tensors whose versions a step of these parameters raises. Of a DTensor and of a flat
    shard also what it is part of.

    Inference tensors have no version.
    """
    found: dict[int, Tensor] = {}
    for p in params:
        for t in (p.owner if isinstance(p, sharding.FlatShard) else p, sharding.local(p)):
            if not t.is_inference():
                found[id(t)] = t
    return list(found.values())


def raise_versions(tensors: list[Tensor]) -> None:
    """Tells autograd that these tensors were written,
    as torch's own operators do of what they write.
    """
    if tensors:
        torch.autograd.graph.increment_version(tensors)
