"""Flat shards: the parts of original parameters in vectors that a wrapper flattened them into,
such as FSDP1's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lowbit.sharding.part import Part


class Flat:
    """The process group whose ranks together hold a flattened parameter once,
    and this rank's number in it.
    """

    def __init__(self, group: Any, rank: int, ranks: int) -> None:
        self.group, self.rank, self.ranks = group, rank, ranks


def flat_of(group: Any) -> Flat:
    """This rank's place in a process group; None is that of all ranks."""
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    return Flat(group, dist.get_rank(group), dist.get_world_size(group))


# Flat shard -> its Flat, set by lowbit.flat.bind and lowbit.fsdp1.bind.
flats: Any = WeakIdKeyDictionary()


class FlatShard:
    """The local part of an original parameter inside a flattened one.
    It takes a parameter's place in layout and step.

    The part is the rows that the shard touches. State has room for all their elements, although the
    first `front` of the first row and the last `back` of the last row lie on other ranks.
    """

    is_meta = False

    def __init__(
        self,
        owner: Tensor,
        name: str,
        shape: Sequence[int],
        flat: Flat,
        ranges: Sequence[tuple[int, int]],
        start: int,
        alone: bool,
        also: Sequence[str] = (),
    ) -> None:
        """
        Args:
            owner: the tensor the optimizer was given: this parameter (`alone`) or the flattened
                one.
            ranges: the parameter's elements on each rank of the group, [begin, end).
            start: the index in the owner of the first element here.
            also: further names of a tied parameter.
        """
        self.owner, self.name, self.flat, self.start, self.alone = owner, name, flat, start, alone
        self.also = tuple(also)
        self.shape = torch.Size(shape)
        self.numel, self.cols = math.prod(shape), math.prod(shape[1:])
        self.ranges = [(begin, end) if end > begin else (0, 0) for begin, end in ranges]
        self.rows = [self.rows_of(rank) for rank in range(flat.ranks)]
        own, end = self.elements(flat.rank)
        first, last = self.rows[flat.rank]
        front, back = (own - first * self.cols, last * self.cols - end) if end > own else (0, 0)
        if not shape and end == own:
            front = 1  # state has room for the number, which another rank has
        one = (last - first, *shape[1:]) if shape else ()
        self.part = Part(
            tuple(shape),
            one,
            (first, *(0,) * (len(shape) - 1)) if shape else (),
            ((0, flat.group),) if flat.ranks > 1 else (),
            front=front,
            back=back,
        )

    def elements(self, rank: int) -> tuple[int, int]:
        """The parameter's elements on a rank, [begin, end)."""
        return self.ranges[rank]

    def rows_of(self, rank: int) -> tuple[int, int]:
        """The rows of which a rank has elements, [first, last); empty if it has none."""
        begin, end = self.elements(rank)
        if begin == end:
            return (0, 0)
        return begin // self.cols, -(-end // self.cols)

    @property
    def cut_rows(self) -> list[int]:
        """The rows that are split between ranks, in order."""
        ends = {self.elements(rank)[1] for rank in range(self.flat.ranks)}
        return sorted(end // self.cols for end in ends if end < self.numel and end % self.cols)

    @property
    def holding_ranks(self) -> list[int]:
        """The ranks that have elements of this parameter."""
        return [rank for rank, (first, last) in enumerate(self.rows) if last > first]

    def here(self, whole: Tensor) -> Tensor:
        """The elements of this shard in a tensor shaped like its owner, as one dimension."""
        whole = whole.detach().reshape(-1)
        if self.alone:
            return whole
        begin, end = self.elements(self.flat.rank)
        return whole[self.start : self.start + end - begin]

    @property
    def value(self) -> Tensor:
        """The local elements in one dimension: a view, so writes change the parameter."""
        return self.here(self.owner)

    @property
    def grad(self) -> Tensor | None:
        return None if self.owner.grad is None else self.here(self.owner.grad)

    @property
    def dtype(self) -> torch.dtype:
        return self.owner.dtype

    @property
    def requires_grad(self) -> bool:
        return self.owner.requires_grad


def is_flat(p: Tensor) -> bool:
    """Whether p is a flat shard, or a flattened parameter, of FSDP1 (FullyShardedDataParallel)."""
    return bool(getattr(p, "_fsdp_flattened", False) or getattr(p, "_is_flat_param", False))
