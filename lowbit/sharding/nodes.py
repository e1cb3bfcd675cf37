"""The way of addends over a cluster: inside each node first, then between the nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.sharding.addends import exchange_rows

Add = Callable[[Tensor], Tensor]  # rows of addends to the words of their sums


class Exchange:
    """Sends the addends of a group to the ranks that add them up.

    With `ranks_per_node`, a node's ranks add up what they have for each other node before it leaves
    the node, as words of 8 bytes. Each rank then sends one message to every other node in the place
    of ranks_per_node, and with 8 ranks a node half the bytes of bfloat16 addends. Both ways are
    collectives of the whole group, in which a rank sends nothing to most others: smaller groups
    would have to be made by all ranks of the job at once.

    Raises:
        ValueError: the nodes have different numbers of the group's ranks, or a node's ranks do not
            follow each other in the group.
    """

    def __init__(self, group: Any, ranks_per_node: int | None, add: Add) -> None:
        self._group, self._add = group, add
        self._size = 1 if ranks_per_node is None else ranks_of_node(group, ranks_per_node)

    def __call__(self, rows: Tensor) -> Tensor:
        """Sends row r of [ranks, n] to rank r of the group.

        Returns:
            The rows that arrive: one of each rank, or of each node. The latter are words.
        """
        ranks, width = rows.shape
        if self._size == 1:
            return exchange_rows(rows, self._group)
        import torch.distributed as dist

        node, number = divmod(dist.get_rank(self._group), self._size)
        # Row r is for rank r: number r % size of node r // size.
        to_numbers = rows.view(-1, self._size, width).transpose(0, 1).reshape(self._size, -1)
        here = [r // self._size == node for r in range(ranks)]
        words = self._add(self._sent(to_numbers, here))
        across = [r % self._size == number for r in range(ranks)]
        return self._sent(words.view(-1, width), across)

    def _sent(self, rows: Tensor, to: list[bool]) -> Tensor:
        """Sends the rows to the ranks that `to` names, in order. Returns the rows that arrive from
        the same.
        """
        import torch.distributed as dist

        sizes = [rows.shape[1] * asked for asked in to]
        arrived = torch.empty_like(rows)
        dist.all_to_all_single(arrived.view(-1), rows.reshape(-1), sizes, sizes, group=self._group)
        return arrived


def ranks_of_node(group: Any, ranks_per_node: int) -> int:
    """How many ranks of a group each node has; 1 also if all of them are on one."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    sizes = {len(node) for node in nodes.values()}
    if len(sizes) > 1 or [r for node in nodes.values() for r in node] != ranks:
        raise ValueError(
            f"with ranks_per_node={ranks_per_node}, the ranks {ranks} are not the same number on "
            "each node, one node after another; leave out ranks_per_node, or give the number of "
            "ranks that each node has"
        )
    return 1 if len(nodes) == 1 else sizes.pop()
