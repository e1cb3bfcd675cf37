"""Memory of lowbit.checkpoint.Writer and Reader, in a program of its own: one host copy for an
async save, else buffers of some MiB.
"""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

MIB = 1 << 20
MEASURE = """
import json, sys, warnings
import torch
import torch.distributed.checkpoint as dcp
from lowbit import checkpoint

warnings.filterwarnings("ignore")
torch.set_num_threads(1)


def kib(field):
    return int(open("/proc/self/status").read().split(field + ":")[1].split()[0])


def peak(work):
    open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
    before = kib("VmRSS")
    kept = work()
    return kib("VmHWM") - before


def save(state, path):
    dcp.save(state, storage_writer=checkpoint.Writer(path, sync_files=False), no_dist=True)


def read(offset, shape):
    reader, part = checkpoint.Reader(sys.argv[1] + "/run"), torch.zeros(shape)
    reader.read_metadata()
    box = ("w", offset, shape, part.data_ptr(), part.nbytes)
    total = reader._reader.read_into([box], 1, True, None)
    rows, columns = (slice(begin, begin + n) for begin, n in zip(offset, shape, strict=True))
    assert torch.equal(part, state["w"][rows, columns])
    return total


save({"w": torch.ones(100, 1000)}, sys.argv[1] + "/warm")
state = {"w": torch.arange(4096 * 8192, dtype=torch.float32).reshape(4096, 8192)}
bytes_read = {}


def box(name, offset, shape):
    def work():
        bytes_read[name] = read(offset, shape)

    return peak(work)


out = {
    "save": peak(lambda: save(state, sys.argv[1] + "/run")),
    "rows": box("rows", [1024, 0], [1024, 8192]),
    "columns": box("columns", [0, 2048], [4096, 2048]),
    "three rows": box("three rows", [1000, 0], [3, 8192]),
    "three columns": box("three columns", [0, 1000], [4096, 3]),
}
writer = checkpoint.Writer(sys.argv[1] + "/async", sync_files=False)
out["stage"] = peak(lambda: writer.stage(state))
print(json.dumps([out, bytes_read]))
"""


def test_memory_is_one_copy_and_buffers(tmp_path):
    program = [sys.executable, "-c", MEASURE, str(tmp_path)]
    made = subprocess.run(program, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    kib, bytes_read = json.loads(made.stdout)
    mib = {name: value / 1024 for name, value in kib.items()}
    assert mib["save"] < 16
    # What is read is counted, the rest are buffers: a row of cells has 8 MiB at most.
    assert mib["rows"] < 32 + 8 and mib["columns"] < 32 + 8
    assert mib["three rows"] < 20 and mib["three columns"] < 20
    assert 128 <= mib["stage"] < 128 + 16
    assert bytes_read["rows"] == bytes_read["columns"] == 32 * MIB
    assert bytes_read["three rows"] <= 8 * MIB and bytes_read["three columns"] <= 32 * MIB
