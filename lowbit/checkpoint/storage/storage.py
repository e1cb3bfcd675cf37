"""What Writer and Reader share: the folder of a checkpoint by its name or URL, and threads."""

from __future__ import annotations

import os

from lowbit.checkpoint.native import native
from lowbit.checkpoint.object_store import StorageOptions, is_url, local_path
from lowbit.checkpoint.paths import Path


def named(path: Path) -> str:
    """A folder's path or URL, without "file://"."""
    return os.fsdecode(local_path(path))


class Storage:
    """A folder of torch.distributed.checkpoint, named now or by `checkpoint_id=` later."""

    def __init__(
        self, path: Path | None, thread_count: int, storage_options: StorageOptions = None
    ) -> None:
        if thread_count < 1:
            raise ValueError(f"thread_count must be at least 1, not {thread_count}")
        native()  # ImportError here, and not in the middle of a run
        self.path = None if path is None else named(path)
        self.thread_count, self.storage_options = thread_count, storage_options

    @property
    def checkpoint_id(self) -> str:
        """The folder; "" where it is not known yet."""
        return self.path or ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the name is that of a folder, or a URL of a kind that fsspec knows."""
        if not is_url(checkpoint_id):
            return True
        try:
            from fsspec.registry import known_implementations, registry
        except ImportError:
            return False
        kind = os.fsdecode(checkpoint_id).split("://", 1)[0].split("::")[0]
        return kind in known_implementations or kind in registry
