"""Loads for torch.distributed.checkpoint. Public as lowbit.checkpoint.Reader."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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

from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.native import native
from lowbit.checkpoint.object_store import Opened, StorageOptions
from lowbit.checkpoint.paths import Path
from lowbit.checkpoint.progress import Progress, Shown, Steps
from lowbit.checkpoint.storage.packed_plans import returned, sent
from lowbit.checkpoint.storage.shared_reads import (
    Box,
    Piece,
    Round,
    Share,
    Told,
    box_of,
    check_same,
    exchange,
    place_in,
    share,
    size_of,
)
from lowbit.checkpoint.storage.storage import Storage, named

COPIED = 256 << 20  # bytes that are read at a time for tensors which cannot be read into


class Reader(Storage, StorageReader):
    """Reads what `dcp.load` loads from a directory of torch.distributed.checkpoint, whoever wrote
    it, and executes nothing of it.

    A rank reads the bytes of its own shards, from C++, without the GIL, and straight into its
    tensors where these lie row-major on the CPU in the file's dtype. Digests are verified before
    values are used:

    - A chunk that `Writer` or lowbit-ckpt wrote has digests of its parts.
      Those parts are read that a shard touches.
    - A small chunk, or one of an older lowbit-ckpt, has one digest, and is read whole.
    - A chunk that torch wrote has a CRC-32, which torch does not check. It is read whole for it.

    Values that are not tensors are parsed, as plain data with dense tensors, arrays of numpy and
    io.BytesIO in it, and serialized again for torch's planner, which unpickles them: none of
    the file reaches it. They are verified too: by their digest in lowbit.json, else by their
    CRC-32.
    Any other value is refused by name, if the state dict asks for it.

    What several ranks need, a replicated tensor or a shard of HSDP, one of them reads, and the
    others receive it from there: each byte leaves the storage once. The reads are dealt out by
    bytes.

    Args:
        path: the folder, or its URL; `checkpoint_id=` of `dcp.load` replaces it.
        thread_count: threads of this rank that read; 1 by default.
        verify: False reads the bytes that are needed (short rows with what lies between), and
            verifies none of them; True by default.
        share_reads: False has each rank read all that it needs by itself; True by default. A
            planner of your own whose `finish_plan` may raise on one rank wants False: the others
            would wait for that rank's bytes until their group's time is up.
        process_group: that `dcp.load` is given; None, as there, is the default one. Reads are
            shared where all of its ranks take part in the load, and where it moves memory of the
            host, as gloo does. NCCL alone does not: use `init_process_group("cpu:gloo,cuda:nccl")`.
        progress: called with the bytes of tensors that this rank has read and those that it will
            (without what it receives), at most ten times a second, in the calling thread; False,
            and an exception, stop the load on all ranks. True: a bar on standard error.
        storage_options: what fsspec opens a URL with.

    Attributes:
        bytes_read: bytes of values that this object has read,
            without headers and what only checksums needed.
        bytes_mapped: of them, those copied from mapped pages of the file,
            of which the kernel counts no read.
        bytes_received: bytes of values that came from other ranks.

    Raises:
        CheckpointError: the directory is not sound, or its bytes are not those that were written.

    >>> dcp.load(state_dict, storage_reader=lowbit.checkpoint.Reader("run/step-1000"))
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        thread_count: int = 1,
        verify: bool = True,
        share_reads: bool = True,
        process_group: dist.ProcessGroup | None = None,
        progress: Progress | bool | None = None,
        storage_options: StorageOptions = None,
    ) -> None:
        super().__init__(path, thread_count, storage_options)
        self.verify, self.share_reads, self.process_group = verify, share_reads, process_group
        self.bytes_read = self.bytes_mapped = self.bytes_received = 0
        self.progress, self._steps = progress, Steps(None, 0)
        self._reader: Any = None
        self._opened: Opened | None = None
        self._metadata: Metadata | None = None
        self._sent: list[ReadItem] | None = None
        self._digest = ""  # of the metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = named(checkpoint_id)
        self._reader = self._metadata = self._opened = None

    def read_metadata(self) -> Metadata:
        """The metadata, from the C++ parser: torch's own would unpickle the file."""
        if not self.path:
            raise ValueError("Reader has no path: give it one, or checkpoint_id= to dcp.load")
        self._opened = Opened(self.checkpoint_id, self.storage_options)
        self._reader = native().Reader(self._opened.name)
        layout = self._reader.layout()
        self._digest = layout["digest"]
        found: list[tuple[int, str, TensorStorageMetadata | BytesStorageMetadata]] = []
        paths: dict[str, tuple[str | int, ...]] = {}
        for name, path, dtype, shape, chunks, place in layout["tensors"]:
            about = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, dtype)),
                size=torch.Size(shape),
                chunks=[ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks],
            )
            found.append((place, name, about))
            paths[name] = tuple(path)
        for name, path, place in layout["values"]:
            found.append((place, name, BytesStorageMetadata()))
            paths[name] = tuple(path)
        # In the order of the file, in which a planner builds a state dict that it was not given.
        found.sort(key=lambda one: one[:2])
        entries = {name: about for _, name, about in found}
        self._metadata = Metadata(
            state_dict_metadata=entries,
            planner_data=paths if layout["has_paths"] else None,
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        here = place_in(self.process_group)
        self._sent = sent(plan.items, -1 if here is None else here.rank)
        told = Told(here if self.share_reads else None, self.checkpoint_id, self._digest)
        return dataclasses.replace(plan, items=self._sent, storage_data=told)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        check_same([plan.storage_data for plan in plans])
        shares = share(plans, self._nbytes)
        return [
            dataclasses.replace(
                plan, items=returned(plan.items, i), storage_data=shares[i] if shares else None
            )
            for i, plan in enumerate(plans)
        ]

    def _nbytes(self, box: Box) -> int:
        return size_of(box, self._dtype(box.name))

    def _dtype(self, name: str) -> torch.dtype:
        assert self._metadata is not None
        about = self._metadata.state_dict_metadata[name]
        assert isinstance(about, TensorStorageMetadata)
        return about.properties.dtype

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        shared = plan.storage_data if isinstance(plan.storage_data, Share) else Share([])
        self._sent = None
        boxes = [None if i.type == LoadItemType.BYTE_IO else box_of(i) for i in plan.items]
        total = sum(self._nbytes(box) for box in boxes if box and box not in shared.received)
        self._steps = Steps(None, total)
        failure: BaseException | None = None
        with contextlib.ExitStack() as shown:
            try:
                self._steps = Steps(shown.enter_context(Shown(self.progress, "load")), total)
                self._read_own(plan, boxes, planner, shared)
            except BaseException as error:
                if not shared.rounds:
                    raise
                failure = error  # the others wait for this rank: it tells them, then raises
            if shared.rounds:
                SharedReads(self, plan, planner, shared, failure).run()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_own(
        self, plan: LoadPlan, boxes: list[Box | None], planner: LoadPlanner, shared: Share
    ) -> None:
        """What this rank reads for itself alone."""
        batch: list[Transfer] = []
        copied = 0
        for item, box in zip(plan.items, boxes, strict=True):
            if box is None:
                value = self._reader.value_item(item.storage_index.fqn, self.verify)
                planner.load_bytes(item, io.BytesIO(value))
                continue
            if box in shared.read or box in shared.received:
                continue
            one = self.transfer(item, box, planner)
            copied += 0 if one.into is one.target else one.into.nbytes
            batch.append(one)
            if copied >= COPIED:
                self.read(batch)
                for one in batch:
                    one.commit(planner)
                batch, copied = [], 0
        self.read(batch)
        for one in batch:
            one.commit(planner)

    def transfer(self, item: ReadItem, box: Box, planner: LoadPlanner) -> Transfer:
        """An item, and where its values are read to: the planner's tensor itself,
        or one as the file has it.
        """
        target = planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise ValueError(
                f"{box.name}: the planner gives a tensor of {tuple(target.shape)} for "
                f"{tuple(item.lengths)} of the checkpoint"
            )
        dtype = self._dtype(box.name)
        if (
            type(target) is torch.Tensor
            and target.is_cpu
            and target.dtype == dtype
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
        ):
            return Transfer(item, box, target, target)
        return Transfer(item, box, target, torch.empty(box.shape, dtype=dtype, device="cpu"))

    def read(self, batch: Sequence[Transfer]) -> None:
        """Reads and verifies."""
        wanted = [
            (
                one.box.name,
                list(one.box.offset),
                list(one.box.shape),
                one.into.data_ptr(),
                one.into.nbytes,
            )
            for one in batch
        ]
        told = self._steps.next(sum(one.into.nbytes for one in batch))
        before = self._reader.mapped()
        self.bytes_read += self._reader.read_into(wanted, self.thread_count, self.verify, told)
        self.bytes_mapped += self._reader.mapped() - before


class Transfer(NamedTuple):
    """An item of a plan while it is read: its source, and its memory."""

    item: ReadItem
    box: Box
    target: torch.Tensor
    into: torch.Tensor

    def commit(self, planner: LoadPlanner) -> None:
        if self.into is not self.target:
            self.target.copy_(self.into)
        planner.commit_tensor(self.item, self.target)


class SharedReads:
    """The rounds of one rank: it reads what it sends, and takes what comes. A failure is sent to
    the ranks that wait, and raised at the end.
    """

    def __init__(
        self,
        reader: Reader,
        plan: LoadPlan,
        planner: LoadPlanner,
        shared: Share,
        failure: BaseException | None,
    ) -> None:
        self.reader, self.planner, self.shared, self.failure = reader, planner, shared, failure
        self.items = {box_of(i): i for i in plan.items if i.type != LoadItemType.BYTE_IO}
        self.open: dict[Box, Transfer] = {}
        self.left: dict[Box, int] = {}  # bytes that are still to come, or to go
        self.silent: set[int] = set()  # ranks that failed

    def run(self) -> None:
        for this in self.shared.rounds:
            memory = None if self.failure else self._attempt(self._prepare, this)
            came, silent = exchange(this, memory, self.reader.process_group)
            self.silent |= silent
            if self.failure is None:
                self._attempt(self._take, this, [] if self.silent else came)
        if self.failure is not None:
            raise self.failure
        if self.silent:
            who = ", ".join(map(str, sorted(self.silent)))
            raise CheckpointError(
                f"{self.reader.checkpoint_id}: rank {who} failed to read "
                "its share; its own error says why"
            )

    def _attempt(self, work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return work(*arguments)
        except BaseException as error:
            self.failure = error
            return None

    def _begin(self, box: Box) -> Transfer:
        one = self.open[box] = self.reader.transfer(self.items[box], box, self.planner)
        self.left[box] = one.into.nbytes
        return one

    def _prepare(self, this: Round) -> dict[Box, torch.Tensor]:
        """The bytes of all boxes of which this rank sends a part now;
        those that are new are read.
        """
        boxes = dict.fromkeys(p.box for pieces in this.send.values() for p in pieces)
        self.reader.read([self._begin(box) for box in boxes if box not in self.open])
        return {box: _bytes(self.open[box].into) for box in boxes}

    def _take(self, this: Round, came: list[tuple[Piece, torch.Tensor]]) -> None:
        """Ends boxes of which all has come, or gone. After another rank's failure nothing comes;
        what is sent is then let go, as memory for it was promised for a while only.
        """
        sent = {piece for pieces in this.send.values() for piece in pieces}
        for piece, values in came:
            one = self.open.get(piece.box) or self._begin(piece.box)
            _bytes(one.into)[piece.begin : piece.end] = values
            self.reader.bytes_received += len(values)
        for piece in [*sent, *(piece for piece, _ in came)]:
            self.left[piece.box] -= piece.end - piece.begin
            if self.left[piece.box] == 0:
                one = self.open.pop(piece.box)
                if not self.silent:
                    one.commit(self.planner)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)
