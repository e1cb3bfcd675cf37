"""Where each rank of a save writes to, which must be one folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem

from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.object_store import is_url


@dataclass
class Target:
    """What a rank sends with its plan: its items as it has them, and where it saves to."""

    items: list[WriteItem]
    path: str
    seen = False  # on the coordinator: a planner may keep a plan, and bring it in a later save


def check_targets(targets: Sequence[Any]) -> None:
    """Refuses a save whose ranks do not name one folder."""
    first: tuple[int, Target] | None = None
    for rank, here in enumerate(targets):
        if not isinstance(here, Target) or here.seen:
            continue
        here.seen = True
        if first is None:
            first = rank, here
        # Programs may run in different folders, and hosts mount a shared one under different names.
        elif _last(here.path) != _last(first[1].path):
            raise CheckpointError(
                f"rank {first[0]} saves to {first[1].path} and rank {rank} to {here.path}: ranks "
                "must save to one folder, such as one named by the step and not by the time. "
                "Saves that overlap need a process group each",
                code=2,
            )


def _last(path: str) -> str:
    """The name by which a save is known wherever its folder lies."""
    return path.rstrip("/") if is_url(path) else os.path.basename(os.path.normpath(path))
