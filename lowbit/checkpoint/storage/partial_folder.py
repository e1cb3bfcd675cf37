"""A folder that several ranks write together, and that appears whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import gc
import os
import shutil
import socket
import stat
import threading
import weakref
from collections.abc import Mapping

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.native import native

OWNER = ".owner"  # in the folder while it is written; its writer holds a lock on it
_LOCKS: set[int] = set()  # files that this process has a lock on
_OPEN: weakref.WeakValueDictionary[str, PartialFolder] = weakref.WeakValueDictionary()


def partial_path(path: str) -> str:
    """The name of the folder until it is complete: the same on every rank."""
    parent, name = os.path.split(path.rstrip("/"))
    return os.path.join(parent, os.fsdecode(native().saving_name(os.fsencode(name))))


class PartialFolder:
    """The folder of one save, on its coordinator: created, then published or removed.

    What a killed save left is removed first: nobody holds the lock on it any more. So is what a
    failed one of this process left. A checkpoint that a killed save had renamed, because the file
    system cannot exchange two folders, gets its name back.

    Raises:
        CheckpointError: the target may not be replaced, another save to it is running,
            or the folder cannot be made.
    """

    thread: threading.Thread  # that makes it
    failed = False

    def __init__(self, path: str, overwrite: bool, sync: bool = True) -> None:
        self.path, self.overwrite, self.sync = path, overwrite, sync
        self._number = -1  # of its data files, where it is published between other files
        parent, name = os.path.split(partial_path(path))
        os.makedirs(parent or ".", exist_ok=True)
        self.temporary = os.path.join(os.path.realpath(parent or "."), name)
        native().check_target(os.fsencode(path), overwrite)
        self._drop_failed()
        try:
            if os.path.lexists(self.temporary):
                self._check_idle()
            put_back = self._put_back()
            if os.path.lexists(self.temporary):
                shutil.rmtree(self.temporary)
            if put_back:
                native().check_target(os.fsencode(path), overwrite)
            os.mkdir(self.temporary)
            owner = os.path.join(self.temporary, OWNER)
            self._lock = os.open(
                owner, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
            )
            _LOCKS.add(self._lock)
            # Also where the save failed, the writer is dropped, or the program ends.
            self._remove = weakref.finalize(self, _remove, self.temporary, self._lock, os.getpid())
            locked = _locked(self._lock)
            os.write(self._lock, f"{socket.gethostname()} {os.getpid()}\n".encode())
        except OSError as error:
            raise CheckpointError(
                f"cannot make {self.temporary}: {error.strerror or error}"
            ) from error
        if not locked:
            self._remove.detach()
            _close(self._lock)
        self._check_owner(locked)
        self.thread = threading.current_thread()
        _OPEN[self.temporary] = self

    def _drop_failed(self) -> None:
        """Drops the folder of this process's last save to the name, if that has failed."""
        last = _OPEN.get(self.temporary)
        # One thread makes a save from plan to end, so that of this thread, or of one that is gone,
        # has failed.
        if last is not None and (
            last.failed or last.thread is threading.current_thread() or not last.thread.is_alive()
        ):
            last.drop()
        elif last is not None:
            del last
            gc.collect()  # exceptions of torch hold themselves, and with them the folder

    def _check_owner(self, locked: bool = True) -> None:
        """Two saves that begin or end in the same moment may take each other's folder for one of a
        killed save.
        """
        if not locked or not _owns(self._lock, self.temporary):
            raise CheckpointError(
                f"another save to {self.path} is running: it has taken {self.temporary}", code=2
            )

    def _put_back(self) -> bool:
        """Between two renames nothing had the name. Without its metadata,
        the old one was being removed.
        """
        path, old = self.path.rstrip("/"), f"{self.temporary}.old"
        if os.path.lexists(path) or not os.path.isfile(os.path.join(old, ".metadata")):
            return False
        os.rename(old, path)
        return True

    def _check_idle(self) -> None:
        if not stat.S_ISDIR(os.lstat(self.temporary).st_mode):
            raise CheckpointError(
                f"{self.temporary} is not a folder written by a save "
                "and blocks this one; remove it",
                code=2,
            )
        try:
            lock = os.open(os.path.join(self.temporary, OWNER), os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            pass  # a kill between its last two steps
        else:
            try:
                if not _locked(lock):
                    who = os.read(lock, 200).decode(errors="replace").split()
                    raise CheckpointError(
                        f"another save to {self.path} is running: process "
                        f"{who[-1] if who else '?'} on {who[0] if who else '?'} writes "
                        f"{self.temporary}",
                        code=2,
                    )
            finally:
                os.close(lock)

    def places(
        self, written: dict[MetadataIndex, _StorageInfo]
    ) -> dict[MetadataIndex, _StorageInfo]:
        """Where everything lies from now on: among other files,
        the ranks' files get names that none there has.
        """
        self._number = native().file_number(os.fsencode(self.path))
        if self._number < 0:
            return written
        old = {info.relative_path for info in written.values()}
        new = {name: f"{name.rpartition('_')[0]}_{self._number}.distcp" for name in old}
        for name in old:
            os.rename(os.path.join(self.temporary, name), os.path.join(self.temporary, new[name]))
        return {
            i: dataclasses.replace(at, relative_path=new[at.relative_path])
            for i, at in written.items()
        }

    def publish(self, data: Mapping[str, int], index: bytes, digests: bytes) -> None:
        """Writes `.metadata` and `lowbit.json`, and gives the folder its name in one step; an old
        checkpoint of that name goes then.

        Where other files have that folder, they stay, and it gets the files of this one:
        `.metadata` last, in one step.
        """
        self._check_owner()
        self._put("lowbit.json", digests)
        self._put(".metadata", index)
        self._check_owner()
        native().publish(
            os.fsencode(self.temporary),
            os.fsencode(self.path),
            self.overwrite,
            self.sync,
            self._number,
        )
        self._remove.detach()
        if self._number < 0:
            with contextlib.suppress(OSError):  # until now it kept others from the folder
                os.unlink(os.path.join(self.path, OWNER))
        _close(self._lock)

    def _put(self, name: str, content: bytes) -> None:
        path = os.path.join(self.temporary, name)
        try:
            with open(path, "xb") as file:
                file.write(content)
                file.flush()
                if self.sync:
                    os.fsync(file.fileno())
        except OSError as error:  # Python's own names no file
            final = os.path.join(self.path, name)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            message = (
                f"the disk is full while {final} is written"
                if full
                else f"cannot write {final}: {error.strerror}"
            )
            raise CheckpointError(message) from error

    def fail(self, alone: bool) -> None:
        """The save has failed here; other ranks may still write, unless this is the only one. From
        now on it stops no other save to the name, in any process.
        """
        self.failed = True
        if alone:
            self.drop()
        elif self._remove.alive:
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def drop(self) -> None:
        """Removes the folder, if it was not published."""
        self._remove()


def _locked(file: int) -> bool:
    """Whether this process now holds the lock; also where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _close(lock: int) -> None:
    _LOCKS.discard(lock)
    os.close(lock)


def _close_in_child() -> None:
    """A fork shares the locks of its parent, and would keep them when the parent has ended: a
    worker of a data loader, say.
    """
    for lock in _LOCKS:
        with contextlib.suppress(OSError):
            os.close(lock)
    _LOCKS.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _owns(lock: int, folder: str) -> bool:
    """Whether the lock's file is still the one in the folder."""
    try:
        return os.path.samestat(os.fstat(lock), os.lstat(os.path.join(folder, OWNER)))
    except OSError:
        return False


def _remove(temporary: str, lock: int, process: int) -> None:
    if os.getpid() != process:  # a fork has the finalizers of its parent
        return
    mine = _owns(lock, temporary)
    _close(lock)
    if mine:
        shutil.rmtree(temporary, ignore_errors=True)
