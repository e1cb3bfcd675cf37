"""Saves for torch.distributed.checkpoint. Public as lowbit.checkpoint.Writer."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import pickle
import socket
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.native import native
from lowbit.checkpoint.object_store import StorageOptions, is_url
from lowbit.checkpoint.paths import Path, bytes_of
from lowbit.checkpoint.progress import Progress, Shown, Steps
from lowbit.checkpoint.storage.announced_metadata import announce
from lowbit.checkpoint.storage.group_names import check_group_names, group_names
from lowbit.checkpoint.storage.packed_plans import numbered, results, sent
from lowbit.checkpoint.storage.partial_folder import PartialFolder, partial_path
from lowbit.checkpoint.storage.save_targets import Target, check_targets
from lowbit.checkpoint.storage.state_samples import Samples, check_state_samples, state_samples
from lowbit.checkpoint.storage.state_tensors import (
    DTYPES,
    OtherLayout,
    check_dense,
    check_values,
    copied_into,
    places,
    unread,
    with_own_memory,
)
from lowbit.checkpoint.storage.storage import Storage, named
from lowbit.checkpoint.storage.store_folder import StoreFolder
from lowbit.checkpoint.storage.written import Written, digests
from lowbit.checkpoint.upload import Upload

COPIED = 256 << 20  # bytes of tensors on other devices that are copied to the host at a time
OPAQUE = "Writer(opaque=True) saves it for torch's reader alone, which unpickles it"
VERSION = "1.0.0"  # of the directory's metadata, as torch writes it


class Staged(dict[str, Any]):
    """The host copy of a save: it lives as long as the save, which a plain dict could not tell."""


class Save(threading.local):
    """What belongs to one save. It runs in one thread from plan to end,
    and one writer may serve several at a time.
    """

    asked = ""  # the path that this thread's next save was given
    path = ""  # of the save that runs; absolute: a program may change its folder meanwhile
    id = ""
    # On the coordinator, from plan to write; after that what the write returns holds it.
    folder: PartialFolder | StoreFolder | None = None
    written: weakref.ref[PartialFolder | StoreFolder] | None = None
    is_coordinator = False
    ranks = 1


class Writer(Storage, BlockingAsyncStager, StorageWriter):
    """Writes what `dcp.save` and `dcp.async_save` save: a plain directory of
    torch.distributed.checkpoint, with digests.

    Each rank writes one file, from C++ and without the GIL. The directory appears under its name in
    one step, when all ranks have written: a save that is killed or fails leaves an older checkpoint
    of that name as it was, and nothing that looks like a new one. Until then the files lie in
    `.NAME.partial-saving` beside it. A save that fails on one rank alone, or at its end, removes
    that folder at once, another as soon as nothing holds its exception; the next save to the same
    name removes what a killed one left there.

    `lowbit.json` in the directory has XXH3-128 digests of all chunks, and shorter ones of their
    parts (docs/reference/ckpt-commands.md), which `Reader` and `lowbit-ckpt verify` hold the values
    to.

    Args:
        path: the folder to write, or its URL; `checkpoint_id=` of `dcp.save` replaces it. Its
            parents are made where they are missing. For a URL each rank writes its file to TMPDIR,
            then uploads it.
        sync_files: wait until everything is on the disk before the folder gets its name;
            True by default.
        thread_count: threads of this rank that write; 1 by default.
        overwrite: replace a checkpoint of that name; True by default, as in torch. What else lies
            in that folder always stays.
        cache_staged_state_dict: keep the host copy of `dcp.async_save` for the next one, so that
            memory is allocated once; True by default. A save that begins before the last one has
            written its data gets a copy of its own. Saves may run at the same time, through one
            writer too, if each that overlaps has a process group of its own.
        opaque: save also what `Reader` does not load: objects of classes, quantized tensors,
            subclasses of tensors. False by default: the save is refused, by name.
        progress: called with the bytes of tensors that this rank has written and those that it
            will, at most ten times a second, in the thread that saves; False, and an exception,
            stop the save on all ranks. True: a bar on standard error (with tqdm, where that is a
            terminal).
        storage_options: what fsspec opens a URL with, such as `{"endpoint_url": ...}`.
        check_replicas: refuse a save in which ranks have other values in an optimizer's state of
            one name, of which torch keeps one rank's; True by default. Some values of 8 tensors
            are compared.

    Raises:
        CheckpointError: the folder cannot be written, or the state holds what could not be loaded,
            or ranks have other parameters in `param_groups` of one name, or other values in an
            optimizer's state of one name; `dcp.save` raises its `CheckpointException` with it on
            every rank.
        ValueError: `use_collectives=False`, with which each rank would publish for itself.

    >>> dcp.save(state_dict, storage_writer=lowbit.checkpoint.Writer("run/step-1000"))
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        sync_files: bool = True,
        thread_count: int = 1,
        overwrite: bool = True,
        cache_staged_state_dict: bool = True,
        opaque: bool = False,
        progress: Progress | bool | None = None,
        storage_options: StorageOptions = None,
        check_replicas: bool = True,
    ) -> None:
        Storage.__init__(self, path, thread_count, storage_options)
        BlockingAsyncStager.__init__(
            self, cache_staged_state_dict=cache_staged_state_dict, type_check=False
        )
        self.sync_files, self.overwrite, self.opaque = sync_files, overwrite, opaque
        self.progress, self.check_replicas = progress, check_replicas
        self._save = Save()
        self._kept: dict[str, Any] | None = None  # the host copy
        self._memory: set[int] = set()  # where its tensors lie
        self._staged: weakref.ref[Staged] | None = None  # of the save that it waits for

    def storage_meta(self) -> StorageMeta:
        # The first that each rank asks for: here a save begins, in the thread that it will run in.
        path = self._save.asked or self.path
        if not path:
            raise ValueError("Writer has no path: give it one, or checkpoint_id= to dcp.save")
        self._drop()
        if threading.current_thread() is not threading.main_thread():
            # An async save lets the thread that trains continue first;
            # Python would have it wait for 5 ms.
            time.sleep(0)
        self._save.asked = ""
        self._save.path = path if is_url(path) else os.path.join(os.getcwd(), path)
        self._save.id = str(uuid.uuid4())
        return self._meta(path)

    def _meta(self, path: str) -> StorageMeta:
        return StorageMeta(checkpoint_id=path, save_id=self._save.id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = self._save.asked = named(checkpoint_id)
        self._drop()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "lowbit.checkpoint.Writer publishes the files of all ranks in one step, for which "
                "they must agree: use_collectives=False is not supported; torch's FileSystemWriter "
                "writes such directories, and Reader reads them"
            )
        self._save.is_coordinator = is_coordinator

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy on the host, for `dcp.async_save`; pinned where there is a GPU."""
        staged = self._staged  # its save may end meanwhile
        waiting = staged is not None and staged() is not None
        if not self.cache_staged_state_dict or waiting:
            return copied_into(host_memory(state_dict), state_dict)
        try:
            copy = Staged(copied_into(self._kept, state_dict))
        except OtherLayout:
            self._kept = None  # its memory goes before the next is taken
            self._kept = host_memory(state_dict, torch.cuda.is_available())
            self._memory = set(places(self._kept))
            copy = Staged(copied_into(self._kept, state_dict))
        self._staged = weakref.ref(copy)
        return copy

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        items = sent(plan.items, -1, self._save.is_coordinator)
        # A planner makes other lists of items, and leaves this as it came.
        target = Target(items, self._save.path)
        return dataclasses.replace(plan, items=items, storage_data=target)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._save.ranks = len(plans)
        check_targets([plan.storage_data for plan in plans])
        theirs = [numbered(plan.items, getattr(plan.storage_data, "items", None)) for plan in plans]
        # Between the plans of all ranks and their first byte, so nobody is in the folder yet.
        self._drop()
        if is_url(self._save.path):
            self._save.folder = StoreFolder(self._save.path, self.overwrite, self.storage_options)
        else:
            self._save.folder = PartialFolder(self._save.path, self.overwrite, self.sync_files)
        # The name of a rank's file travels in torch's own words: a planner may keep plans,
        # also for another writer.
        return [
            dataclasses.replace(plan, items=items, storage_data=_StoragePrefix(f"__{rank}_"))
            for rank, (plan, items) in enumerate(zip(plans, theirs, strict=True))
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # This call has the folder now: where it fails, its traceback keeps it, else its result.
        folder, self._save.folder = self._save.folder, None
        self._save.written = None if folder is None else weakref.ref(folder)
        written: list[WriteResult] = []
        memory: set[int] = set()
        samples: Samples = {}
        try:
            if self.check_replicas:  # while the host copy is this save's
                samples = state_samples(planner)
            if plan.items:
                with (
                    Shown(self.progress, "save") as told,
                    self._rank_file(plan.storage_data.prefix) as (name, file),
                ):
                    steps = Steps(told, sum(map(nbytes, plan.items)))
                    for batch in self._batches(plan.items, planner, memory):
                        given = steps.next(sum(nbytes(item) for item, _ in batch))
                        places = file.write([what for _, what in batch], self.thread_count, given)
                        for (item, what), (offset, length, digest, *tiles) in zip(
                            batch, places, strict=True
                        ):
                            if len(what) == 2 and item.type != WriteItemType.BYTE_IO:
                                digest = ""  # of a tensor subclass, torch's own bytes
                            data = Written(_StorageInfo(name, offset, length), digest, tuple(tiles))
                            written.append(WriteResult(item.index, length, data))
        except BaseException:
            if folder is not None:
                folder.fail(self._save.ranks == 1)
            raise
        finally:
            if memory & self._memory:  # it was the kept copy, which the next save may have now
                self._staged = None
        future: Future[list[WriteResult]] = Future()
        future.set_result(results(written, group_names(planner), samples, folder))
        return future

    @contextlib.contextmanager
    def _rank_file(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """This rank's file and its name; at the end it is on the disk, or in the store."""
        path = self._save.path
        if not is_url(path):
            name = f"{prefix}0.distcp"
            file = self._file_beside(partial_path(path), name)
            try:
                yield name, file
                if self.sync_files:
                    file.sync()
            except BaseException:
                file.clear()  # the folder stays until the last rank has told its error
                raise
            return
        upload = Upload(path, self.storage_options)
        name = f"{prefix}{upload.number()}.distcp"
        with tempfile.TemporaryDirectory(prefix="lowbit-") as folder:
            yield name, native().RankFile(os.fsencode(folder), name.encode(), False)
            upload.put(name, os.path.join(folder, name))

    def _file_beside(self, folder: str, name: str) -> Any:
        """A file in the folder that the coordinator has made."""
        try:
            return native().RankFile(bytes_of(folder), name.encode(), self.sync_files)
        except CheckpointError as error:
            if os.path.isdir(folder):
                raise
            raise CheckpointError(
                f"{error.text}: {folder} was made for this save, and it is not there on "
                f"{socket.gethostname()}: it was removed, or ranks do not save to one folder that "
                "all hosts share"
            ) from error

    def _batches(
        self, items: list[WriteItem], planner: SavePlanner, memory: set[int]
    ) -> Iterator[list[tuple[WriteItem, tuple[Any, ...]]]]:
        """The items with what C++ takes, values first; tensors that had to be copied do not gather.
        Each lives until the next is asked for.
        """
        batch: list[tuple[WriteItem, tuple[Any, ...]]] = []
        held: list[torch.Tensor] = []
        copied = 0
        for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):
            data = planner.resolve_data(item)
            name = item.index.fqn
            if isinstance(data, io.BytesIO):
                value = data.getvalue()
                self._check_value(name, value)
                batch.append((item, (name, value)))
                continue
            t = data.detach()
            dtype = str(t.dtype).removeprefix("torch.")
            check_dense(t, name)
            if (kind := unread(t)) and not self.opaque:
                raise CheckpointError(
                    f"{name} is a {kind}, which Reader does not load. {OPAQUE}", tensor=name
                )
            if kind or t.dtype not in DTYPES:
                archive = io.BytesIO()
                torch.save(data, archive)
                batch.append((item, (name, archive.getvalue())))
                continue
            memory.add(t.untyped_storage().data_ptr())
            plain = t.cpu().resolve_conj().resolve_neg().contiguous()
            if plain.data_ptr() != t.data_ptr():
                copied += plain.nbytes
            held.append(plain)
            batch.append((item, (name, dtype, tuple(plain.shape), plain.data_ptr())))
            if copied >= COPIED:
                yield batch
                batch, held, copied = [], [], 0
        if batch:
            yield batch

    def _check_value(self, name: str, archive: bytes) -> None:
        """Refuses what Reader would refuse: a save that nobody can load is worthless."""
        if self.opaque:
            return
        try:
            native().check_value(name, archive)
        except CheckpointError as error:
            found = error.text.removeprefix(f"{name}: ").split("; nothing was executed")[0]
            if error.cause == "too large":
                raise CheckpointError(
                    f"{name} is too large for one value ({found}): save it as a tensor. {OPAQUE}",
                    tensor=name,
                    cause=error.cause,
                ) from error
            raise CheckpointError(
                f"{name} is not plain data, and Reader would not load it ({found}). Save tensors, "
                "numbers, text, bytes, arrays of numpy, or lists, "
                f"tuples and dicts of these. {OPAQUE}",
                tensor=name,
            ) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        made = None if self._save.written is None else self._save.written()
        assert made is not None
        try:
            self._publish(made, metadata, results)
        except BaseException:
            made.drop()  # all ranks have written
            raise

    def _publish(
        self,
        made: PartialFolder | StoreFolder,
        metadata: Metadata,
        results: list[list[WriteResult]],
    ) -> None:
        check_group_names([getattr(rank, "groups", {}) for rank in results])
        if self.check_replicas:
            check_state_samples([getattr(rank, "samples", {}) for rank in results])
        written = {r.index: r.storage_data for rank in results for r in rank}
        metadata.version = VERSION
        lies = made.places({index: item.info for index, item in written.items()})
        metadata.storage_data = lies
        metadata.storage_meta = self._meta(self._save.path)
        data: dict[str, int] = {}
        for place in lies.values():
            end = place.offset + place.length
            data[place.relative_path] = max(end, data.get(place.relative_path, 0))
        content = pickle.dumps(metadata)
        made.publish(data, content, digests(metadata, content, written))
        if self._save.ranks > 1:
            announce(metadata, content)

    def _drop(self) -> None:
        """Of this thread's last save; one that is published stays."""
        written = self._save.written
        for folder in (self._save.folder, None if written is None else written()):
            if folder is not None:
                folder.drop()
        self._save.folder = self._save.written = None

    def __getstate__(self) -> dict[str, Any]:
        # To the process of an async save, which makes a folder of its own.
        return {**self.__dict__, "_save": None, "_kept": None, "_memory": set(), "_staged": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _save=Save())


def host_memory(state_dict: dict[str, Any], pinned: bool = False) -> dict[str, Any]:
    """Tensors on the host, without values yet, for those of a state dict."""
    check_values(state_dict)
    made = _create_cpu_state_dict(state_dict, pin_memory=pinned)
    return with_own_memory(made, state_dict)


def nbytes(item: WriteItem) -> int:
    """Of the values of a tensor's item."""
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
