"""How a program that is one rank of several ends."""

import gc

import torch.distributed as dist


def leave() -> None:
    """Waits for the other ranks, for one that ends first would close what they still use, and
    leaves the process group. A thread of gloo that drops the last tensor of a collective while the
    interpreter shuts down would abort the process.
    """
    gc.collect()  # gloo aborts at exit where a sharded tensor outlives it
    dist.barrier()
    dist.destroy_process_group()
