"""A folder that several ranks write together, and that appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import threading
import weakref

from lowbit.checkpoint.commands import CheckpointError
from lowbit.checkpoint.reader import module

OWNER = ".owner"  # in the folder while it is written; its writer holds a lock on it
_OPEN: weakref.WeakValueDictionary[str, PartialFolder] = weakref.WeakValueDictionary()


def partial_path(path: str) -> str:
    """The name of the folder until it is complete: the same on every rank."""
    parent, name = os.path.split(path.rstrip("/"))
    return os.path.join(parent, f".{name}.partial-saving")


class PartialFolder:
    """The folder of one save, as its coordinator has it: made anew, then published or removed.

    What a killed save left is removed first: nobody holds the lock on it any more. So is what a failed one of this process left.

    Raises:
        CheckpointError: the target may not be replaced, another save to it is running, or the folder cannot be made.
    """

    thread: threading.Thread  # that makes it

    def __init__(self, path: str, overwrite: bool) -> None:
        self.path, self.overwrite = path, overwrite
        self.temporary = partial_path(path)
        os.makedirs(os.path.dirname(self.temporary) or ".", exist_ok=True)
        module().check_target(os.fsencode(path), overwrite)
        last = _OPEN.get(self.temporary)
        # One thread makes a save from plan to end, so that of this thread, or of one that is gone, has failed.
        if last is not None and (last.thread is threading.current_thread() or not last.thread.is_alive()):  # fmt: skip
            last.drop()
        if os.path.lexists(self.temporary):
            self._clear()
        try:
            os.mkdir(self.temporary)
        except OSError as error:
            raise CheckpointError(f"cannot make {self.temporary}: {error.strerror}") from error
        owner = os.path.join(self.temporary, OWNER)
        self._lock = os.open(owner, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        os.write(self._lock, f"{socket.gethostname()} {os.getpid()}\n".encode())
        _locked(self._lock)
        self.thread = threading.current_thread()
        _OPEN[self.temporary] = self
        # Also where the save failed, the writer is dropped, or the program ends.
        self._remove = weakref.finalize(self, _remove, self.temporary, self._lock, os.getpid())

    def _clear(self) -> None:
        try:
            lock = os.open(os.path.join(self.temporary, OWNER), os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            pass  # a kill between its last two steps
        else:
            with os.fdopen(lock, "r+") as owner:
                if not _locked(owner.fileno()):
                    who = owner.read(200).split()
                    raise CheckpointError(
                        f"another save to {self.path} is running: process {who[-1] if who else '?'} on "
                        f"{who[0] if who else '?'} writes {self.temporary}",
                        code=2,
                    )
        shutil.rmtree(self.temporary)

    def publish(self) -> None:
        """Gives the folder its name in one step; an old checkpoint of that name goes then."""
        os.unlink(os.path.join(self.temporary, OWNER))
        module().publish(os.fsencode(self.temporary), os.fsencode(self.path), self.overwrite)
        self._remove.detach()
        os.close(self._lock)

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


def _remove(temporary: str, lock: int, process: int) -> None:
    if os.getpid() != process:  # a fork has the finalizers of its parent
        return
    os.close(lock)
    shutil.rmtree(temporary, ignore_errors=True)
