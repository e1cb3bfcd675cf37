"""Samples of the optimizer's state that each rank saves. torch's planner takes equal names for
copies and keeps one; of ranks whose states differ it would lose all others in silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from lowbit import sharding
from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.storage.rank_digests import first_difference, flattened
from lowbit.checkpoint.storage.state_tensors import SAVED

_GROUPS, _STATE = "param_groups", "state"
_TENSORS = 8  # sampled, and values of each
_VALUES = 64

# (name, offsets of this rank's part) -> digest of some of its values
Samples: TypeAlias = dict[tuple[str, tuple[int, ...]], str]


def state_samples(planner: SavePlanner) -> Samples:
    """Digests of a few state tensors of what a planner saves: the same few on ranks with the same
    names. None of a planner that does not flatten.
    """
    saved = flattened(planner)
    if saved is None:
        return {}
    at = {name: tuple(map(str, path)) for name, path in saved.paths.items()}
    roots = {root for path in at.values() if (root := _root(path, _GROUPS)) is not None}
    found = [
        name
        for name, value in saved.values.items()
        if _root(at.get(name, ()), _STATE) in roots
        and isinstance(value, torch.Tensor)
        and not hasattr(value, "local_shards")  # a ShardedTensor, which has few of torch's methods
        and value.numel() > 1
        and not value.is_meta
    ]
    # In an order that says nothing of layers, so that the few are of all of the model.
    found.sort(key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
    made = {}
    for name in found[:_TENSORS]:
        offsets, sample = _sampled(saved.values[name])
        if sample is not None:
            made[name, offsets] = sample
    return made


def _root(path: tuple[str, ...], key: str) -> tuple[str, ...] | None:
    """Where in a state dict an optimizer lies of which `key` is at a path, nested or flattened."""
    for i, part in enumerate(path):
        if part == key or part.startswith(f"{key}."):
            return path[:i]
    return None


@torch.no_grad()
def _sampled(value: torch.Tensor) -> tuple[tuple[int, ...], str | None]:
    """The offsets of this rank's part, and a digest of some of its values; None of no values."""
    try:
        offsets = tuple(sharding.part(value, "state").offset)
    except (ValueError, IndexError):  # placed as no state of ours is, or on other ranks
        return (), None
    t = sharding.local(value)
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided:
        return offsets, None
    if t.numel() == 0:
        return offsets, None
    at = torch.linspace(
        0, t.numel() - 1, min(_VALUES, t.numel()), dtype=torch.float64, device="cpu"
    )
    values = t.detach()
    if values.dtype in SAVED:  # which torch does not index
        values = values.view(torch.uint8)
    some = values.reshape(-1)[at.long().to(t.device)].cpu()
    # Without numpy, which torch does not install.
    content = f"{t.dtype} {tuple(t.shape)}".encode() + bytes(some.view(torch.uint8).tolist())
    return offsets, hashlib.blake2b(content, digest_size=16).hexdigest()


def check_state_samples(ranks: Sequence[Samples]) -> None:
    """Raises CheckpointError if ranks have other values in a state of one name."""
    if found := first_difference(ranks):
        before, rank, (name, _) = found
        raise CheckpointError(
            f"ranks {before} and {rank} have other values in {name}. torch would save one rank's "
            "values and lose the others. This happens with pipeline stages without parameter names "
            "and with replicas that drifted apart. Build optimizers from "
            "model.named_parameters(), with names that no other stage has, and save flat names: "
            "StateDictOptions(flatten_optimizer_state_dict=True). If replicas may differ, as under "
            "DiLoCo, Writer(check_replicas=False) keeps those of one rank",
            tensor=name,
        )
