"""Runs that are killed and start again: which checkpoint to go on from, and where the next one goes."""

from __future__ import annotations

import os
import pathlib
import re

from lowbit import checkpoint

__all__ = ["latest", "step_folder"]

_STEP = re.compile(r"step-(\d+)")


def step_folder(folder: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Where the checkpoint of a step goes: `folder`/step-00001000, so that names sort as steps do."""
    if step < 0:
        raise ValueError(f"step is {step}; steps are counted from 0")
    return pathlib.Path(folder) / f"step-{step:08d}"


def latest(folder: str | os.PathLike[str], *, values: bool = False) -> pathlib.Path | None:
    """The newest whole checkpoint among the step folders in `folder`; None where there is none, and where there is no such folder.

    A save that was killed leaves a folder without `.metadata`, or with files that are too short: it is passed over, as is a file that is damaged.
    Every rank may ask for itself while nobody writes, as at the start of a run, and all find the same.

    Args:
        folder: what `step_folder` was given.
        values: read everything, checksums and values too, not only the structure. Slower by the time to read the checkpoint.

    Raises:
        ImportError: lowbit was built without its checkpoint module.
    """
    place = pathlib.Path(folder)
    if not place.is_dir():
        return None
    steps = [(int(m[1]), path) for path in place.iterdir() if (m := _STEP.fullmatch(path.name))]
    for _, path in sorted(steps, reverse=True):
        try:
            if not values:
                checkpoint.inspect(path)
                return path
            if checkpoint.verify(path)["ok"]:
                return path
        except checkpoint.CheckpointError:
            continue
    return None
