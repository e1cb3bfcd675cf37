"""An interpreter that exits while another of its threads still reads a checkpoint."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from lowbit.checkpoint import native
from tests.support.require import need

pytestmark = pytest.mark.slow

need("ckpt", native._checkpoint is not None, "lowbit._checkpoint is not built", module=True)

ONE = {"OMP_NUM_THREADS": "1"}
SCRIPT = """
    import sys, threading
    import lowbit
    from lowbit import checkpoint

    begun = threading.Event()

    def work(path):
        if "://" in path:
            import fsspec
            with fsspec.open(path, "wb") as there, open(sys.argv[1], "rb") as here:
                there.write(here.read())
        while True:
            begun.set()
            checkpoint.verify(path, progress=progress)

    def count(done, total):
        return sum(range(100_000)) > 0

    progress = count if sys.argv[3] == "a progress function" else None
    threading.Thread(target=work, args=(sys.argv[2],), daemon=True).start()
    begun.wait()
    sys.exit(7)
"""


@pytest.mark.parametrize("where", ["a file", "an object store", "a progress function"])
def test_a_daemon_thread_does_not_abort_the_exit(where, tmp_path):
    """CPython before 3.14 ends a thread that asks for its lock at that time: "terminate called
    without an active exception". Reads of an object store run Python in threads of their own. Three
    processes, so that they are interrupted at several places.
    """
    path = str(tmp_path / "model.pt")
    torch.save({f"w{i}": torch.zeros(1024, 1024) for i in range(32)}, path)
    read = "memory://bucket/model.pt" if where == "an object store" else path
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), path, read, where]
    running = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **ONE})
        for _ in range(3)
    ]
    said = [process.communicate(timeout=300)[1] for process in running]
    assert [(process.returncode, text) for process, text in zip(running, said, strict=True)] == [
        (7, "")
    ] * 3
