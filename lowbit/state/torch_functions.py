"""torch's own functions for optimizer state,
which take a rank's part of a flattened vector for the whole of it.
"""

from __future__ import annotations

import sys
from typing import Any

# Where `get_optimizer_state_dict` and `FullyShardedDataParallel.optim_state_dict` are.
_MODULES = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
)


def refuse_torch_functions(opt: Any) -> None:
    """Raises ValueError if they called `opt.state_dict()`: they save one rank's part for all, or
    fail without a word on why.

    A hook before state_dict, of optimizers with parts of vectors. Another caller, for
    torch.save on each rank, gets this rank's state.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _MODULES and "optim" in frame.f_code.co_name:
            raise ValueError(
                "torch's functions for optimizer state would keep one rank's part of the flat "
                f"shards of this {type(opt).__name__} for all ranks: use "
                "lowbit.fsdp1.get_state_dict and set_state_dict, or bind with export='fp32'"
            )
        frame = frame.f_back  # type: ignore[assignment]
