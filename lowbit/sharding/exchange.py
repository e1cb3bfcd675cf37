"""Rows of matrices that travel to the ranks that own the matrices, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The local rows of a matrix."""

    here: Tensor  # contiguous, [rows, columns]
    counts: tuple[int, ...]  # rows of each rank of the process group
    owner: int  # the rank of the group that gets all of them

    def bytes_of(self, rank: int) -> int:
        return self.counts[rank] * self.here.shape[1] * self.here.element_size()


def owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each matrix: the most expensive first, each to the rank that has the least so far."""
    loads, made = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = min(range(ranks), key=loads.__getitem__)
        made[i], loads[rank] = rank, loads[rank] + costs[i]
    return made


def to_owners(group: Any, matrices: Sequence[Rows]) -> dict[int, Tensor]:
    """Sends the rows of matrices to their owners, in one all-to-all.

    Args:
        group: the process group, whose ranks all call this with the same matrices in the same order.

    Returns:
        The whole matrices that this rank owns, by their numbers among `matrices`.
    """
    me, ranks = _place(group)
    mine = [i for i, one in enumerate(matrices) if one.owner == me]
    sent = [_flat(one.here for one in matrices if one.owner == rank) for rank in range(ranks)]
    sizes = [sum(matrices[i].bytes_of(rank) for i in mine) for rank in range(ranks)]
    received = _all_to_all(group, sent, sizes, matrices[0].here)
    parts = [part.split([matrices[i].bytes_of(rank) for i in mine]) for rank, part in enumerate(received)]  # fmt: skip
    return {
        i: torch.cat([of_rank[k] for of_rank in parts])
        .view(matrices[i].here.dtype)
        .view(-1, matrices[i].here.shape[1])
        for k, i in enumerate(mine)
    }


def from_owners(group: Any, matrices: Sequence[Rows], whole: dict[int, Tensor]) -> None:
    """Sends the rows of whole matrices back to the ranks that have them, in one all-to-all, and writes them to `here`."""
    me, ranks = _place(group)
    sent: list[list[Tensor]] = [[] for _ in range(ranks)]
    for i, matrix in whole.items():
        for rank, rows in enumerate(matrix.split(matrices[i].counts)):
            sent[rank].append(rows)
    of = [[one for one in matrices if one.owner == rank] for rank in range(ranks)]
    sizes = [sum(one.bytes_of(me) for one in several) for several in of]
    received = _all_to_all(group, [_flat(parts) for parts in sent], sizes, matrices[0].here)
    for several, part in zip(of, received, strict=True):
        for one, values in zip(several, part.split([o.bytes_of(me) for o in several]), strict=True):
            one.here.copy_(values.view(one.here.dtype).view(one.here.shape))


def _place(group: Any) -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)


def _flat(tensors: Any) -> Tensor | None:
    """The bytes of all of them."""
    made = [t.contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel()]
    return torch.cat(made) if made else None


def _all_to_all(
    group: Any, sent: Sequence[Tensor | None], sizes: Sequence[int], like: Tensor
) -> Sequence[Tensor]:
    """Sends bytes to each rank. Returns those from each rank, of the given sizes."""
    import torch.distributed as dist

    empty = like.new_empty(0, dtype=torch.uint8)
    parts = [empty if part is None else part for part in sent]
    received = like.new_empty(sum(sizes), dtype=torch.uint8)
    counts = [part.numel() for part in parts]
    dist.all_to_all_single(received, torch.cat(parts), list(sizes), counts, group=group)
    return received.split(list(sizes))
