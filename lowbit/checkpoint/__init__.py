"""Checkpoints looked into, checked, converted and resharded: what `lowbit-ckpt` does, with the same options and the same reports.

Nothing in a file is ever executed, and nothing of a tensor's size is held in memory. The work runs without the GIL; Ctrl-C and an exception of the
progress callback stop it, and nothing is left behind.
"""

from lowbit.checkpoint.commands import CheckpointError, convert, diff, inspect, reshard, verify
from lowbit.checkpoint.reader import Checkpoint, Codes, Model, Param, State, Tensor

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Codes",
    "Model",
    "Param",
    "State",
    "Tensor",
    "convert",
    "diff",
    "inspect",
    "reshard",
    "verify",
]
