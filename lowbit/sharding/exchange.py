"""Matrices whose parts travel to the ranks that own them, and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    rows: Tensor | None = None  # float32 [n, rows]: numbers of rows that travel with them

    def bytes_of(self, rank: int) -> int:
        return self.boxes.numel(rank) * self.here.element_size()

    def bytes_of_rows(self, rank: int) -> int:
        top, bottom = self.boxes.of[rank][0]
        return 0 if self.rows is None else (bottom - top) * self.rows.element_size()

    def sends_rows(self, rank: int) -> bool:
        """Of the ranks that have parts of the same rows, the one with the first column does."""
        return self.boxes.of[rank][1][0] == 0

    def mine(self, me: int) -> list[int]:
        return [k for k, owner in enumerate(self.owners) if owner == me]


class Whole(NamedTuple):
    """The matrices that a rank owns."""

    matrices: Tensor  # [k, rows, columns]
    rows: Tensor | None  # [k, rows]


def owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each matrix: the most expensive first,
    each to the rank that has the least so far.
    """
    loads, made = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = min(range(ranks), key=loads.__getitem__)
        made[i], loads[rank] = rank, loads[rank] + costs[i]
    return made


def to_owners(group: Any, several: Sequence[Matrices]) -> Callable[[], dict[int, Whole]]:
    """Sends the parts of matrices to their owners, in one all-to-all.
    Of replicas only the owner's own sends.

    Args:
        group: the process group, whose ranks all call this with the same matrices in the same
            order.

    Returns:
        What waits for the parts, and returns what this rank owns, by its number in `several`.
    """
    me, ranks = _place(group)
    sent: list[list[Tensor]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    whole: dict[int, Whole] = {}
    for i, one in enumerate(several):
        for k, owner in enumerate(one.owners):
            if one.boxes.of_one_replica(me, owner):
                sent[owner].append(one.here[k])
                if one.rows is not None and one.sends_rows(me):
                    sent[owner].append(one.rows[k])
        count = len(one.mine(me))
        if count:
            rows = None if one.rows is None else one.rows.new_empty(count, one.shape[0])
            whole[i] = Whole(one.here.new_empty((count, *one.shape)), rows)
            for rank in _holders(one, me):
                with_rows = one.bytes_of_rows(rank) if one.sends_rows(rank) else 0
                sizes[rank] += count * (one.bytes_of(rank) + with_rows)
    arrived = _all_to_all(group, sent, sizes, several[0].here)

    def read() -> dict[int, Whole]:
        received = [_Reader(part) for part in arrived()]
        for i, (matrices, rows) in whole.items():
            for k in range(len(matrices)):
                for rank in _holders(several[i], me):
                    (top, bottom), (left, right) = several[i].boxes.of[rank]
                    received[rank].read(matrices[k, top:bottom, left:right])
                    if rows is not None and several[i].sends_rows(rank):
                        received[rank].read(rows[k, top:bottom])
        return whole

    return read


def from_owners(
    group: Any, several: Sequence[Matrices], whole: dict[int, Whole]
) -> Callable[[], None]:
    """Sends the parts of whole matrices to all ranks that have them, in one all-to-all.

    Returns:
        What waits for the parts, and writes them to `here` and `rows`.
    """
    me, ranks = _place(group)
    sent: list[list[Tensor]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for i, one in enumerate(several):
        for k in range(len(one.mine(me))):
            matrices, rows = whole[i]
            for rank, ((top, bottom), (left, right)) in enumerate(one.boxes.of):
                sent[rank].append(matrices[k, top:bottom, left:right])
                if rows is not None:
                    sent[rank].append(rows[k, top:bottom])
        for owner in one.owners:
            sizes[owner] += one.bytes_of(me) + one.bytes_of_rows(me)
    arrived = _all_to_all(group, sent, sizes, several[0].here)

    def read() -> None:
        received = [_Reader(part) for part in arrived()]
        for one in several:
            for k, owner in enumerate(one.owners):
                received[owner].read(one.here[k])
                if one.rows is not None:
                    received[owner].read(one.rows[k])

    return read


class _Reader:
    """Reads tensors from bytes, one after the other."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.at = data, 0

    def read(self, into: Tensor) -> None:
        values = self.data[self.at : self.at + into.nbytes]
        if values.storage_offset() % into.element_size():
            values = values.clone()  # a view needs an aligned offset
        into.copy_(values.view(into.dtype).view(into.shape))
        self.at += values.numel()


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
) -> Callable[[], Sequence[Tensor]]:
    """Sends tensors to each rank. Returns what waits for the bytes from each rank,
    of the given sizes.
    """
    import torch.distributed as dist

    flat = [[t.contiguous().view(-1).view(torch.uint8) for t in to if t.numel()] for to in sent]
    counts = [sum(t.numel() for t in to) for to in flat]
    empty = like.new_empty(0, dtype=torch.uint8)
    joined = torch.cat([empty, *(t for to in flat for t in to)])
    received = like.new_empty(sum(sizes), dtype=torch.uint8)
    work = dist.all_to_all_single(received, joined, list(sizes), counts, group=group, async_op=True)

    def wait(_sent: Tensor = joined) -> Sequence[Tensor]:  # which must stay until then
        work.wait()  # with NCCL it is the stream that waits
        return received.split(list(sizes))

    return wait
