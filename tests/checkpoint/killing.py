"""recipes/elastic.py with a rank that is killed: KILL says where, as RANK:WHERE:STEP. The marker
file lets it happen once.

WHERE is "step" (in the middle of the optimizer's step), "save" (before a rank's file of the
checkpoint is whole) or "load".
"""

import os
import pathlib
import runpy
import signal
import sys

import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.filesystem as filesystem

from lowbit.optim import one_step
from tests.support.paths import RECIPES

RANK, WHERE, AT = os.environ["KILL"].split(":")
MARKER = pathlib.Path(os.environ["MARKER"])
mine = os.environ["RANK"] == RANK
seen = {"step": 0, "save": 0, "load": 0}


def die(what: str) -> None:
    seen[what] += 1
    if mine and what == WHERE and seen[what] == int(AT) and not MARKER.exists():
        MARKER.write_text(f"{what} {seen[what]}")
        os.kill(os.getpid(), signal.SIGKILL)


phases, write, load = (
    one_step.run_phases,
    filesystem.FileSystemWriter.write_data,
    dcp.load,
)


def killed_phases(*args, **kwargs):  # after forward and backward, before the state changes
    die("step")
    return phases(*args, **kwargs)


def killed_write(self, plan, planner):
    seen["save"] += 1
    if mine and WHERE == "save" and seen["save"] == int(AT) and not MARKER.exists():
        (pathlib.Path(self.path) / f"__{RANK}_0.distcp").write_bytes(
            b"PK\3\4 the first bytes of it"
        )
        MARKER.write_text("save")
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, plan, planner)


def killed_load(*args, **kwargs):
    die("load")
    return load(*args, **kwargs)


one_step.run_phases = killed_phases
filesystem.FileSystemWriter.write_data = killed_write
dcp.load = killed_load
recipe = RECIPES / "elastic.py"
sys.argv[0] = str(recipe)
runpy.run_path(str(recipe), run_name="__main__")
