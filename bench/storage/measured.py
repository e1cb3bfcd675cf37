"""lowbit.checkpoint.Writer and Reader beside torch's FileSystemWriter and FileSystemReader, and
beside `cp`, on ranks of one machine.

    python -m bench.storage               1 GiB of float32 AdamW state, saved on 2 ranks, loaded on
                                          2 and on 4
    python -m bench.storage --state 8bit  as many parameters' 8-bit state
    python -m bench.storage --gib 0.1 --rounds 2 --json out/storage.json
    python -m bench.storage --record      both; bench/results/storage.json and docs/bench-
                                          storage.md: minutes on a quiet machine
    python -m bench.storage --page        the page alone, from what is recorded here and of `python
                                          -m bench.storage.kills`

Contestants alternate in one run. A time is that of the slowest rank; ratios compare best times. "in
the page cache" does not wait for the disk, "on disk" does: `cp` is then followed by a sync. Bytes
are those that all ranks read of files, as the kernel counts them (rchar), and what they copy from
mapped files, which it does not count, beside the bytes of their shards.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bench import ROOT
from bench.measuring import machine
from bench.storage import page as storage_page
from lowbit import checkpoint

RESULTS = ROOT / "bench" / "results" / "storage.json"
KILLS = ROOT / "bench" / "results" / "kills.json"
# And how many times as many parameters as have 1 GiB of float32 state: 8-bit state of the same
# model, and of a model with as many bytes of it.
STATES = {"float32": 1, "8bit": 1, "8bit, 4 times the parameters": 4}
RUNS = (("save", 2), ("load0", 2), ("load0", 4), ("load1", 2))  # and the ranks of each
TIMES: list[dist.ProcessGroup] = []  # that times are told through
Turn = tuple[float, float, float]  # seconds, of processors, and of the collector
SHAPES = [(4096, 1024), (1024, 4096), (3072, 1024), (1024, 1024), (1024,)]


def state(kind: str, gib: float, dim: int = 0) -> dict[str, Any]:
    """AdamW state of as many parameters as have `gib` GiB of it in float32, times those of the
    kind, sharded along `dim`.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    left, out, i = int(STATES[kind] * gib * 2**30), {}, 0
    generator = torch.Generator().manual_seed(0)
    while left > 0:
        shape = SHAPES[i % len(SHAPES)]
        moments: dict[str, torch.Tensor]
        if kind.startswith("8bit") and len(shape) == 2:
            codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.rand(shape[0], shape[1] // 256, generator=generator)
            moments = {
                "exp_avg_dynamic8": codes,
                "exp_avg_dynamic8_scale": scales,
                "exp_avg_sq_dynamic8": codes,
                "exp_avg_sq_dynamic8_scale": scales,
            }
        else:
            values = torch.rand(shape, generator=generator)
            moments = {"exp_avg": values, "exp_avg_sq": values}
        cut = {
            k: distribute_tensor(t, mesh, [Shard(dim if t.dim() > dim else 0)])
            for k, t in moments.items()
        }
        out[f"layers.{i // 5}.{i % 5}.weight"] = {"step": torch.tensor(7.0), **cut}
        left -= 8 * math.prod(shape)
        i += 1
    return {"optim": {"state": out, "groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]}}


def local(tree: Any) -> int:
    """Bytes of this rank's tensors."""
    if isinstance(tree, dict):
        return sum(map(local, tree.values()))
    if isinstance(tree, (list, tuple)):
        return sum(map(local, tree))
    if not isinstance(tree, torch.Tensor):
        return 0
    return (tree._local_tensor if isinstance(tree, DTensor) else tree).nbytes


class Collector:
    """Seconds of this process in full passes of Python's garbage collector,
    which any allocation may begin.
    """

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        gc.callbacks.append(self._told)

    def _told(self, phase: str, about: dict[str, int]) -> None:
        if about["generation"] == 2:
            now = time.perf_counter()
            self.seconds += now - self._began if phase == "stop" else 0.0
            self._began = now


COLLECTOR = Collector()


class Nothing(checkpoint.Writer):
    """Writes nothing: what a save takes for plans and for what ranks tell each other."""

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._drop()


def timed(work: Callable[[], object]) -> Turn:
    """Seconds of the slowest rank, processor seconds of all ranks (what else runs on the machine
    changes those far less), and of the rank with most of them in full passes of Python's garbage
    collector."""
    dist.barrier()
    start, used, collected = time.perf_counter(), time.process_time(), COLLECTOR.seconds
    work()
    mine = (
        time.perf_counter() - start,
        time.process_time() - used,
        COLLECTOR.seconds - collected,
    )
    # A group of its own: an async save continues, and its collectives are those of the default one.
    ranks = [torch.empty(3, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, torch.tensor(mine, dtype=torch.float64), group=TIMES[0])
    seconds, processor, collector = zip(*(t.tolist() for t in ranks), strict=True)
    return max(seconds), sum(processor), max(collector)


def bytes_read() -> int:
    """What this process has read of files so far; gloo's sockets are not among it."""
    return int(pathlib.Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def all_sum(number: int) -> int:
    total = torch.tensor(number, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total)


def copied(source: str, target: str, sync: bool) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    if sync:
        subprocess.run(["sync", *map(str, pathlib.Path(target).iterdir())], check=True)


def saves(folder: str, kind: str, gib: float, rounds: int) -> dict[str, list[Turn]]:
    tree, mine = state(kind, gib), os.path.join(folder, "out")
    flat = torch.empty(local(tree), dtype=torch.uint8)
    source = flat.clone()
    kept, theirs = (
        checkpoint.Writer(mine),
        dcp.FileSystemWriter(mine, cache_staged_state_dict=False),
    )
    waiting: list[Any] = []

    def stall(writer: Any) -> None:
        waiting.append(dcp.async_save(tree, storage_writer=writer))

    def cp(sync: bool) -> None:
        if dist.get_rank() == 0:
            copied(os.path.join(folder, "torch"), mine, sync)
        dist.barrier()

    turns = {
        "save, page cache: cp": lambda: cp(False),
        "save, page cache: lowbit": lambda: dcp.save(
            tree, storage_writer=checkpoint.Writer(mine, sync_files=False)
        ),
        "save, page cache: torch": lambda: dcp.save(
            tree, storage_writer=dcp.FileSystemWriter(mine, sync_files=False)
        ),
        "save, page cache: nothing": lambda: dcp.save(tree, storage_writer=Nothing(mine)),
        "save, on disk: cp": lambda: cp(True),
        "save, on disk: lowbit": lambda: dcp.save(tree, storage_writer=checkpoint.Writer(mine)),
        "save, on disk: torch": lambda: dcp.save(tree, storage_writer=dcp.FileSystemWriter(mine)),
        "stall: copy of memory": lambda: flat.copy_(source),
        "stall: lowbit": lambda: stall(kept),
        "stall: torch": lambda: stall(theirs),
    }
    for who, writer in (("torch", dcp.FileSystemWriter), ("lowbit", checkpoint.Writer)):
        dcp.save(tree, storage_writer=writer(os.path.join(folder, who)))
    times: dict[str, list[Turn]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            if dist.get_rank() == 0:
                shutil.rmtree(mine, ignore_errors=True)
                os.sync()  # or a turn pays for what others have left to write
            times[name].append(timed(turn))
            while waiting:
                waiting.pop().result()
    return times


def loads(folder: str, kind: str, gib: float, rounds: int, dim: int) -> dict[str, Any]:
    tree = state(kind, gib, dim)
    needed, times, read = all_sum(local(tree)), {}, {}
    readers = {
        "lowbit": lambda: checkpoint.Reader(os.path.join(folder, "lowbit")),
        "lowbit, verify=False": lambda: checkpoint.Reader(
            os.path.join(folder, "lowbit"), verify=False
        ),
        "torch": lambda: dcp.FileSystemReader(os.path.join(folder, "torch")),
    }
    for _ in range(rounds):
        for name, reader in readers.items():
            before, source = bytes_read(), reader()
            times.setdefault(name, []).append(
                timed(lambda r=source: dcp.load(tree, storage_reader=r))
            )
            mapped = getattr(source, "bytes_mapped", 0)
            read[name] = round(all_sum(bytes_read() - before + mapped) / needed, 3)
    return {"seconds": times, "bytes needed": needed, "bytes read to bytes needed": read}


def work(
    rank: int, ranks: int, folder: str, what: str, kind: str, given: argparse.Namespace
) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = os.path.join(folder, f"store-{what}-{ranks}")
    dist.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    TIMES.append(dist.new_group())
    if what == "save":
        out: Any = saves(folder, kind, given.gib, given.rounds)
    else:
        out = loads(folder, kind, given.gib, given.rounds, int(what[-1]))
    if rank == 0:
        pathlib.Path(folder, f"{what}-{ranks}.json").write_text(json.dumps(out))
    dist.destroy_process_group()


def measured(kind: str, given: argparse.Namespace) -> dict[str, Any]:
    """The times and bytes of a kind of state, by what was done and on how many ranks."""
    found = {}
    # A fork of a process that has imported torch; not lowbit, whose threads a fork would lose.
    multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint"])
    with tempfile.TemporaryDirectory(prefix="lowbit-bench-", dir=given.folder) as folder:
        for what, ranks in RUNS:
            given_to_each = (ranks, folder, what, kind, given)
            mp.start_processes(work, given_to_each, ranks, start_method="forkserver")
            found[f"{what}-{ranks}"] = json.loads(
                pathlib.Path(folder, f"{what}-{ranks}.json").read_text()
            )
    return found


def file_system(folder: str | None) -> str:
    command = ["df", "--output=fstype", folder or tempfile.gettempdir()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[-1].strip() if done.returncode == 0 else "unknown"


def write_page() -> None:
    result, kills = (json.loads(path.read_text()) for path in (RESULTS, KILLS))
    (ROOT / "docs" / "speed" / "bench-storage.md").write_text(storage_page.page(result, kills))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the float32 state")
    parser.add_argument(
        "--state",
        nargs="+",
        choices=STATES,
        default=None,
        help="default: float32; with --record, all",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="for the data (default: TMPDIR, else /tmp)")
    parser.add_argument("--json", type=pathlib.Path, default=None)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    given = parser.parse_args()
    if given.record and given.state:
        parser.error("--record measures every state: leave --state out, or give --json a file")
    if given.page:
        write_page()
        return
    result: dict[str, Any] = {
        "machine": machine.describe("cpu"),
        "file_system": file_system(given.folder),
        "gib": given.gib,
        "rounds": given.rounds,
        "synced": True,
        "states": {},
    }
    for kind in STATES if given.record else given.state or ["float32"]:
        found = result["states"][kind] = measured(kind, given)
        print(f"\n{kind}\n\n{storage_page.saves(found)}\n\n{storage_page.loads(found)}", flush=True)
    print(f"\n{storage_page.aims(result)}")
    for file in [*([given.json] if given.json else []), *([RESULTS] if given.record else [])]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
    if given.record:
        write_page()
