"""Metadata of a cluster, 1,024 ranks and 100,000 chunks, and groups with many settings."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.ckpt import large_metadata
from tests.support.peers.files import TOOL, need_tool, run
from tests.support.shim import preloaded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    need_tool()
    path = tmp_path_factory.mktemp("large") / "run"
    assert large_metadata.write(path) >= 100_000
    return path


# In a program of its own, since the peak that the system tells begins with that of the program
# which started it.
MEASURE = """
import os, subprocess, sys
program = subprocess.Popen(sys.argv[1:])
_, status, used = os.wait4(program.pid, 0)
print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""


def measured(*arguments):
    """What a command prints, seconds of a core, which other work on the machine does not change,
    and MiB at the peak.
    """
    command = [sys.executable, "-S", "-c", MEASURE, TOOL, *map(str, arguments)]
    *said, numbers = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    code, seconds, mib = map(float, numbers.split())
    assert code == 0
    return "\n".join(said), seconds, mib


def test_inspect_takes_less_than_two_seconds(folder):
    said, seconds, mib = measured("inspect", folder)
    assert "layers.48.weight" in said and seconds < 2 and mib < 256


@pytest.mark.parametrize("ranks", [512, 1000])
def test_a_plan_takes_less_than_ten_seconds(folder, ranks):
    said, seconds, mib = measured(
        "reshard", folder, folder.parent / "out", "--world-size", str(ranks), "--dry-run"
    )
    assert "would write" in said and seconds < 10 and mib < 256


@pytest.mark.parametrize("kept", ["nested", "flattened", "flattened, a group for each parameter"])
def test_many_settings_take_no_time_for_each_pair(tmp_path, kept):
    """40,000 took more than 90 seconds where each was looked for among all before it."""
    need_tool()
    count = 40_000
    moments = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4), "step": torch.tensor(1.0)}
    if kept == "nested":
        group = {"lr": 1e-3, **{f"k{i}": i for i in range(count)}, "params": [0]}
        content = {"state": {0: moments}, "param_groups": [group]}
    elif kept == "flattened":
        content = {f"state.w.{name}": tensor for name, tensor in moments.items()}
        content |= {f"param_groups.w.k{i}": i for i in range(count)}
    else:
        content = {"state.w0." + name: tensor for name, tensor in moments.items()}
        content |= {f"param_groups.w{i}.lr": float(i) for i in range(count)}
    torch.save(content, tmp_path / "many.pt")
    said, seconds, _ = measured("verify", tmp_path / "many.pt")
    assert "hold" in said and seconds < 20
    said, seconds, _ = measured("inspect", tmp_path / "many.pt", "--json")
    assert len(said) > count and seconds < 10
    _, seconds, _ = measured("convert", tmp_path / "many.pt", tmp_path / "out.pt", "--to", "lowbit")
    assert seconds < 20


COUNTS = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static unsigned long pieces, reads, opens;
extern void* __libc_malloc(size_t);
void* malloc(size_t n) { ++pieces; return __libc_malloc(n); }
ssize_t pread(int fd, void* to, size_t n, off_t at) {
  ++reads;
  return syscall(SYS_pread64, fd, to, n, at);
}
int openat(int folder, const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  ++opens;
  return syscall(SYS_openat, folder, path, flags, va_arg(more, int));
}
__attribute__((destructor)) static void tell(void) {
  FILE* file = fopen(getenv("COUNTS"), "w");
  fprintf(file, "{\\"pieces\\": %lu, \\"reads\\": %lu, \\"opens\\": %lu}", pieces, reads, opens);
  fclose(file);
}
"""


def adam(count):
    """A model of that many parameters, and its optimizer's state: four tensors for each."""
    names = [f"layers.{i // 8}.{i % 8}.weight" for i in range(count)]
    state = {
        name: {
            "step": torch.tensor(5.0),
            "exp_avg": torch.ones(4, 4),
            "exp_avg_sq": torch.ones(4, 4),
        }
        for name in names
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.99), "params": names}]
    weights = {name: torch.ones(4, 4) for name in names}
    return {"model": weights, "optim": {"state": state, "param_groups": groups}}


@pytest.mark.parametrize("container", ["torch", "dcp", "safetensors"])
def test_work_grows_with_the_parameters_and_no_faster(tmp_path, container):
    """Pieces of memory, reads and files that are opened, of 200 parameters and of 800."""
    need_tool()
    shim = preloaded(tmp_path, COUNTS) | {"COUNTS": str(tmp_path / "counts.json")}
    for count in (200, 800):
        torch.save(adam(count), tmp_path / "all.pt")
        run("convert", tmp_path / "all.pt", tmp_path / str(count), "--container", container)

    def counts(verb, count):
        source, target = tmp_path / str(count), tmp_path / f"{verb}-{count}"
        more = {
            "diff": [source],
            "convert": [target, "--to", "lowbit", "--container", "dcp"],
            "reshard": [target, "--world-size", "2"],
        }
        command = [TOOL, verb, source, *more.get(verb, [])]
        subprocess.run(command, check=True, env=os.environ | shim, stdout=subprocess.DEVNULL)
        return json.loads((tmp_path / "counts.json").read_text())

    for verb in ("inspect", "verify", "diff", "convert", "reshard"):
        few, many = counts(verb, 200), counts(verb, 800)
        assert many["opens"] == few["opens"], verb
        assert many["pieces"] < 4.2 * few["pieces"] and many["reads"] < 4.2 * few["reads"], verb
        if verb == "inspect":  # a tensor's header is read with those of its neighbours
            assert many["reads"] < 2.5 * 4 * 800 and many["pieces"] < 250 * 4 * 800
