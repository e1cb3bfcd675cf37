"""Checkpoints: saving and loading optimizer state by torch's two ways, and resharding files,
relative to a copy of the same file.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator

import torch

from bench.contestants.baselines import Torch
from bench.contestants.contestant import Contestant
from bench.contestants.ours import Eight
from bench.measuring import clock
from bench.measuring.settings import Settings
from bench.speed.step import Params, Say
from bench.storage import ckpt

SHAPE = (1024, 1024)


def run(settings: Settings, say: Say) -> Iterator[dict]:
    """Uses as many parameters as have `settings.gib` of float32 state."""
    torch.set_num_threads(max(settings.threads))
    count = max(1, int(settings.gib * 2**30 / 8) // (SHAPE[0] * SHAPE[1]))
    params = Params([SHAPE] * count, settings.device)
    rows = []
    with tempfile.TemporaryDirectory(prefix="lowbit-bench-") as folder:
        for entry in (Torch(), Eight()):
            say(f"{entry.name}: saves and loads the state of {count} Mi parameters")
            entry.prepare(params.of(entry.dtype))
            rows.append(saved_and_loaded(entry, pathlib.Path(folder), settings))
    tool = shutil.which("lowbit-ckpt")
    say("lowbit-ckpt against cp" if tool else "lowbit-ckpt is not on PATH")
    files = ckpt.compare(settings.gib, min(settings.rounds, 3), None, tool) if tool else None
    yield {"parameters": params.shapes[0][0] * SHAPE[1] * count, "rows": rows, "tool": files}


def saved_and_loaded(entry: Contestant, folder: pathlib.Path, settings: Settings) -> dict:
    """Median seconds of each operation, and bytes on disk. Files are in the page cache, so this is
    the time of the software.
    """
    import torch.distributed.checkpoint as dcp

    opt, file, directory, copied = (
        entry.opt,
        folder / "state.pt",
        folder / "dcp",
        folder / "copy.pt",
    )

    def whole() -> dict:
        return {
            "optim": {
                f"{i}.{key}": t
                for i, state in enumerate(opt.state.values())
                for key, t in state.items()
            }
        }

    verbs = {
        "torch.save": lambda: torch.save(opt.state_dict(), file),
        "copy of the file": lambda: shutil.copyfile(file, copied),
        "torch.load": lambda: opt.load_state_dict(torch.load(file, weights_only=True)),
        "dcp.save": lambda: dcp.save(whole(), checkpoint_id=directory, no_dist=True),
        "dcp.load": lambda: dcp.load(whole(), checkpoint_id=directory, no_dist=True),
    }
    turns = [(name, lambda verb=verb: clock.seconds(verb, "cpu")) for name, verb in verbs.items()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, turn in turns:  # in this order: files must be saved before they are loaded
            turn()
        times = clock.rounds(turns, min(settings.rounds, 5), 1e9)
    made = {
        "name": entry.name,
        "bytes": os.path.getsize(file),
        "state_bytes": entry.state_bytes(),
        "seconds": {name: clock.median(t) for name, t in times.items()},
        "to_copy": {name: clock.ratio(t, times["copy of the file"]) for name, t in times.items()},
    }
    shutil.rmtree(directory)
    for path in (file, copied):
        path.unlink()
    return made
