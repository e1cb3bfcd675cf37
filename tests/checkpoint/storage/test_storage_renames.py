"""Writer on file systems that cannot exchange two folders in one step, such as NFS,
and kills between its steps.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch.distributed.checkpoint as dcp

from tests.checkpoint.storage import storage_worker
from tests.checkpoint.storage.storage_files import holds, save
from tests.support.shim import preloaded


@pytest.fixture(scope="module")
def without_exchange(tmp_path_factory):
    """Saves once in a process, on a file system without renameat2's flags (NFS); killed at its n-th
    call of a function, if any.

    The processes are forked from one that has imported torch.
    """
    folder = tmp_path_factory.mktemp("shim")
    code = """
        #define _GNU_SOURCE
        #include <errno.h>
        #include <signal.h>
        #include <stdlib.h>
        #include <string.h>
        #include <sys/syscall.h>
        #include <unistd.h>
        int renameat2(int a, const char* b, int c, const char* d, unsigned e) {
          return errno = EINVAL, -1;
        }
        static void count(const char* name) {
          const char* at = getenv("KILL_AT");
          if (at && strcmp(at, name) == 0) kill(getpid(), SIGKILL);
        }
        int rename(const char* a, const char* b) {
          if (strstr(a, ".partial-saving")) count("second rename");
          return syscall(SYS_rename, a, b);
        }
        int unlinkat(int folder, const char* name, int flags) {
          static int calls;
          if (++calls == 2) count("removal");
          return syscall(SYS_unlinkat, folder, name, flags);
        }
        """
    program = """if True:
        import json, os, sys
        from tests.checkpoint.storage import storage_files, storage_worker
        for line in sys.stdin:
            path, seed, kill = json.loads(line)
            if (saving := os.fork()) == 0:
                os.environ["KILL_AT"] = kill
                try:
                    storage_files.save(storage_worker.state(0, seed), path)
                    os._exit(0)
                finally:
                    os._exit(1)
            print(os.waitstatus_to_exitcode(os.waitpid(saving, 0)[1]), flush=True)"""
    environment = {
        **preloaded(folder, code),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as forking:

        def once(path, seed, kill=""):
            print(json.dumps([str(path), seed, kill]), file=forking.stdin, flush=True)
            assert int(forking.stdout.readline()) == (-signal.SIGKILL if kill else 0)

        yield once


def test_a_kill_without_an_exchange_of_folders_stops_no_later_save(tmp_path, without_exchange):
    path, old = tmp_path / "run", ".run.partial-saving.old"
    without_exchange(path, 0)
    without_exchange(path, 1, "removal")  # of the old checkpoint
    assert sorted(os.listdir(tmp_path)) == [old, "run"] and holds(path, 1)
    without_exchange(path, 2)
    assert os.listdir(tmp_path) == ["run"] and holds(path, 2)
    without_exchange(path, 3, "second rename")  # nothing has the name
    assert sorted(os.listdir(tmp_path)) == [".run.partial-saving", old]
    assert holds(tmp_path / old, 2)
    with pytest.raises(dcp.api.CheckpointException, match="exists"):
        save(storage_worker.state(0, 4), path, overwrite=False)
    assert os.listdir(tmp_path) == ["run"] and holds(path, 2)
    without_exchange(path, 3, "second rename")
    without_exchange(path, 4)
    assert os.listdir(tmp_path) == ["run"] and holds(path, 4)


def test_what_is_left_of_an_old_checkpoint_is_not_put_back(tmp_path, without_exchange):
    path = tmp_path / "run"
    without_exchange(path, 0)
    without_exchange(path, 1, "removal")
    shutil.rmtree(path)
    save(storage_worker.state(0, 2), path, overwrite=False)
    assert holds(path, 2)
