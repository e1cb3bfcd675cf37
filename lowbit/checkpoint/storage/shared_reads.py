"""Boxes that several ranks of a load need: one of them reads, and the others receive.
What Reader does with a replica.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from lowbit.checkpoint.errors import CheckpointError

BUFFER = 64 << 20  # bytes that a rank sends in one round, and that it receives
OPEN = 256 << 20  # bytes of the boxes that are under way at a time, or one box


class Box(NamedTuple):
    """A box of a tensor of the checkpoint."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """Bytes [begin, end) of a box, row-major."""

    box: Box
    begin: int
    end: int


@dataclass
class Round:
    """What one rank sends and receives in one collective, by the other rank."""

    send: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    receive: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class Share:
    """What one rank reads for others, and receives from them."""

    rounds: list[Round]
    read: set[Box] = field(default_factory=set)
    received: set[Box] = field(default_factory=set)


class Place(NamedTuple):
    """Where a rank stands in the group that it could receive through."""

    rank: int
    ranks: int


class Told(NamedTuple):
    """What a rank tells the coordinator of a load: its place, where reads are shared, and which
    checkpoint it reads: the folder, and a digest of its metadata or "".
    """

    place: Place | None
    path: str
    digest: str


def check_same(ranks: Sequence[Any]) -> None:
    """Refuses a load whose ranks read different checkpoints: what one reads, others receive."""
    known = [(i, told) for i, told in enumerate(ranks) if isinstance(told, Told) and told.digest]
    for i, told in known[1:]:
        first, other = known[0]
        if told.digest != other.digest:
            raise CheckpointError(
                f"rank {first} loads {other.path} and rank {i} loads {told.path}, which are not "
                "the same checkpoint: let one rank choose it, and broadcast its path",
                code=4,
            )


def box_of(item: ReadItem) -> Box:
    """What an item of a plan reads."""
    inner = tuple(item.storage_offsets)
    start = tuple(item.storage_index.offset or (0,) * len(item.lengths))
    if len(start) != len(inner):
        raise ValueError(
            f"{item.storage_index.fqn}: {start} and {inner} must have the same number of dimensions"
        )
    offset = tuple(map(operator.add, start, inner)) if any(start) else inner
    return Box(item.storage_index.fqn, offset, tuple(item.lengths))


def place_in(group: dist.ProcessGroup | None) -> Place | None:
    """This rank's place; None where there is no group,
    or one that moves no memory of the host (NCCL alone).
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = group or dist.group.WORLD
    if group is None or torch.device("cpu") not in group._device_types:
        return None
    rank = dist.get_rank(group)  # -1: this rank is not in it
    return Place(rank, dist.get_world_size(group)) if rank >= 0 else None


def share(plans: Sequence[LoadPlan], nbytes: Callable[[Box], int]) -> list[Share] | None:
    """Who reads what, for the plans of all ranks of a group, each with its Told in `storage_data`.

    Args:
        nbytes: of a box.

    Returns:
        The share of each plan; None where nothing is needed twice,
        or the plans are not those of the whole group.
    """
    places: list[Any] = [getattr(plan.storage_data, "place", None) for plan in plans]
    if not all(isinstance(p, Place) for p in places):
        return None
    ranks = [p.rank for p in places]
    if any(p.ranks != len(plans) for p in places) or sorted(ranks) != list(range(len(plans))):
        return None
    holders, load = _holders(plans, ranks, nbytes)
    if holders is None:
        return None
    shared = {box: who for box, who in holders.items() if len(who) > 1 and nbytes(box) > 0}
    if not shared:
        return None
    for box, who in holders.items():
        if box not in shared:
            load[who[0]] += nbytes(box)
    shares = {rank: Share([]) for rank in ranks}
    at = dict.fromkeys(ranks, 0)  # the round that each rank fills
    sent, received = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    queues: dict[int, list[Box]] = {rank: [] for rank in ranks}
    for box in sorted(shared, key=lambda box: (-nbytes(box), box)):
        source = min(shared[box], key=lambda rank: (load[rank], rank))
        load[source] += nbytes(box)
        queues[source].append(box)
        shares[source].read.add(box)
        for rank in shared[box]:
            if rank != source:
                shares[rank].received.add(box)
    for source, piece in _turns(queues, shared, nbytes):
        others = [rank for rank in shared[piece.box] if rank != source]
        size = piece.end - piece.begin
        number = max(at[rank] for rank in shared[piece.box])
        full = at[source] == number and sent[source] + size * len(others) > BUFFER
        if full or any(at[r] == number and received[r] + size > BUFFER for r in others):
            number += 1
        for rank in shared[piece.box]:
            if at[rank] < number:
                at[rank], sent[rank], received[rank] = number, 0, 0
        sent[source] += size * len(others)
        for rank in others:
            received[rank] += size
            _round(shares[source], number).send[rank].append(piece)
            _round(shares[rank], number).receive[source].append(piece)
    last = max(at.values())  # all ranks take part in every round
    for one in shares.values():
        _round(one, last)
    return [shares[rank] for rank in ranks]


def _turns(
    queues: dict[int, list[Box]], shared: Mapping[Box, list[int]], nbytes: Callable[[Box], int]
) -> Iterator[tuple[int, Piece]]:
    """Pieces with the ranks that send them, one rank after the other,
    so that all send in the same rounds.

    A box that does not lie in its tensor as the file has it is whole in memory while it is under
    way, so OPEN limits these too.
    """
    queues = {rank: queue[::-1] for rank, queue in queues.items()}
    while any(queues.values()):
        turn: dict[int, Box] = {}
        under_way = 0
        for rank, queue in queues.items():
            if queue and (not turn or under_way + nbytes(queue[-1]) <= OPEN):
                under_way += nbytes(queue[-1])
                turn[rank] = queue.pop()
        for pieces in itertools.zip_longest(
            *(_pieces(box, nbytes(box), len(shared[box]) - 1) for box in turn.values())
        ):
            yield from ((rank, piece) for rank, piece in zip(turn, pieces, strict=True) if piece)


def _pieces(box: Box, total: int, others: int) -> Iterator[Piece]:
    """A box in pieces of which all others receive one in the same round."""
    step = max(1, BUFFER // others)
    return (Piece(box, begin, min(begin + step, total)) for begin in range(0, total, step))


def _holders(
    plans: Sequence[LoadPlan], ranks: Sequence[int], nbytes: Callable[[Box], int]
) -> tuple[dict[Box, list[int]] | None, dict[int, int]]:
    """The ranks that need each box that may be needed twice,
    and the bytes that each reads in any case. None: nothing is.
    """
    seen: set[Hashable] = set()
    # Tensors with an item that occurs twice; boxes of others are skipped.
    twice: set[str] = set()
    for plan in plans:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            index = item.storage_index
            key = (index.fqn, index.offset, tuple(item.storage_offsets), tuple(item.lengths))
            if key in seen:
                twice.add(index.fqn)
            seen.add(key)
    load = dict.fromkeys(ranks, 0)
    if not twice:
        return None, load
    holders: dict[Box, list[int]] = {}
    width: dict[str, int] = {}
    for rank, plan in zip(ranks, plans, strict=True):
        boxes: dict[Box, int] = defaultdict(int)
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                continue
            if name in twice:
                boxes[box_of(item)] += 1
                continue
            if name not in width:
                width[name] = nbytes(Box(name, (), ()))
            load[rank] += math.prod(item.lengths) * width[name]
        for box, count in boxes.items():
            if count == 1:
                holders.setdefault(box, []).append(rank)
            else:
                load[rank] += count * nbytes(box)
    return holders, load


def _round(one: Share, number: int) -> Round:
    while len(one.rounds) <= number:
        one.rounds.append(Round())
    return one.rounds[number]


OK, FAILED = 0, 1


def exchange(
    this: Round, memory: Mapping[Box, torch.Tensor] | None, group: dist.ProcessGroup | None
) -> tuple[list[tuple[Piece, torch.Tensor]], set[int]]:
    """One round: sends, and returns what came,
    and the ranks that could not read what they were to send.

    Args:
        memory: the bytes of each box that is sent; None where this rank has failed,
            which it tells the others.
    """
    ranks = dist.get_world_size(group)
    parts: list[torch.Tensor] = []
    out, into = [0] * ranks, [0] * ranks
    for rank in range(ranks):  # a byte for each pair of ranks says whether the rest is true
        pieces = this.send.get(rank, [])
        if pieces:
            size = sum(p.end - p.begin for p in pieces)
            status = OK if memory is not None else FAILED
            parts.append(torch.full((1,), status, dtype=torch.uint8, device="cpu"))
            if memory is None:
                parts.append(torch.zeros(size, dtype=torch.uint8, device="cpu"))
            else:
                parts += [memory[p.box][p.begin : p.end] for p in pieces]
            out[rank] = 1 + size
        if rank in this.receive:
            into[rank] = 1 + sum(p.end - p.begin for p in this.receive[rank])
    sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")
    received = torch.empty(sum(into), dtype=torch.uint8, device="cpu")
    dist.all_to_all_single(received, sent, into, out, group=group)
    came: list[tuple[Piece, torch.Tensor]] = []
    failed: set[int] = set()
    at = 0
    for rank in range(ranks):
        if not into[rank]:
            continue
        if received[at] != OK:
            failed.add(rank)
        else:
            begin = at + 1
            for piece in this.receive[rank]:
                end = begin + piece.end - piece.begin
                came.append((piece, received[begin:end]))
                begin = end
        at += into[rank]
    return came, failed


def size_of(box: Box, dtype: torch.dtype) -> int:
    """Bytes of a box."""
    return math.prod(box.shape) * dtype.itemsize
