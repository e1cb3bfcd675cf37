"""Parameters in buckets that step one after the other,
so that a step holds copies of one bucket and not of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from lowbit.state.layout import Layout

BUCKET_NUMEL = 1 << 24  # local elements of a bucket; a larger parameter has one of its own

T = TypeVar("T")


def buckets(members: Iterable[T], numel: Callable[[T], int]) -> Iterator[list[T]]:
    """The members in their order, in lists of at most BUCKET_NUMEL elements together.

    Args:
        numel: the elements of one member,
            the same on every rank: the buckets' collectives must match.
    """
    bucket: list[T] = []
    held = 0
    for member in members:
        size = numel(member)
        if bucket and held + size > BUCKET_NUMEL:
            yield bucket
            bucket, held = [], 0
        bucket.append(member)
        held += size
    if bucket:
        yield bucket


def numel_of_rank(lay: Layout) -> int:
    """The elements of the rank that has most of them, which all ranks know: where experts are fewer
    than ranks, one rank has all of one.
    """
    shape = list(lay.part.shape)
    for dim, group in lay.part.cuts:
        shape[dim] = -(-shape[dim] // group.size())
    return math.prod(shape)
