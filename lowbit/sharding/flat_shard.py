"""Flat shards: the parts of original parameters in what FSDP1 (FullyShardedDataParallel) flattens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lowbit.sharding.part import Part


class Flat:
    """The sharding of one flattened parameter of FSDP1: rank r of `group` has elements [r * size, (r + 1) * size)."""

    def __init__(self, group: Any, rank: int, ranks: int, size: int) -> None:
        self.group, self.rank, self.ranks, self.size = group, rank, ranks, size


def flat_of(group: Any, size: int) -> Flat:
    """The sharding of a flattened parameter over a process group, `size` elements on each rank."""
    import torch.distributed as dist

    return Flat(group, dist.get_rank(group), dist.get_world_size(group), size)


# Flat shard -> its Flat, set by lowbit.fsdp1.bind.
flats: Any = WeakIdKeyDictionary()


class FlatShard:
    """The local part of an original parameter inside a flattened one. It takes a parameter's place in layout and step.

    The part is the rows that the shard touches. State has room for all their elements, although the first `front` of
    the first row and the last `back` of the last row lie on other ranks.
    """

    is_meta = False

    def __init__(
        self,
        owner: Tensor,
        name: str,
        shape: Sequence[int],
        flat: Flat,
        begin: int,
        alone: bool,
        also: Sequence[str] = (),
    ) -> None:
        """
        Args:
            owner: the tensor the optimizer was given: this parameter (`alone`) or the flattened one.
            begin: the index of the parameter's first element in the flattened one.
            also: further names of a tied parameter.
        """
        self.owner, self.name, self.flat, self.begin, self.alone = owner, name, flat, begin, alone
        self.also = tuple(also)
        self.shape = torch.Size(shape)
        self.numel, self.cols = math.prod(shape), math.prod(shape[1:])
        self.rows = [self.rows_of(rank) for rank in range(flat.ranks)]
        own, end = self.elements(flat.rank)
        first, last = self.rows[flat.rank]
        front, back = (own - first * self.cols, last * self.cols - end) if end > own else (0, 0)
        one = (last - first, *shape[1:]) if shape else ()
        self.part = Part(
            tuple(shape), one, (first, *(0,) * (len(shape) - 1)) if shape else (),
            ((0, flat.group),) if flat.ranks > 1 else (), front=front, back=back,
        )  # fmt: skip

    def elements(self, rank: int) -> tuple[int, int]:
        """The parameter's elements on a rank, [begin, end)."""
        at = rank * self.flat.size - self.begin
        begin = min(max(at, 0), self.numel)
        return begin, min(max(at + self.flat.size, begin), self.numel)

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
        at = self.begin - self.flat.rank * self.flat.size
        return whole[max(at + begin, 0) : max(at + end, 0)]

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
