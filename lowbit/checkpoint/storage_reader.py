"""Loads for torch.distributed.checkpoint. Public as lowbit.checkpoint.Reader."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lowbit.checkpoint.reader import Path, bytes_of, module
from lowbit.checkpoint.storage import Storage

COPIED = 256 << 20  # bytes that are read at a time for tensors which cannot be read into


class Reader(Storage, StorageReader):
    """Reads what `dcp.load` loads from a directory of torch.distributed.checkpoint, whoever wrote it, and executes nothing of it.

    A rank reads the bytes of its own shards, from C++, without the GIL, and straight into its tensors where these lie row-major on the
    CPU in the file's dtype. Digests are verified before values are used:

    - A chunk that `Writer` wrote has digests of up to 16 parts. Those parts are read that a shard touches.
    - A chunk that lowbit-ckpt wrote has one digest, and is read whole.
    - A chunk that torch wrote has a CRC-32, which torch does not check. It is read whole for it.

    Values that are no tensors are parsed as plain data and written anew for torch's planner, which unpickles them: nothing of the file
    reaches it. What is no plain data, or a tuple with tensors in it, is refused by name, if the state dict asks for it.

    Args:
        path: the folder; `checkpoint_id=` of `dcp.load` replaces it.
        thread_count: threads of this rank that read; 1 by default.
        verify: False reads the bytes that are needed (short rows with what lies between), and verifies none of them; True by default.

    Attributes:
        bytes_read: bytes of values that this object has read, without headers and what only checksums needed.

    Raises:
        CheckpointError: the directory is not sound, or its bytes are not those that were written.

    >>> dcp.load(state_dict, storage_reader=lowbit.checkpoint.Reader("run/step-1000"))
    """

    def __init__(
        self, path: Path | None = None, *, thread_count: int = 1, verify: bool = True
    ) -> None:
        super().__init__(path, thread_count)
        self.verify, self.bytes_read = verify, 0
        self._reader: Any = None
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = os.fsdecode(checkpoint_id)
        self._reader = self._metadata = None

    def read_metadata(self) -> Metadata:
        """The metadata, from the C++ parser: torch's own would unpickle the file."""
        if not self.path:
            raise ValueError("Reader has no path: give it one, or checkpoint_id= to dcp.load")
        self._reader = module().Reader(bytes_of(self.checkpoint_id))
        said = self._reader.layout()
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for name, path, dtype, shape, chunks in said["tensors"]:
            entries[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, dtype)),
                size=torch.Size(shape),
                chunks=[ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks],
            )
            paths[name] = tuple(path)
        for name, path in said["values"]:
            entries[name] = BytesStorageMetadata()
            paths[name] = tuple(path)
        self._metadata = Metadata(
            state_dict_metadata=entries,
            planner_data=paths if said["has_paths"] else None,
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        tensors = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                value = self._reader.value_item(item.storage_index.fqn)
                planner.load_bytes(item, io.BytesIO(value))
            else:
                tensors.append(item)
        batch: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        copied = 0
        for item in tensors:
            target = planner.resolve_tensor(item).detach()
            into = self._into(item, target)
            if into is not target:
                copied += into.nbytes
            batch.append((item, target, into))
            if copied >= COPIED:
                self._read(batch, planner)
                batch, copied = [], 0
        self._read(batch, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _into(self, item: ReadItem, target: torch.Tensor) -> torch.Tensor:
        """Where the values are read to: the target itself, or a tensor as the file has it."""
        assert self._metadata is not None
        about = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(about, TensorStorageMetadata)
        if target.shape != item.lengths:
            raise ValueError(
                f"{item.storage_index.fqn}: the planner gives a tensor of {tuple(target.shape)} for {tuple(item.lengths)} of the checkpoint"
            )
        dtype = about.properties.dtype
        if (
            type(target) is torch.Tensor
            and target.is_cpu
            and target.dtype == dtype
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
        ):
            return target
        return torch.empty(tuple(item.lengths), dtype=dtype)

    def _read(
        self, batch: list[tuple[ReadItem, torch.Tensor, torch.Tensor]], planner: LoadPlanner
    ) -> None:
        wanted = []
        for item, _, into in batch:
            start = item.storage_index.offset or (0,) * len(item.lengths)
            offset = [a + b for a, b in zip(start, item.storage_offsets, strict=True)]
            wanted.append((item.storage_index.fqn, offset, list(item.lengths), into.data_ptr(), into.nbytes))  # fmt: skip
        self.bytes_read += self._reader.read_into(wanted, self.thread_count, self.verify, None)
        for item, target, into in batch:
            if into is not target:
                target.copy_(into)
            planner.commit_tensor(item, target)
