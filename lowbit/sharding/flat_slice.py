"""Flat slices: what a caller says about the parts of parameters in an optimizer's vectors,
checked and made flat shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.sharding.agreement import first_difference
from lowbit.sharding.collective import gathered_objects
from lowbit.sharding.flat_shard import Flat, FlatShard, flat_of
from lowbit.sharding.tensor import is_dtensor

Range = tuple[int, int]  # offset, length


@dataclass(frozen=True, eq=False)
class FlatSlice:
    """The elements of a parameter that one tensor of an optimizer holds on this rank.

    Args:
        tensor: the tensor in the optimizer's groups.
        name: the parameter's name, the same on all ranks. Options and random bits go by it.
        shape: the shape of the whole parameter.
        offset: the index of the first element here in the flattened parameter.
        length: the number of elements here; 0 if this rank has none.
        start: the index of that element in `tensor`, a contiguous vector. None (default) says that
            the tensor has these elements and no others.
        group: the process group whose ranks together hold each element once.
            None (default) means all ranks.
        ranges: (offset, length) on every rank of the group, in its order, if the caller knows them.
            None (default) makes ranks tell each other, which is a collective. One range says that
            this rank holds the parameter by itself.
        also: further names of a tied parameter; none by default.
    """

    tensor: Tensor
    name: str
    shape: Sequence[int]
    offset: int
    length: int
    start: int | None = None
    group: Any = None
    ranges: Sequence[Range] | None = None
    also: Sequence[str] = ()

    @property
    def flat(self) -> Flat:
        """The ranks that hold the parameter, where the caller knows their ranges."""
        return self._flat(self.ranges or ())

    def _flat(self, ranges: Sequence[Range]) -> Flat:
        return Flat(None, 0, 1) if len(ranges) == 1 else flat_of(self.group)

    def shard(self, ranges: Sequence[Range]) -> FlatShard:
        """The flat shard, for the ranges of all ranks."""
        flat = self._flat(ranges)
        ends = [(offset, offset + length) for offset, length in ranges]
        alone = self.start is None
        return FlatShard(
            self.tensor, self.name, self.shape, flat, ends, self.start or 0, alone, self.also
        )


def sections(begin: int, numel: int, size: int, ranks: int) -> list[Range]:
    """The ranges of a parameter in a vector that is cut into equal sections, one for each rank.

    Args:
        begin: the index of the parameter's first element in the whole vector.
        size: the length of a section.
    """
    made = []
    for rank in range(ranks):
        at = rank * size - begin
        first = min(max(at, 0), numel)
        made.append((first, min(max(at + size, first), numel) - first))
    return made


def section(
    tensor: Tensor, name: str, shape: Sequence[int], begin: int, size: int, group: Any, at: int = 0
) -> FlatSlice:
    """The slice of a parameter in a vector of which each rank of a group has one of equal sections.

    Args:
        begin: the index of the parameter's first element in the whole vector.
        size: the length of a section.
        at: where this rank's section begins in `tensor`.
    """
    import torch.distributed as dist

    rank = dist.get_rank(group)
    ranges = sections(begin, math.prod(shape), size, dist.get_world_size(group))
    offset, length = ranges[rank]
    start = at + max(begin - rank * size, 0) if length else 0
    return FlatSlice(tensor, name, shape, offset, length, start, group, ranges)


def flat_shards(slices: Sequence[FlatSlice], wrong: str | None) -> list[FlatShard]:
    """The flat shards of slices. A collective of each group of several ranks.

    Args:
        wrong: what the caller found wrong already, so that every rank of a collective raises.

    Raises:
        ValueError: the slices do not fit their tensors, parameters or one another.
    """
    wrong = wrong or _unfit(slices)
    ranges = {id(each): each.ranges for each in slices}
    # A rank that has no slices, which is wrong, tells all ranks so.
    asking: dict[Any, list[FlatSlice]] = {} if slices else {None: []}
    for each in slices:
        if each.ranges is None or len(each.ranges) > 1:
            asking.setdefault(each.group, []).append(each)
    for group, several in asking.items():
        told = _told(group, several, wrong)
        wrong = wrong or next((error for error, _ in told if error), None) or _differing(told)
        if not wrong:
            for i, each in enumerate(several):
                if each.ranges is None:
                    ranges[id(each)] = [listed[i][2] for _, listed in told]
    for each in () if wrong else slices:
        if wrong := _uncovered(each.name, math.prod(each.shape), ranges[id(each)] or ()):
            break
    if wrong:
        raise ValueError(wrong)
    return [each.shard(ranges[id(each)] or ()) for each in slices]


Said = tuple[str, tuple[int, ...], Range]  # name, shape, range


def _told(
    group: Any, slices: Iterable[FlatSlice], wrong: str | None
) -> list[tuple[str | None, list[Said]]]:
    """What every rank of a group says about its slices."""
    mine = [(each.name, tuple(each.shape), (each.offset, each.length)) for each in slices]
    return gathered_objects((wrong, mine), group)


def _unfit(slices: Iterable[FlatSlice]) -> str | None:
    """What is wrong with the slices of this rank by themselves; None if nothing is."""
    inside: dict[int, list[tuple[int, int, str]]] = {}
    groups: dict[int, Any] = {}
    names: set[str] = set()
    for each in slices:
        what = f"flat slice {each.name!r}"
        if is_dtensor(each.tensor) or not isinstance(each.tensor, torch.Tensor):
            return (
                f"{what} is of a {type(each.tensor).__name__}, which knows its placement: bind "
                "only plain tensors"
            )
        numel, held = math.prod(each.shape), each.tensor.numel()
        if each.name in names:
            return (
                f"two flat slices are named {each.name!r}: give one slice for each parameter, "
                "under its full name"
            )
        names.add(each.name)
        if min(each.offset, each.length) < 0 or each.offset + each.length > numel:
            return (
                f"{what} has elements [{each.offset}, {each.offset + each.length}) of a parameter "
                f"of shape {tuple(each.shape)}, which has {numel}"
            )
        if not each.tensor.is_contiguous():
            return (
                f"{what} lies in a tensor of strides {each.tensor.stride()}, of which it needs a "
                "view: make it contiguous"
            )
        if each.start is None:
            if held != each.length:
                return (
                    f"{what} has {each.length} elements and its tensor {held}; pass start= if the "
                    "tensor holds more than this slice"
                )
            begin, end = 0, max(held, 1)
        else:
            begin, end = each.start, each.start + each.length
            if begin < 0 or end > held:
                return f"{what} lies in [{begin}, {end}) of its tensor, which has {held} elements"
        if each.ranges is not None and (wrong := _contradicted(each, each.ranges)):
            return f"{what} {wrong}"
        if groups.setdefault(id(each.tensor), each.group) is not each.group:
            return (
                f"{what} has another process group than its tensor's other slices: keep them in "
                "tensors of their own"
            )
        inside.setdefault(id(each.tensor), []).append((begin, end, each.name))
    for several in inside.values():
        several.sort(key=lambda one: one[:2])
        for (_, end, name), (begin, _, other) in itertools.pairwise(several):
            if begin < end:
                return (
                    f"flat slices {name!r} and {other!r} overlap in their tensor: the first ends "
                    f"at {end}, the second begins at {begin}"
                )
    return None


def _contradicted(each: FlatSlice, ranges: Sequence[Range]) -> str | None:
    """What is wrong with ranges that the caller gave; None if nothing is."""
    import torch.distributed as dist

    group = dist.is_initialized() and len(ranges) != 1  # one range: by itself, whatever the group
    ranks, rank = (dist.get_world_size(each.group), dist.get_rank(each.group)) if group else (1, 0)
    if len(ranges) != ranks:
        return (
            f"has ranges of {len(ranges)} ranks, and its group has {ranks}: give one for each, or "
            "None to let ranks ask each other"
        )
    if tuple(ranges[rank]) != (each.offset, each.length):
        return (
            f"has offset and length {(each.offset, each.length)}, and its ranges say "
            f"{tuple(ranges[rank])} of this rank ({rank})"
        )
    return None


def _differing(told: Sequence[tuple[str | None, list[Said]]]) -> str | None:
    """What is wrong if ranks do not list the same parameters in the same order."""
    difference = first_difference([[item[:2] for item in each] for _, each in told])
    return difference and (
        f"flat slice {difference}: pass the same names and shapes in the same order on every rank, "
        "with length=0 where a rank has none of a parameter"
    )


def _uncovered(name: str, numel: int, ranges: Sequence[Range]) -> str | None:
    """What is wrong if the ranks do not hold every element of a parameter once."""
    held = sorted((offset, length, rank) for rank, (offset, length) in enumerate(ranges) if length)
    end, before = 0, None
    for offset, length, rank in [*held, (numel, 0, None)]:
        if offset < end:
            return (
                f"flat slices of {name!r} overlap: ranks {before} and {rank} both hold element "
                f"{offset}; pass as group= the ranks that hold the parameter once, without replicas"
            )
        if offset > end:
            return (
                f"flat slices of {name!r} leave a gap: no rank holds its elements [{end}, {offset})"
            )
        end, before = offset + length, rank
    return None
