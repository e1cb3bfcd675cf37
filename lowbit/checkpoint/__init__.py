"""Checkpoints looked into, checked, converted and resharded: what `lowbit-ckpt` does, with the same options and the same reports.

Nothing in a file is ever executed, and nothing of a tensor's size is held in memory. The work runs without the GIL; Ctrl-C and an exception of the
progress callback stop it, and nothing is left behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowbit.checkpoint.commands import convert, diff, inspect, reshard, verify
from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.reader import Checkpoint, Codes, Model, Param, State, Tensor

if TYPE_CHECKING:
    from lowbit.checkpoint.storage_reader import Reader
    from lowbit.checkpoint.storage_writer import Writer

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Codes",
    "Model",
    "Param",
    "Reader",
    "State",
    "Tensor",
    "Writer",
    "convert",
    "diff",
    "inspect",
    "reshard",
    "verify",
]


def __getattr__(name: str) -> Any:
    # With them comes torch.distributed.checkpoint, which most programs do without.
    if name == "Writer":
        from lowbit.checkpoint.storage_writer import Writer

        return Writer
    if name == "Reader":
        from lowbit.checkpoint.storage_reader import Reader

        return Reader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
