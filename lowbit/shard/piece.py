"""Pieces of the original parameters in what FSDP1 (FullyShardedDataParallel) flattened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lowbit.shard.part import Part


class Flat:
    """Where the shards of one flattened parameter of FSDP1 lie: rank r of `group` holds its elements [r * size, (r + 1) * size)."""

    def __init__(self, group: Any, rank: int, ranks: int, size: int) -> None:
        self.group, self.rank, self.ranks, self.size = group, rank, ranks, size


def flat_of(group: Any, size: int) -> Flat:
    """The shards of `size` elements over a process group."""
    import torch.distributed as dist

    return Flat(group, dist.get_rank(group), dist.get_world_size(group), size)


# Flat shard -> its Flat, once lowbit.fsdp1.bind has said it.
flats: Any = WeakIdKeyDictionary()


class Piece:
    """What is here of an original parameter that is part of a flattened one; it stands for a parameter where state is laid out and stepped.

    Its part is the rows that it touches: state has room for all of their elements, `front` of the first and `back` of the last row lie elsewhere.
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
            owner: what the optimizer was given: this very parameter (`alone`), or the flattened one.
            begin: the parameter's first element in the flattened one.
            also: its other names, where it is tied.
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
        """Those of the parameter that a rank holds, [begin, end)."""
        at = rank * self.flat.size - self.begin
        begin = min(max(at, 0), self.numel)
        return begin, min(max(at + self.flat.size, begin), self.numel)

    def rows_of(self, rank: int) -> tuple[int, int]:
        """The rows that a rank holds some of, [first, last); an empty run where it holds none."""
        begin, end = self.elements(rank)
        if begin == end:
            return (0, 0)
        return begin // self.cols, -(-end // self.cols)

    @property
    def cut_rows(self) -> list[int]:
        """Rows that several ranks hold, in order."""
        ends = {self.elements(rank)[1] for rank in range(self.flat.ranks)}
        return sorted(end // self.cols for end in ends if end < self.numel and end % self.cols)

    @property
    def holders(self) -> list[int]:
        """Ranks that hold some of it."""
        return [rank for rank, (first, last) in enumerate(self.rows) if last > first]

    def here(self, whole: Tensor) -> Tensor:
        """The elements of the piece in a tensor like its owner, in one dimension."""
        whole = whole.detach().reshape(-1)
        if self.alone:
            return whole
        begin, end = self.elements(self.flat.rank)
        at = self.begin - self.flat.rank * self.flat.size
        return whole[max(at + begin, 0) : max(at + end, 0)]

    @property
    def value(self) -> Tensor:
        """The elements that are here, in one dimension; writes to it are writes to the parameter."""
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
    """Whether p is a shard of what FSDP1 (FullyShardedDataParallel) flattened."""
    return bool(getattr(p, "_fsdp_flattened", False) or getattr(p, "_is_flat_param", False))
