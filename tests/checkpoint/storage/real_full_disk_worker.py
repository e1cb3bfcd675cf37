"""A rank of saves to a small file system, which is full in the second: real_full_disk_worker.py
FOLDER RANK RANKS. Prints JSON.
"""

import gc
import json
import os
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint

SMALL, LARGE = 1 << 10, 4 << 20  # elements of 4 bytes; the file system has less than the large one


def main(folder: pathlib.Path, rank: int, ranks: int) -> None:
    warnings.filterwarnings("ignore")
    store = folder.parent / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)

    def save(value: float, large: bool) -> str:
        elements = LARGE if large and rank == 1 else SMALL
        state = {f"of rank {rank}": torch.full((elements,), value)}
        text = "no error"
        try:
            dcp.save(state, storage_writer=checkpoint.Writer(folder / "run"))
        except dcp.api.CheckpointException as error:
            text = f"{type(error).__name__}: {error}"
        dist.barrier()
        return text

    def used() -> int:
        disk = os.statvfs(folder)
        return (disk.f_blocks - disk.f_bfree) * disk.f_frsize

    def loaded() -> float:
        state = {f"of rank {rank}": torch.zeros(SMALL)}
        dcp.load(state, storage_reader=checkpoint.Reader(folder / "run"))
        return float(state[f"of rank {rank}"].unique())

    def left() -> list[str]:
        gc.collect()  # torch's exception refers to itself, and it holds the save with its folder
        dist.barrier()
        names = sorted(os.listdir(folder))
        dist.barrier()  # a rank that is ahead begins the next save
        return names

    said = [save(1, False), save(2, True), used(), loaded(), left(), save(3, False), loaded()]
    dist.destroy_process_group()
    print(json.dumps(said))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
