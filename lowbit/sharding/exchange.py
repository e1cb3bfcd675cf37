"""Matrices whose parts travel to the ranks that own them, and come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.sharding.boxes import Boxes


@dataclass(frozen=True)
class Matrices:
    """The local parts of a matrix, or of the matrices of a batch."""

    here: Tensor  # contiguous, [n, rows, columns]
    boxes: Boxes
    shape: tuple[int, int]  # of a whole matrix
    owners: tuple[int, ...]  # the rank of the group that gets each of them whole

    def bytes_of(self, rank: int) -> int:
        return self.boxes.numel(rank) * self.here.element_size()

    def mine(self, me: int) -> list[int]:
        return [k for k, owner in enumerate(self.owners) if owner == me]


def owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each matrix: the most expensive first, each to the rank that has the least so far."""
    loads, made = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = min(range(ranks), key=loads.__getitem__)
        made[i], loads[rank] = rank, loads[rank] + costs[i]
    return made


def to_owners(group: Any, several: Sequence[Matrices]) -> dict[int, Tensor]:
    """Sends the parts of matrices to their owners, in one all-to-all. Of replicas only the owner's own sends.

    Args:
        group: the process group, whose ranks all call this with the same matrices in the same order.

    Returns:
        The whole matrices that this rank owns, [k, rows, columns], by their number in `several`.
    """
    me, ranks = _place(group)
    sent: list[list[Tensor]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    whole: dict[int, Tensor] = {}
    for i, one in enumerate(several):
        for part, owner in zip(one.here, one.owners, strict=True):
            if one.boxes.of_one_replica(me, owner):
                sent[owner].append(part)
        count = len(one.mine(me))
        if count:
            whole[i] = one.here.new_empty((count, *one.shape))
            for rank in _holders(one, me):
                sizes[rank] += count * one.bytes_of(rank)
    received = _all_to_all(group, sent, sizes, several[0].here)
    at = [0] * ranks
    for i, made in whole.items():
        for rank in _holders(several[i], me):
            (top, bottom), (left, right) = several[i].boxes.of[rank]
            size = len(made) * several[i].bytes_of(rank)
            values = received[rank][at[rank] : at[rank] + size].view(made.dtype)
            made[:, top:bottom, left:right] = values.view(len(made), bottom - top, right - left)
            at[rank] += size
    return whole


def from_owners(group: Any, several: Sequence[Matrices], whole: dict[int, Tensor]) -> None:
    """Sends the parts of whole matrices to all ranks that have them, in one all-to-all, and writes them to `here`."""
    me, ranks = _place(group)
    sent: list[list[Tensor]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for i, one in enumerate(several):
        if i in whole:
            for rank, ((top, bottom), (left, right)) in enumerate(one.boxes.of):
                sent[rank].append(whole[i][:, top:bottom, left:right])
        for owner in one.owners:
            sizes[owner] += one.bytes_of(me)
    received = _all_to_all(group, sent, sizes, several[0].here)
    at = [0] * ranks
    for one in several:
        size = one.bytes_of(me)
        for part, owner in zip(one.here, one.owners, strict=True):
            values = received[owner][at[owner] : at[owner] + size]
            part.copy_(values.view(part.dtype).view(part.shape))
            at[owner] += size


def _place(group: Any) -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)


def _holders(one: Matrices, owner: int) -> Iterator[int]:
    """The ranks that send parts to an owner."""
    for rank in range(len(one.boxes.of)):
        if one.boxes.of_one_replica(rank, owner):
            yield rank


def _all_to_all(
    group: Any, sent: Sequence[Sequence[Tensor]], sizes: Sequence[int], like: Tensor
) -> Sequence[Tensor]:
    """Sends tensors to each rank. Returns the bytes from each rank, of the given sizes."""
    import torch.distributed as dist

    flat = [[t.contiguous().view(-1).view(torch.uint8) for t in to if t.numel()] for to in sent]
    counts = [sum(t.numel() for t in to) for to in flat]
    empty = like.new_empty(0, dtype=torch.uint8)
    joined = torch.cat([empty, *(t for to in flat for t in to)])
    received = like.new_empty(sum(sizes), dtype=torch.uint8)
    dist.all_to_all_single(received, joined, list(sizes), counts, group=group)
    return received.split(list(sizes))
