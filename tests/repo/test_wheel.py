"""One wheel for every CPython: the module keeps to the stable ABI, and the settings, the workflow
and the page agree. `make wheel` builds and audits one.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

from lowbit.checkpoint import native
from lowbit.step import objects
from tests.support.paths import ROOT
from tests.support.require import need

PYPROJECT = (ROOT / "pyproject.toml").read_text()
BUILD = (ROOT / ".ci" / "wheel" / "build.py").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()


@pytest.mark.parametrize(
    "thing, module",
    [("ckpt", native._checkpoint), ("tensors", objects.module)],
    ids=["_checkpoint", "_tensors"],
)
def test_modules_are_of_the_stable_abi(thing, module):
    need(thing, module is not None, "lowbit was built without this module")
    audit = pathlib.Path(sys.executable).parent / "abi3audit"
    need("abi3", audit.exists(), "abi3audit is not installed: pip install abi3audit")
    assert module.__file__.endswith(".abi3.so")
    command = [audit, "--strict", "--assume-minimum-abi3", "3.10", module.__file__]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "release, given, code, said",
    [
        ("12.0", "AUTO", 0, "no kernels for GPUs: {} is of CUDA 12.0"),
        ("11.8", "ON", 1, "build without kernels for GPUs by LOWBIT_CUDA=OFF"),
        ("12.1", "ON", 0, ""),
    ],
)
def test_an_old_nvcc_builds_no_kernels(tmp_path, release, given, code, said):
    """Distributions have some that cannot compile them, and a CPU build would do."""
    cmake = shutil.which("cmake", path=pathlib.Path(sys.executable).parent) or shutil.which("cmake")
    need("cpp", cmake is not None, "cmake is not installed")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.9"\n')
    nvcc.chmod(0o755)
    chosen = [f"-DLOWBIT_CUDA={given}", f"-DCMAKE_CUDA_COMPILER={nvcc}", "-Dwith_cuda=ON"]
    command = [cmake, *chosen, "-P", ROOT / "csrc" / "cuda" / "toolkit.cmake"]
    done = subprocess.run(command, capture_output=True, text=True)
    printed = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code and said.format(nvcc) in printed, printed
    assert bool(printed) == bool(said)


def test_nothing_ties_the_package_to_one_python():
    assert 'wheel.py-api = "cp310"' in PYPROJECT and 'requires-python = ">=3.10"' in PYPROJECT
    assert "Py_LIMITED_API=0x030A0000" in (ROOT / "tools" / "CMakeLists.txt").read_text()
    # Neither in the settings nor in the sources: it has no stable ABI for these versions.
    listed = subprocess.run(
        ["git", "grep", "-il", "pybind" + "11"], cwd=ROOT, capture_output=True, text=True
    )
    assert listed.stdout == ""


def test_wheels_are_tried_with_every_python_that_is_promised():
    promised = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', PYPROJECT)
    installed, tried = (
        re.findall(r"3\.(\d+)", re.search(pattern, WORKFLOW, re.S)[1])
        for pattern in (r"python-version: \|\n(.*?)- uses", r'PYTHONS="(.*?)"')
    )
    assert promised == installed == tried and promised[0] == "10"


def test_pages_and_settings_name_the_same_system():
    (glibc,) = set(
        re.findall(
            r"-linux-gnu\.(\d+\.\d+)",
            BUILD + (ROOT / ".ci" / "wheel" / "manylinux.cmake").read_text(),
        )
    )
    tag = f"manylinux_{glibc.replace('.', '_')}"
    assert re.findall(r"manylinux_\d+_\d+", BUILD) == [tag]
    assert set(re.findall(r"manylinux_\d+_\d+", (ROOT / "docs" / "install.md").read_text())) == {
        tag
    }
    assert re.findall(r"make wheel (\w+=\w+)", WORKFLOW) == ["CUDA=ON", "ARCH=aarch64"]


def test_a_wait_of_an_old_glibc_ends_in_time(tmp_path):
    """.ci/wheel/glibc_2_28.c waits by a clock that glibc 2.28 cannot wait by."""
    need("cpp", shutil.which("cc") is not None, "there is no C compiler")
    (tmp_path / "main.c").write_text("""
        #include <errno.h>
        #include <pthread.h>
        #include <time.h>
        int main() {
          pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
          pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
          struct timespec until;
          clock_gettime(CLOCK_MONOTONIC, &until);
          until.tv_nsec += 200000000;
          if (until.tv_nsec >= 1000000000) until.tv_nsec -= 1000000000, ++until.tv_sec;
          pthread_mutex_lock(&mutex);
          int got = pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &until);
          return got == ETIMEDOUT ? 0 : 1;
        }
    """)
    start = time.monotonic()
    assert exit_status(tmp_path / "main.c") == 0
    assert 0.19 < time.monotonic() - start < 5


def exit_status(source: pathlib.Path) -> int:
    """Of a C program with what a wheel's libraries are linked with."""
    program = source.with_suffix("")
    files = [source, ROOT / ".ci" / "wheel" / "glibc_2_28.c"]
    subprocess.run(
        ["cc", "-D_GNU_SOURCE", "-Wall", "-Werror", *files, "-o", program, "-lpthread"], check=True
    )
    return subprocess.run([program]).returncode


def test_a_newer_glibcs_names_of_functions_that_read_numbers(tmp_path):
    """Compilers use them from glibc 2.38 on, also in their own C++ library."""
    need("cpp", shutil.which("cc") is not None, "there is no C compiler")
    (tmp_path / "main.c").write_text("""
        long __isoc23_strtol(const char*, char**, int);
        unsigned long __isoc23_strtoul(const char*, char**, int);
        long long __isoc23_strtoll(const char*, char**, int);
        unsigned long long __isoc23_strtoull(const char*, char**, int);
        int __isoc23_sscanf(const char*, const char*, ...);
        int main() {
          char* end;
          int x = 0, y = 0;
          int ok = __isoc23_strtol("-7 8", &end, 10) == -7 && *end == ' ';
          ok = ok && __isoc23_strtoul("0x10", &end, 0) == 16 && *end == 0;
          ok = ok && __isoc23_strtoll("-9000000000", &end, 10) == -9000000000ll;
          ok = ok && __isoc23_strtoull("18446744073709551615", &end, 10) == ~0ull;
          ok = ok && __isoc23_sscanf("Umask: 0022 5", "Umask: %o %d", &x, &y) == 2;
          return ok && x == 18 && y == 5 ? 0 : 1;
        }
    """)
    assert exit_status(tmp_path / "main.c") == 0
