"""A save to an object store: what PartialFolder is on a disk."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from lowbit.checkpoint.object_store import StorageOptions
from lowbit.checkpoint.upload import Upload


class StoreFolder:
    """A save to a URL, as its coordinator has it.

    What a save left that failed or was killed, the next one to the URL removes: nobody can tell it
    from the files of one that runs.
    """

    def __init__(self, url: str, overwrite: bool, storage_options: StorageOptions) -> None:
        self.upload = Upload(url, storage_options)
        self.upload.check(overwrite, True, "overwrite=True replaces it", fill=True)

    def places(
        self, written: dict[MetadataIndex, _StorageInfo]
    ) -> dict[MetadataIndex, _StorageInfo]:
        """As they are: each rank asked the store for names that are free."""
        return written

    def publish(self, data: Mapping[str, int], index: bytes, digests: bytes) -> None:
        self.upload.publish(data, index, digests)

    def fail(self, alone: bool) -> None:
        """As `drop`."""

    def drop(self) -> None:
        """Nothing to do: without `.metadata` it is not a checkpoint, and an older one is whole."""
