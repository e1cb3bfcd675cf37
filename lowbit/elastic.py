"""Checkpoint folders for runs that are killed and restarted: where to save a step,
and which save to resume from.
"""

from __future__ import annotations

import os
import pathlib
import re
import warnings

from lowbit import checkpoint
from lowbit.checkpoint.object_store import is_url, local_path

__all__ = ["latest", "step_folder"]

_STEP = re.compile(r"step-(\d+)")
_IO_ERROR = 1  # CheckpointError.code


def step_folder(folder: str | os.PathLike[str], step: int) -> pathlib.Path:
    """The folder for a step's checkpoint, such as `folder`/step-00001000; names sort like steps.

    Args:
        folder: the folder of all checkpoints of a run.
        step: the number of the step, from 0.

    Raises:
        ValueError: step is negative, or folder is a URL.
    """
    if step < 0:
        raise ValueError(f"step is {step}; steps are counted from 0")
    return _local(folder) / f"step-{step:08d}"


def latest(folder: str | os.PathLike[str], *, values: bool = False) -> pathlib.Path | None:
    """The newest complete checkpoint among the step folders in `folder`,
    or None if there is no checkpoint or no such folder.

    A killed save leaves a folder without `.metadata`, which is skipped. So is any other checkpoint
    that is not whole, or that lowbit cannot read, with a warning that says why. Every rank may call
    this while nothing is written, as at the start of a run, and gets the same answer.

    Args:
        folder: the folder that `step_folder` got.
        values: also check all values and checksums, which reads the whole checkpoint. False
            (default) checks only its structure.

    Raises:
        ValueError: folder is a URL.
        NotADirectoryError: folder is a file.
        CheckpointError: the folder or a checkpoint could not be read, for lack of permission, of
            open files or of memory, or because the disk failed. Its state is not known then, and an
            older step may not be what other ranks find. Or lowbit can read none of the checkpoints,
            and does not know that they are damaged: the run must not begin anew.
        ImportError: lowbit was built without its checkpoint module.
    """
    place = _local(folder)
    try:
        found = list(place.iterdir())
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise
    except OSError as error:
        raise checkpoint.CheckpointError(f"{place}: {error.strerror}", _IO_ERROR) from error
    steps = [(int(m[1]), path) for path in found if (m := _STEP.fullmatch(path.name))]
    unread: checkpoint.CheckpointError | None = None
    for _, path in sorted(steps, reverse=True):
        try:
            if not values:
                checkpoint.inspect(path)
                return path
            if checkpoint.verify(path, opaque=True)["ok"]:
                return path
            why = "a value or a checksum is wrong; checkpoint.verify says which"
        except checkpoint.CheckpointError as error:
            if error.code == _IO_ERROR:
                raise
            if not os.path.lexists(path / ".metadata"):
                continue  # a save that did not finish
            why = str(error)
            if error.cause != "damaged" and unread is None:
                unread = error
        warnings.warn(f"{path} is skipped: {why}", stacklevel=2)
    if unread is not None:
        raise checkpoint.CheckpointError(
            f"{place}: none of its checkpoints can be read, and not all are known to be damaged; "
            f"move them away to begin anew. The newest that is not: {unread}",
            unread.code,
            cause=unread.cause,
        ) from unread
    return None


def _local(folder: str | os.PathLike[str]) -> pathlib.Path:
    if is_url(folder):
        raise ValueError(
            f"{folder}: lowbit.elastic knows local folders only; give load_optimizer or Reader the "
            "URL of the step to resume from"
        )
    return pathlib.Path(os.fsdecode(local_path(folder)))
