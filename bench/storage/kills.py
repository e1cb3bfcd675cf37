"""Saves that are killed: whether the last whole checkpoint is always there,
and what is broken is told from it.

    python -m bench.storage.kills  100 kills of saves on 2 ranks
    python -m bench.storage.kills --count 10 --ranks 4 --mib 64 --sync

Ranks save into one path over and over, each time other values. After a random moment one of them,
or all, get SIGKILL. Then the checkpoint of that name must hold the values of the last save that
ended, or of the next one, whole, with its digests; what the killed save left is refused by name,
and the next save removes it. Nothing is cleaned by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench.measuring import machine
from lowbit import checkpoint

PARTS = 8  # tensors of a rank


def state(seed: int, ranks: int, mib: int) -> dict[str, Any]:
    """Tensors of every rank, and a value; all of them say `seed`."""
    rows = mib * (1 << 20) // (4 * 1024 * PARTS * ranks)
    names = [f"{rank}.{part}" for rank in range(ranks) for part in range(PARTS)]
    tensors = {name: torch.full((max(1, rows), 1024), float(seed)) for name in names}
    return {"model": tensors, "seed": seed}


def save_for_ever(
    rank: int, folder: str, number: int, given: argparse.Namespace, pipe: Any
) -> None:
    """One rank of the program that is killed."""
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  what a rank says that loses another one
    store = f"file://{folder}/store{number}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=given.ranks)
    for seed in range(1, 1 << 30):
        # Each rank has tensors of its own, so that every one of them writes.
        whole = state(number * 1000 + seed, given.ranks, given.mib)
        mine = {k: t for k, t in whole["model"].items() if k.startswith(f"{rank}.")}
        writer = checkpoint.Writer(os.path.join(folder, "run"), sync_files=given.sync)
        dcp.save({"model": mine, "seed": whole["seed"]}, storage_writer=writer)
        if rank == 0:
            pipe.send((whole["seed"], time.monotonic()))


def killed(folder: str, number: int, given: argparse.Namespace, chance: random.Random) -> int:
    """Starts the ranks, waits for a save, and kills within the next two.
    Returns the seed of the last save that ended.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=save_for_ever, args=(rank, folder, number, given, there))
        for rank in range(given.ranks)
    ]
    for process in ranks:
        process.start()
    there.close()  # with the last rank: then `recv` raises EOFError, and does not wait
    told = [here.recv(), here.recv()]
    time.sleep(chance.random() * 2 * (told[1][1] - told[0][1]))
    victims = ranks if chance.random() < 0.5 else [chance.choice(ranks)]
    for process in victims:
        os.kill(process.pid or 0, signal.SIGKILL)
    time.sleep(0.02)
    for process in ranks:  # those that wait for it
        process.kill()
        process.join()
    with contextlib.suppress(EOFError, OSError):  # the last word may be cut off
        while True:
            told.append(here.recv())
    return int(told[-1][0])


def check(folder: str, last: int, given: argparse.Namespace) -> str:
    """What the kill left: "whole", or "whole, and one that is broken".
    AssertionError if there is anything else.
    """
    path = pathlib.Path(folder, "run")
    checkpoint.verify(path)
    loaded = state(0, given.ranks, given.mib)
    dcp.load(loaded, storage_reader=checkpoint.Reader(path), no_dist=True)
    seed = loaded["seed"]
    # It may have got its name in the moment before it would have said so.
    assert seed in (last, last + 1), (
        f"the checkpoint is of save {seed}, the last that ended is {last}"
    )
    for name, t in loaded["model"].items():
        assert bool((t == seed).all()), f"{name} is not of save {seed}"
    others = sorted(
        p.name
        for p in pathlib.Path(folder).iterdir()
        if p.name != "run" and not p.name.startswith("store")
    )
    assert others in ([], [".run.partial-saving"]), others
    if not others:
        return "whole"
    try:
        checkpoint.verify(pathlib.Path(folder, others[0]))
    except checkpoint.CheckpointError as error:
        assert others[0] in str(error)
        return "whole, and one that is broken"
    raise AssertionError(f"{others[0]} passes for a checkpoint")


def run(given: argparse.Namespace) -> Counter[str]:
    """All kills in one folder: each save after a kill clears what it left."""
    chance, seen = random.Random(given.seed), Counter[str]()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lowbit-kills-", dir=given.folder) as folder:
        for number in range(given.count):
            seen[check(folder, killed(folder, number, given, chance), given)] += 1
            if given.count > 20 and (number + 1) % 20 == 0:
                print(f"{number + 1} kills: {dict(seen)}", file=sys.stderr, flush=True)
    return seen


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=16, help="of a checkpoint")
    parser.add_argument(
        "--sync", action="store_true", help="wait for the disk, as Writer does by default"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=None, help="for the data (default: TMPDIR, else /tmp)")
    parser.add_argument("--json", type=pathlib.Path, default=None)
    return parser.parse_args(words)


def main() -> None:
    given = arguments()
    facts, start = machine.describe("cpu"), time.monotonic()
    seen = run(given)
    report = {
        "machine": facts,
        "kills": given.count,
        "ranks": given.ranks,
        "mib": given.mib,
        "sync": given.sync,
        "seed": given.seed,
        "left": dict(seen),
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(report, indent=1))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
