"""Worker processes that stay, forked from one that has imported torch, so that a case on several
ranks costs no start of it: each case has a process group of its own over gloo.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing.connection
import os
import pathlib
import pickle
import pkgutil
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

from tests.support.ranks.forked import CONTEXT

PATIENCE = 20  # seconds for the ranks beside one that failed
LIMIT = 900  # seconds: against a case that waits for ever, not a judgement of how long one takes


def _work(rank: int, pipe) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import _redistribute, debug

    from tests.support import wrap

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    imported = set()
    while sent := pipe.recv_bytes():
        try:
            store, ranks, function, arguments = pickle.loads(sent)  # imports the function's module
            if isinstance(function, str):
                function = pkgutil.resolve_name(function)
            if function.__module__ not in imported:
                imported.add(function.__module__)
                # what is imported stays: a collection that looks through torch takes longer than
                # most cases do
                gc.freeze()
            init = f"file://{store}"
            dist.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
            pipe.send(("done", function(*arguments)))
        except BaseException:  # torch's CheckpointException is one
            pipe.send(("failed", traceback.format_exc()))
        else:
            if dist.is_initialized():
                # A rank that ends first would close what another one still connects; and one that
                # leaves the barrier first closes what the last one still reads.
                with contextlib.suppress(RuntimeError):
                    dist.barrier()
        finally:
            wrap.shared_mesh.cache_clear()
            gc.collect()  # gloo aborts where a sharded tensor outlives it
            # DTensor's caches keep meshes, which compare equal to later ones though their groups
            # are gone.
            debug._clear_sharding_prop_cache()
            _redistribute._gen_transform_infos.cache_clear()
            if dist.is_initialized():
                dist.destroy_process_group()


MOST_THREADS = 40  # of a worker: 3 for each process group over gloo


class Pool:
    """As many processes as the largest case so far had ranks. `folder` is where cases write."""

    def __init__(self, folder: str, most_threads: int = MOST_THREADS) -> None:
        self.folder, self.most_threads = folder, most_threads
        self._count = itertools.count()
        self._workers: list = []

    def _crowded(self) -> bool:
        """Whether process groups of earlier cases are left in a worker.

        Hooks that nobody removed keep them, or torch's caches. The threads of one wake 100 times
        a second: a hundred groups in each of eight workers took half of a machine.
        """
        tasks = (pathlib.Path(f"/proc/{process.pid}/task") for process, _ in self._workers)
        return any(
            task.exists() and len(list(task.iterdir())) > self.most_threads for task in tasks
        )

    def _start(self, ranks: int) -> None:
        for rank in range(len(self._workers), ranks):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_work, args=(rank, there), daemon=True)
            process.start()
            self._workers.append((process, here))

    def run(self, ranks: int, function: Callable | str, *arguments):
        """`function(*arguments)` on so many ranks; what each returned. AssertionError with every
        rank's traceback where one failed. "MODULE:FUNCTION" is a module that only ranks import.
        """
        if self._crowded():
            self.close()
        self._start(ranks)
        store = pathlib.Path(self.folder) / f"store{id(self)}-{next(self._count)}"
        job = ForkingPickler.dumps((str(store), ranks, function, arguments))
        for _, pipe in self._workers[:ranks]:
            pipe.send_bytes(job)
        answers = self._answers(ranks)
        failed = [f"rank {i}:\n{answers[i][1]}" for i in range(ranks) if answers[i][0] != "done"]
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return [answers[i][1] for i in range(ranks)]

    def _answers(self, ranks: int) -> dict[int, tuple]:
        """What each rank said. One that failed leaves others waiting in a collective: they get
        PATIENCE more.
        """
        answers: dict[int, tuple] = {}
        until = time.monotonic() + LIMIT
        while len(answers) < ranks:
            waiting = {self._workers[i][1]: i for i in range(ranks) if i not in answers}
            ready = multiprocessing.connection.wait(waiting, max(0.0, until - time.monotonic()))
            if not ready:
                return answers | {i: ("late", "no answer") for i in waiting.values()}
            for pipe in ready:
                i = waiting[pipe]
                try:
                    answers[i] = pipe.recv()
                except EOFError:
                    code = self._workers[i][0].exitcode
                    answers[i] = ("failed", f"rank {i} ended with {code}")
                if answers[i][0] != "done":
                    until = min(until, time.monotonic() + PATIENCE)
        return answers

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()  # its own children, by their handles
            process.join()
        self._workers = []
