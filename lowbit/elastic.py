"""Checkpoint folders for runs that are killed and restarted: where to save a step, and which save to resume from."""

from __future__ import annotations

import os
import pathlib
import re

from lowbit import checkpoint

__all__ = ["latest", "step_folder"]

_STEP = re.compile(r"step-(\d+)")


def step_folder(folder: str | os.PathLike[str], step: int) -> pathlib.Path:
    """The folder for a step's checkpoint, such as `folder`/step-00001000; names sort like steps.

    Args:
        folder: the folder of all checkpoints of a run.
        step: the number of the step, from 0.

    Raises:
        ValueError: step is negative.
    """
    if step < 0:
        raise ValueError(f"step is {step}; steps are counted from 0")
    return pathlib.Path(folder) / f"step-{step:08d}"


def latest(folder: str | os.PathLike[str], *, values: bool = False) -> pathlib.Path | None:
    """The newest complete checkpoint among the step folders in `folder`, or None if there is none or no such folder.

    A killed save leaves a folder without `.metadata`, or with files that are too short. Such folders are skipped, as
    are damaged files. Every rank may call this while nothing is written, as at the start of a run, and gets the same
    answer.

    Args:
        folder: the folder that `step_folder` got.
        values: also check all values and checksums, which reads the whole checkpoint. False (default) checks only its
            structure.

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
