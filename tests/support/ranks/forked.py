"""Processes that may be killed, forked from one that has imported torch: a start of torch takes
seconds of a core.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import TextIO

CONTEXT = multiprocessing.get_context("forkserver")
TORCH = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",  # with torch._dynamo, which an optimizer imports too
    "torch.distributed.tensor.parallel",
)
# lowbit begins a thread where OMP_NUM_THREADS lets it: a fork would lose that.
LOWBIT = ("lowbit.checkpoint", "lowbit.fsdp1") if os.environ.get("OMP_NUM_THREADS") == "1" else ()
CONTEXT.set_forkserver_preload([*TORCH, *LOWBIT])


def _work(there, target: Callable, arguments: tuple) -> None:
    os.dup2(there.fileno(), 1)
    there.close()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    target(*arguments)


def start(
    target: Callable, *arguments: object
) -> tuple[multiprocessing.process.BaseProcess, TextIO]:
    """The process that calls `target`, and what it prints;
    the end of the text is the end of the process.
    """
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_work, args=(there, target, arguments), daemon=True)
    process.start()
    there.close()
    printed = os.fdopen(os.dup(here.fileno()))
    here.close()
    return process, printed
