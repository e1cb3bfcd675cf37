"""Parameters that share memory, which step one after the other, as torch's do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowbit import sharding

# A parameter, with the number of its group.
Numbered = tuple[int, Any]


def in_turn(params: Sequence[Numbered]) -> list[Sequence[Numbered]]:
    """The parameters in lists that step one after the other, each list in one call of an operator.

    Parameters with memory of their own are all in one list. Others, such as a weight that was tied
    by `.data` or is listed twice, come in their order: one call would step both from the same
    values, and one of the steps would be lost. Columns of one matrix count as sharing it, too.

    A sharded parameter shares memory with itself alone, listed twice: all ranks have to decide
    alike, whatever shards they have.
    """
    if torch.compiler.is_compiling():
        return [params]
    turns = _turns([_extent(p) for _, p in params]) | _listed_again(params)
    if not turns:
        return [params]
    made: list[list[Numbered]] = [[] for _ in range(1 + max(turns.values()))]
    for at, one in enumerate(params):
        made[turns.get(at, 0)].append(one)
    return list(made)


def _extent(p: Any) -> tuple[int, int]:
    """The addresses [begin, end) between which a parameter's values lie, beside others if it is a
    view with gaps. From 0 on for shards, which ranks step together, and without values in memory.
    """
    if sharding.is_sharded(p) or isinstance(p, FakeTensor) or p.is_meta:
        return 0, 0
    if p.layout != torch.strided or not p.numel():
        return 0, 0
    begin = p.data_ptr()
    if p.is_contiguous():
        return begin, begin + p.nbytes
    last = sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True))
    return begin, begin + (last + 1) * p.element_size()


def _listed_again(params: Sequence[Numbered]) -> dict[int, int]:
    """The turns of sharded parameters that stand in the list before, by their places in it."""
    turns: dict[int, int] = {}
    listed: dict[int, int] = {}
    for at, (_, p) in enumerate(params):
        if sharding.is_sharded(p):
            if again := listed.get(id(p), 0):
                turns[at] = again
            listed[id(p)] = again + 1
    return turns


def _turns(extents: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The turns, from 0, of the extents that overlap others, by their places in the list."""
    turns: dict[int, int] = {}
    together: list[int] = []  # extents that follow one another without a gap
    reach = 0
    for begin, end, at in sorted((*extent, at) for at, extent in enumerate(extents)):
        if begin == 0:
            continue
        if begin >= reach:
            _take_turns(together, extents, turns)
            together = []
        together.append(at)
        reach = max(reach, end)
    _take_turns(together, extents, turns)
    return turns


def _take_turns(
    together: list[int], extents: Sequence[tuple[int, int]], turns: dict[int, int]
) -> None:
    """Gives each of these extents the turn after those of the earlier ones that it overlaps."""
    if len(together) < 2:
        return
    together.sort()
    for i, at in enumerate(together):
        begin, end = extents[at]
        before = [
            turns[other]
            for other in together[:i]
            if begin < extents[other][1] and extents[other][0] < end
        ]
        turns[at] = 1 + max(before, default=-1)
