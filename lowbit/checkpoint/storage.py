"""What Writer and Reader share: the folder of a checkpoint by its name, and threads."""

from __future__ import annotations

import os

from lowbit.checkpoint.reader import Path, module


class Storage:
    """A folder of torch.distributed.checkpoint, named now or by `checkpoint_id=` later."""

    def __init__(self, path: Path | None, thread_count: int) -> None:
        if thread_count < 1:
            raise ValueError(f"thread_count must be at least 1, not {thread_count}")
        module()  # ImportError here, and not in the middle of a run
        self.path = None if path is None else os.fsdecode(path)
        self.thread_count = thread_count

    @property
    def checkpoint_id(self) -> str:
        """The folder; "" where it is not known yet."""
        return self.path or ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the name is that of a folder of a file system."""
        return "://" not in os.fsdecode(checkpoint_id)
