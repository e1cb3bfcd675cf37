"""The local part of a parameter, and the collectives that join parts.

Of the other rooms only checkpoint imports torch.distributed, for its storage.
"""

from lowbit.sharding.addends import Chunks, exchange_rows, gather, size_and_rank
from lowbit.sharding.agreement import disagreement
from lowbit.sharding.boxes import Boxes, boxes
from lowbit.sharding.chunks import Spread, complete, to_chunks
from lowbit.sharding.collective import (
    average_over,
    device_of,
    gathered_objects,
    host_device,
    rank,
    ranks_in_both,
    reduce_over,
)
from lowbit.sharding.exchange import Matrices, Whole, from_owners, owners, to_owners
from lowbit.sharding.flat_shard import Flat, FlatShard, flats, is_flat
from lowbit.sharding.flat_slice import FlatSlice, flat_shards, section, sections
from lowbit.sharding.fsdp1 import flat_shards_of, flat_slices_of, flattened_weights
from lowbit.sharding.home import Home, Sent, from_homes, homes, returned, to_homes
from lowbit.sharding.nodes import Exchange
from lowbit.sharding.part import CUT_ALL, CUT_ENDS, CUT_NONE, Part
from lowbit.sharding.placement import (
    follows_columns,
    like,
    part,
    row_range,
    row_shards,
    take,
)
from lowbit.sharding.reductions import (
    NOT_TAKEN,
    FlatUnit,
    Unit,
    flat_units,
    fsdp1_modules,
    hook_buckets,
    hook_flat_gradients,
    units,
)
from lowbit.sharding.shared_failure import SharedFailure
from lowbit.sharding.tensor import (
    check_dense,
    dense_gradient,
    gradient,
    is_sharded,
    local,
    plain_gradients,
    process_groups,
    redistribute_gradient,
    same_placement,
    whole,
)
from lowbit.sharding.wrapper import (
    has_bucket_views,
    inside_ddp,
    is_ddp,
    is_fsdp_module,
    is_fully_sharded,
    is_replicated,
    offloaded,
    reducer_finished,
    reset_fully_sharded,
    reset_reducer,
    reshard,
)

__all__ = [
    "CUT_ALL",
    "CUT_ENDS",
    "CUT_NONE",
    "NOT_TAKEN",
    "Boxes",
    "Chunks",
    "Exchange",
    "Flat",
    "FlatShard",
    "FlatSlice",
    "FlatUnit",
    "Home",
    "Matrices",
    "Part",
    "Sent",
    "SharedFailure",
    "Spread",
    "Unit",
    "Whole",
    "average_over",
    "boxes",
    "check_dense",
    "complete",
    "dense_gradient",
    "device_of",
    "disagreement",
    "exchange_rows",
    "flat_shards",
    "flat_shards_of",
    "flat_slices_of",
    "flat_units",
    "flats",
    "flattened_weights",
    "follows_columns",
    "from_homes",
    "from_owners",
    "fsdp1_modules",
    "gather",
    "gathered_objects",
    "gradient",
    "has_bucket_views",
    "homes",
    "hook_buckets",
    "hook_flat_gradients",
    "host_device",
    "inside_ddp",
    "is_ddp",
    "is_flat",
    "is_fsdp_module",
    "is_fully_sharded",
    "is_replicated",
    "is_sharded",
    "like",
    "local",
    "offloaded",
    "owners",
    "part",
    "plain_gradients",
    "process_groups",
    "rank",
    "ranks_in_both",
    "redistribute_gradient",
    "reduce_over",
    "reducer_finished",
    "reset_fully_sharded",
    "reset_reducer",
    "reshard",
    "returned",
    "row_range",
    "row_shards",
    "same_placement",
    "section",
    "sections",
    "size_and_rank",
    "take",
    "to_chunks",
    "to_homes",
    "to_owners",
    "units",
    "whole",
]
