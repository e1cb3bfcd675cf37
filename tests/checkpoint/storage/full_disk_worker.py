"""Ranks whose disk is full: what test_full_disk.py starts with a library in front of libc, which
has write() fail when told.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import warnings

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from tests.checkpoint.storage import storage_worker

# bytes that still fit; the data, but neither metadata nor digests
NOTHING, DATA_ALONE = (1000, 1 << 30)
CASES = [
    (how, who, over, DATA_ALONE if late else NOTHING)
    for how in ("save", "async_save")
    for over in (False, True)
    for who, late in ((0, False), (0, True), (1, False))
]

SHIM = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
static long left = -1;  /* -1: as much as there is */
static int small;       /* files that Python writes, but for a few bytes, do not fit */
void disk_holds(long bytes, int only_data) { left = bytes; small = only_data; }
static int full(int fd, long bytes, int python) {
  struct stat about;
  if (left < 0 || fstat(fd, &about) != 0 || !S_ISREG(about.st_mode)) return 0;
  if (small ? !python || bytes < 200 : bytes <= left) { if (!small) left -= bytes; return 0; }
  errno = ENOSPC;
  return 1;
}
ssize_t write(int fd, const void* p, size_t n) {
  return full(fd, n, 1) ? -1 : syscall(SYS_write, fd, p, n);
}
ssize_t pwrite(int fd, const void* p, size_t n, off_t at) {
  return full(fd, n, 0) ? -1 : syscall(SYS_pwrite64, fd, p, n, at);
}
ssize_t pwrite64(int fd, const void* p, size_t n, off_t at) { return pwrite(fd, p, n, at); }
ssize_t pwritev(int fd, const struct iovec* v, int n, off_t at) {
  long all = 0;
  for (int i = 0; i < n; ++i) all += v[i].iov_len;
  return full(fd, all, 0) ? -1 : syscall(SYS_pwritev, fd, v, n, at, 0);
}
ssize_t pwritev64(int fd, const struct iovec* v, int n, off_t at) { return pwritev(fd, v, n, at); }
"""


def path_of(folder, case):
    how, who, over, holds = case
    return f"{folder}/{how}-{who}-{'over' if over else 'first'}-{holds}"


def attempt(how, path, seed):
    """The error's text."""
    state, written = storage_worker.state(0, seed), checkpoint.Writer(path)
    try:
        if how == "save":
            dcp.save(state, storage_writer=written)
        else:
            dcp.async_save(state, storage_writer=written).result()
    except BaseException as error:  # torch's CheckpointException is not an Exception
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(store, folder, rank, ranks):
    warnings.simplefilter("ignore")
    disk = ctypes.CDLL(None)
    disk.disk_holds.argtypes = [ctypes.c_long, ctypes.c_int]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks)
    )
    told = []
    for case in CASES:
        how, who, over, holds = case
        path = path_of(folder, case)
        if over:
            assert attempt("save", path, 0) == "no error"
        if int(rank) == who:
            disk.disk_holds(holds, holds == DATA_ALONE)
        text = attempt(how, path, 1)
        disk.disk_holds(-1, 0)
        dist.barrier()
        there = os.path.exists(path)
        dist.barrier()
        told.append((text, there, over and _holds(path, 0), attempt("save", f"{path}-next", 2)))
    print(json.dumps(told), flush=True)


def _holds(path, seed):
    return storage_worker.load("lowbit", path, 0, seed)[0] == []


if __name__ == "__main__":
    main(*sys.argv[1:])
