"""Checkpoints from Python: what `lowbit-ckpt` does, a reader of single tensors, and storage for
torch.distributed.checkpoint.

Nothing in a file is ever executed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowbit.checkpoint.checkpoint import Checkpoint
from lowbit.checkpoint.commands import convert, diff, inspect, reshard, verify
from lowbit.checkpoint.contents import Codes, Model, Param, State, Tensor
from lowbit.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from lowbit.checkpoint.storage.reader import Reader
    from lowbit.checkpoint.storage.writer import Writer

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
        from lowbit.checkpoint.storage.writer import Writer

        return Writer
    if name == "Reader":
        from lowbit.checkpoint.storage.reader import Reader

        return Reader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
