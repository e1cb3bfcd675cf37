"""Conversion of flat shards: state into DTensors of the original parameters,
and partial rows into whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.sharding.collective import reduce_over
from lowbit.sharding.flat_shard import FlatShard
from lowbit.sharding.placement import row_range, strides


@dataclass(frozen=True)
class Spread:
    """The layout of a state tensor over the ranks that hold parts of a parameter."""

    shape: tuple[int, ...]  # of the whole parameter
    local: tuple[int, ...]
    row: int | None  # bytes per row of the parameter; None if every rank has the whole tensor
    bits: int  # per element of the parameter; 0 if a value belongs to a whole row


def to_chunks(p: FlatShard, spreads: Sequence[Spread], tensors: Sequence[Tensor]) -> list[Tensor]:
    """State tensors of a flat shard as DTensors of the original parameter. A collective.

    They are sharded on dimension 0, or replicated if every rank has the whole tensor.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rows = p.shape[0] if p.shape else 0
    chunks = [row_range(rows, rank, p.flat.ranks) for rank in range(p.flat.ranks)]
    own = [_own_bytes(p, spread, t) for spread, t in zip(spreads, tensors, strict=True)]
    chunk_bytes = _exchanged(p, spreads, own, chunks)
    mine = range(*chunks[p.flat.rank])
    mesh = DeviceMesh.from_group(p.flat.group, p.owner.device.type)
    made: list[Tensor] = []
    for spread, tensor, bytes_ in zip(spreads, tensors, chunk_bytes, strict=True):
        whole = spread.row is None
        local = spread.shape if whole else (len(mine), *spread.shape[1:])
        made.append(
            DTensor.from_local(
                bytes_.view(tensor.dtype).reshape(local),
                mesh,
                [Replicate() if whole else Shard(0)],
                run_check=False,
                shape=torch.Size(spread.shape),
                stride=strides(spread.shape),
            )
        )
    return made


def _exchanged(
    p: FlatShard,
    spreads: Sequence[Spread],
    own: Sequence[Tensor],
    chunks: Sequence[tuple[int, int]],
) -> list[Tensor]:
    """The bytes of this rank's chunk of each state tensor, from the bytes that ranks have of their
    rows. A collective.

    Args:
        own: the bytes of each state tensor here.
        chunks: the rows [begin, end) of each rank.
    """
    import torch.distributed as dist

    rank, every = p.flat.rank, range(p.flat.ranks)
    first_holder = p.holding_ranks[0] if p.holding_ranks else 0
    pairs = list(zip(spreads, own, strict=True))

    def passed(i: int, k: int, spread: Spread, bytes_: Tensor) -> tuple[int, int]:
        """The bytes that rank i sends to rank k, [begin, end) in the whole tensor.

        They are i's rows in k's chunk.
        A tensor that every rank has comes whole from the first rank.
        """
        if spread.row is None:
            return 0, bytes_.numel() if i == first_holder else 0
        begin, end = max(p.rows[i][0], chunks[k][0]), min(p.rows[i][1], chunks[k][1])
        return begin * spread.row, max(begin, end) * spread.row

    sent: list[Tensor] = []
    out, into = [0] * len(every), [0] * len(every)
    for k in every:
        for spread, bytes_ in pairs:
            begin, end = passed(rank, k, spread, bytes_)
            base = p.rows[rank][0] * (spread.row or 0)
            sent.append(bytes_[begin - base : end - base])
            out[k] += end - begin
            begin, end = passed(k, rank, spread, bytes_)
            into[k] += end - begin
    received = torch.empty(sum(into), dtype=torch.uint8, device=p.owner.device)
    dist.all_to_all_single(received, torch.cat(sent), into, out, group=p.flat.group)

    mine = range(*chunks[rank])
    sizes = [b.numel() if s.row is None else len(mine) * s.row for s, b in pairs]
    made = [torch.zeros(size, dtype=torch.uint8, device=p.owner.device) for size in sizes]
    at = 0
    for k in every:
        for (spread, bytes_), chunk in zip(pairs, made, strict=True):
            begin, end = passed(k, rank, spread, bytes_)
            base = mine.start * (spread.row or 0)
            # bytes and bits of other ranks are zero
            chunk[begin - base : end - base] |= received[at : at + end - begin]
            at += end - begin
    return made


def _own_bytes(p: FlatShard, spread: Spread, tensor: Tensor) -> Tensor:
    """The bytes of a state tensor, with zeros where they belong to another rank."""
    bytes_ = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if spread.row is None or not bytes_.numel() or not (p.part.front or p.part.back):
        return bytes_
    bytes_ = bytes_.clone()
    rows = bytes_.view(-1, spread.row)
    if not spread.bits:  # a row's values belong to the rank that holds its first element
        rows[: 1 if p.part.front else 0] = 0
        return bytes_
    before, behind = p.part.front * spread.bits, (p.cols - p.part.back) * spread.bits
    rows[0, : before // 8] = 0
    if before % 8:
        rows[0, before // 8] &= 0xFF << before % 8 & 0xFF
    rows[-1, -(-behind // 8) :] = 0
    if behind % 8:
        rows[-1, behind // 8] &= (1 << behind % 8) - 1
    return bytes_


def complete(p: FlatShard, values: Sequence[Tensor]) -> list[Tensor]:
    """The rows that a flat shard touches, whole and in float32;
    other ranks send the missing elements.

    A collective if rows are split between ranks.

    Args:
        values: tensors with one float32 value for each local element.
    """
    made = [p.part.with_room(value).reshape(p.part.rows, p.cols) for value in values]
    cut, mine = p.cut_rows, range(*p.rows[p.flat.rank])
    if cut:
        bits = torch.zeros(
            (len(values), len(cut), p.cols), dtype=torch.int32, device=p.owner.device
        )
        here = [(k, r - mine.start) for k, r in enumerate(cut) if r in mine]
        for i, rows in enumerate(made):
            for k, r in here:
                bits[i, k] = rows[r].view(torch.int32)
        reduce_over([(bits, p.flat.group, "sum")])  # only one rank has a nonzero term
        for i, rows in enumerate(made):
            for k, r in here:
                rows[r] = bits[i, k].view(torch.float32)
    return [rows.reshape(p.part.local) for rows in made]
