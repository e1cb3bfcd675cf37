"""Which part of a parameter is here, and what the parts agree on. The only room that knows torch.distributed."""

from lowbit.shard.chunks import Spread, complete, to_chunks
from lowbit.shard.collective import average_over, rank, reduce_over
from lowbit.shard.part import CUT_ALL, CUT_ENDS, Part
from lowbit.shard.piece import Flat, Piece, flat_of, flats, is_flat
from lowbit.shard.placement import like, part, take
from lowbit.shard.tensor import (
    dense_gradient,
    gradient,
    holders,
    is_sharded,
    local,
    plain_gradients,
    whole,
)
from lowbit.shard.wrapper import inside_ddp, is_ddp, is_fully_sharded

__all__ = [
    "CUT_ALL", "CUT_ENDS", "Flat", "Part", "Piece", "Spread", "average_over", "complete", "dense_gradient", "flat_of", "flats", "gradient", "holders",
    "inside_ddp", "is_ddp", "is_flat", "is_fully_sharded", "is_sharded", "like", "local", "part", "plain_gradients", "rank", "reduce_over", "take", "to_chunks", "whole",
]  # fmt: skip
