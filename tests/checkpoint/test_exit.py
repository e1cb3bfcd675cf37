"""An interpreter that exits while another of its threads still reads a checkpoint."""

import subprocess
import sys
import textwrap

import pytest
import torch

from lowbit.checkpoint import native
from tests.support.require import need

pytestmark = pytest.mark.slow

need("ckpt", native._checkpoint is not None, "lowbit._checkpoint is not built", module=True)

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
            checkpoint.verify(path)

    threading.Thread(target=work, args=(sys.argv[2],), daemon=True).start()
    begun.wait()
    sys.exit(7)
"""


@pytest.mark.parametrize("where", ["a file", "an object store"])
def test_a_daemon_thread_does_not_abort_the_exit(where, tmp_path):
    """CPython before 3.14 ends a thread that asks for its lock at that time: "terminate called
    without an active exception". Reads of an object store take the lock in threads of their own.
    """
    path = str(tmp_path / "model.pt")
    torch.save({f"w{i}": torch.zeros(1024, 1024) for i in range(32)}, path)
    read = path if where == "a file" else "memory://bucket/model.pt"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), path, read]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (7, "")
