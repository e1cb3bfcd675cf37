"""The addends of gradients on their way to the ranks that add them up, in their own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def exchange_rows(rows: Tensor, group: Any) -> Tensor:
    """Sends row r of [ranks, n] to rank r of the group. Returns the rows that arrive,
    in rank order.
    """
    import torch.distributed as dist

    if len(rows) == 1:
        return rows
    arrived = torch.empty_like(rows)
    dist.all_to_all_single(arrived, rows, group=group)
    return arrived


def gather(mine: Tensor, group: Any) -> Tensor:
    """The vectors of all ranks, [ranks, n]."""
    import torch.distributed as dist

    if dist.get_world_size(group) == 1:
        return mine.view(1, -1)
    joined = mine.new_empty(dist.get_world_size(group) * mine.numel())
    dist.all_gather_into_tensor(joined, mine, group=group)
    return joined.view(-1, mine.numel())


def size_and_rank(groups: Sequence[Any]) -> tuple[int, int]:
    """The number of ranks in a grid of process groups, and this rank's number in it.
    The last group varies fastest.
    """
    import torch.distributed as dist

    size, rank = 1, 0
    for group in groups:
        ranks = dist.get_world_size(group)
        size, rank = size * ranks, rank * ranks + dist.get_rank(group)
    return size, rank


class Chunks:
    """Vectors that are cut into one chunk for each rank of a group, and packed side by side.

    Every rank owns the same chunk of a vector each time, whatever it is packed with.
    """

    def __init__(self, sizes: Sequence[int], ranks: int) -> None:
        self.sizes, self.ranks = sizes, ranks
        self.widths = [-(-n // ranks) for n in sizes]

    def pack(self, vectors: Sequence[Tensor]) -> Tensor:
        """[ranks, sum of the widths], from vectors of one dtype.
        The last chunks are padded with zeros.
        """
        pad = torch.nn.functional.pad
        return torch.cat(
            [
                pad(v.reshape(-1), (0, w * self.ranks - n)).view(self.ranks, w)
                for v, n, w in zip(vectors, self.sizes, self.widths, strict=True)
            ],
            dim=1,
        )

    def columns(self, packed: Tensor) -> Sequence[Tensor]:
        """The columns of each vector's chunk, of [rows, sum of the widths]."""
        return packed.split(self.widths, dim=-1)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """The vectors of which `packed` has all chunks."""
        return [c.reshape(-1)[:n] for c, n in zip(self.columns(packed), self.sizes, strict=True)]
