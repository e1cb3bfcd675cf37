"""torch's own functions for optimizer state, seen from the optimizer that they call: some take a
rank's part of a flattened vector for the whole of it, some have filled in a state dict.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
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
    if any(_calls()):
        raise ValueError(
            "torch's functions for optimizer state would keep one rank's part of the flat "
            f"shards of this {type(opt).__name__} for all ranks: use "
            "lowbit.fsdp1.get_state_dict and set_state_dict, or bind with export='fp32'"
        )


def options_of_load() -> Any:
    """The options of the `set_optimizer_state_dict` that is under way, or None. With
    `full_state_dict`, keys that the state dict lacks have the optimizer's own tensors; with
    `broadcast_from_rank0`, ranks have what rank 0 sent them, and no more.
    """
    infos = (frame.f_locals.get("info") for frame in _calls())
    return next((info for info in infos if hasattr(info, "full_state_dict")), None)


def is_loading() -> bool:
    """Whether a `set_optimizer_state_dict` is under way, which may ask for the state that it
    replaces.
    """
    return any(frame.f_code.co_name == "_load_optim_state_dict" for frame in _calls())


def _calls() -> Iterator[FrameType]:
    """The calls of torch's functions for optimizer state that are under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _MODULES and "optim" in frame.f_code.co_name:
            yield frame
        frame = frame.f_back
