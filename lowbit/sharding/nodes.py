"""The way of addends over a cluster: inside each node first, then between the nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lowbit.sharding.addends import exchange_rows

Add = Callable[[Tensor], Tensor]  # rows of addends to the words of their sums


class Nodes(NamedTuple):
    """The process groups of a rank: its node's, and that of the ranks with its number in every
    node.
    """

    here: Any
    across: Any


def nodes_of(group: Any, ranks_per_node: int) -> Nodes | None:
    """The nodes that a group lies on; None if it lies on one, or has one rank on each.

    Every rank of the group calls it at the same time.

    Raises:
        ValueError: the nodes have different numbers of the group's ranks, or a node's ranks do not
            follow each other in the group.
    """
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
    if len(nodes) == 1 or sizes == {1}:
        return None
    me = dist.get_rank()
    here = next(node for node in nodes.values() if me in node)
    across = [node[here.index(me)] for node in nodes.values()]
    made = [dist.new_group(of, use_local_synchronization=True) for of in (here, across)]
    return Nodes(*made)


class Exchange:
    """Sends the addends of a group to the ranks that add them up.

    With `ranks_per_node`, a node's ranks add up what they have for each other node before it leaves
    the node, as words of 8 bytes. Each rank then sends one message to every other node in the place
    of ranks_per_node, and with 8 ranks a node half the bytes of bfloat16 addends.
    """

    def __init__(self, group: Any, ranks_per_node: int | None, add: Add) -> None:
        self._group, self._add = group, add
        self._nodes = None if ranks_per_node is None else nodes_of(group, ranks_per_node)

    def __call__(self, rows: Tensor) -> Tensor:
        """Sends row r of [ranks, n] to rank r of the group.

        Returns:
            The rows that arrive: one of each rank, or of each node. The latter are words.
        """
        if self._nodes is None:
            return exchange_rows(rows, self._group)
        here, across = self._nodes
        # Row r is for rank r: number r % size of node r // size.
        width, size = rows.shape[1], here.size()
        to_numbers = rows.view(-1, size, width).transpose(0, 1).reshape(size, -1)
        words = self._add(exchange_rows(to_numbers, here))
        return exchange_rows(words.view(-1, width), across)
