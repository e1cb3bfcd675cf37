"""Scripts on several ranks, as torchrun starts them, forked from a process that has imported torch
and lowbit: a start of them takes seconds of a core, in torchrun and in each rank.

    said = launch.run(script, ranks, "--option", cwd=folder, HF_HUB_OFFLINE="1")
    said = launch.run(script, ranks, imported=("deepspeed",), DS_ACCELERATOR="cpu")

Each rank is a process of its own, with the environment of torchrun, that ends as an interpreter
does. Where one fails, the others are killed. What torchrun itself does is test_elastic.py's.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

from tests.support.paths import importing_tests
from tests.support.ranks.forked import TORCH

PATIENCE = 20  # seconds for the ranks beside one that failed

_ended: Any = None  # the globals of a script live until its interpreter ends, as they do elsewhere


def _become(job: dict[str, Any], rank: int) -> None:
    """Goes on as the script."""
    global _ended
    for fd, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["out"], os.O_WRONLY | os.O_APPEND),
        (2, job["err"], os.O_WRONLY | os.O_APPEND),
    ):
        os.dup2(os.open(path, flags), fd)
    os.environ.clear()
    os.environ.update(job["environment"])
    if job["ranks"]:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    if "PYTHONWARNINGS" in job["environment"]:
        warnings.simplefilter(job["environment"]["PYTHONWARNINGS"])  # type: ignore[arg-type]
    os.chdir(job["cwd"])
    sys.argv = [job["script"], *job["arguments"]]
    given = job["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(pathlib.Path(job["script"]).parent), *filter(None, given)]
    _ended = runpy.run_path(job["script"], run_name="__main__")


def _wait(children: dict[int, int]) -> dict[int, int]:
    """The exit code of each rank, -9 of those that were killed since another one had failed."""
    codes: dict[int, int] = {}
    until = float("inf")
    while children:
        pid, status = os.waitpid(-1, 0 if until == float("inf") else os.WNOHANG)
        if pid:
            codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
            if any(codes.values()):
                until = min(until, time.monotonic() + PATIENCE)
        elif time.monotonic() > until:
            for left in children:
                os.kill(left, signal.SIGKILL)
            until = float("inf")
        else:
            time.sleep(0.05)
    return codes


def _serve(imported: list[str]) -> None:
    for module in (*TORCH, "lowbit", *imported):
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))  # of which a fork has one; frameworks have more
    assert imported or threads == 1, f"{threads} threads"
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        children: dict[int, int] = {}
        for rank in range(max(1, job["ranks"])):
            child = os.fork()
            if child == 0:
                return _become(job, rank)
            children[child] = rank
        print(json.dumps(_wait(children)), flush=True)


# Of this process of pytest, by what they have imported and the environment in which they did: one
# without imports and one with some, which are hundreds of megabytes.
_servers: dict[Any, subprocess.Popen] = {}


def _started(imported: tuple[str, ...], environment: dict[str, str]) -> subprocess.Popen:
    for key in [key for key in _servers if imported and key[0]]:
        _end(_servers.pop(key))
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, *imported],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=importing_tests(**{**environment, "OMP_NUM_THREADS": "1"}),
        start_new_session=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen) -> None:
    """Kills it and the ranks that it has: their session is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def run(
    script: str | os.PathLike[str],
    ranks: int,
    *arguments: object,
    cwd: str | os.PathLike[str] = ".",
    timeout: float = 1800,
    imported: tuple[str, ...] = (),
    **environment: str,
) -> str:
    """What the script printed on so many ranks (0: without a process group's environment), each
    with one thread. AssertionError with the end of standard error where one fails.

    Args:
        imported: modules that are imported once, before the ranks are forked, by a process that has
            the environment.
    """
    from torch.distributed import TCPStore

    assert "LOWBIT_ISA" not in environment, "lowbit was imported before the ranks were forked"
    said = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment}
    said = importing_tests(**said)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if ranks:
        said |= {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "tests",  # Lightning and others know torchrun by it
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
        }
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        job = {
            "script": os.path.abspath(script),
            "ranks": ranks,
            "arguments": list(map(str, arguments)),
            "cwd": os.path.abspath(cwd),
            "environment": said,
            "out": out.name,
            "err": err.name,
        }
        given = environment if imported else {}
        key = imported, tuple(sorted(given.items()))
        server = _servers.get(key) or _servers.setdefault(key, _started(imported, given))
        assert server.stdin and server.stdout
        print(json.dumps(job), file=server.stdin, flush=True)
        ready, _, _ = select.select([server.stdout], [], [], timeout)
        answer = server.stdout.readline() if ready else ""
        printed, errors = out.read(), err.read()
    if not answer:
        _end(_servers.pop(key))
        late = f"no end within {timeout} s"
        why = f"the process that imports {imported} has ended" if ready else late
        raise AssertionError(f"{script}: {why}\n{errors[-4000:]}")
    codes = json.loads(answer)
    assert not any(codes.values()), f"{script}: {codes}\n{(printed + errors)[-4000:]}"
    return printed


if __name__ == "__main__":
    _serve(sys.argv[1:])
