"""The same bits on every processor: steps of all rules and formats, by every instruction set here
and by an emulated ARM64.

apt-get install g++-aarch64-linux-gnu qemu-user-static
LOWBIT_REQUIRE=arm64 python -m pytest tests/optim/test_processors.py
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import lowbit
from tests.support.paths import ROOT
from tests.support.require import need

pytestmark = pytest.mark.long

HERE = ROOT / "build" / "lowbit" / "tests" / "cpp"
EMULATOR = ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu")


def digests(*command, **environment):
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 2900 and len(set(lines)) == len(lines)
    return lines


@pytest.fixture(scope="module")
def here():
    program = HERE / "step_bits"
    need("cpp", program.exists(), "the C++ tests are not built here: make test builds them")
    return program, digests(program)


@pytest.mark.parametrize("isa", lowbit.catalog()["isas"])
def test_instruction_sets_agree(here, isa):
    program, expected = here
    assert digests(program, LOWBIT_ISA=isa) == expected


def test_the_seed_of_the_digests_matters(here):
    """A digest that nothing could change would prove nothing: formats,
    rules and roundings differ.
    """
    lines = [line.split() for line in here[1]]
    assert len({line[-1] for line in lines}) > len(lines) // 4


@pytest.fixture(scope="module")
def arm64(tmp_path_factory):
    """The programs, built for ARM64; they run emulated."""
    found = shutil.which("aarch64-linux-gnu-g++") and shutil.which(EMULATOR[0])
    hint = "an ARM64 is emulated with Debian's g++-aarch64-linux-gnu and qemu-user-static"
    need("arm64", bool(found), hint)
    beside = pathlib.Path(sys.executable).parent
    cmake = shutil.which("cmake", path=f"{beside}:{os.environ['PATH']}")
    need("arm64", cmake is not None, "cmake is not installed")
    out = tmp_path_factory.mktemp("arm64")
    generator = (
        ["-G", "Ninja"] if shutil.which("ninja", path=f"{beside}:{os.environ['PATH']}") else []
    )
    environment = {**os.environ, "PATH": f"{beside}:{os.environ['PATH']}"}
    subprocess.run(
        [
            cmake,
            "-S",
            ROOT,
            "-B",
            out,
            *generator,
            f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'tests/cpp/arm64.cmake'}",
            "-DLOWBIT_OPS=OFF",
            "-DLOWBIT_TOOLS=OFF",
            "-DLOWBIT_CUDA=OFF",
            "-DLOWBIT_BUILD_TESTS=ON",
        ],
        check=True,
        capture_output=True,
        env=environment,
    )
    subprocess.run(
        [
            cmake,
            "--build",
            out,
            "--parallel",
            "2",
            "--target",
            "step_bits",
            "test_params_baseline",
            "test_sums_baseline",
            "test_formats_baseline",
            "test_means_baseline",
            "test_explog",
            "test_kernels",
            "test_matmul",
        ],
        check=True,
        capture_output=True,
        env=environment,
    )
    return out / "tests" / "cpp"


def test_arm64_steps_to_the_same_bits(here, arm64):
    assert digests(*EMULATOR, arm64 / "step_bits") == here[1]


def test_arm64_orthogonalizes_to_the_same_bits(here, arm64):
    """Newton-Schulz by the own product, which NEON multiplies there, and NorMuon's rows."""

    def said(*command):
        done = subprocess.run([*map(str, command), "bits"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    expected = said(HERE / "test_matmul")
    assert len(expected) == len(set(expected)) == 5
    assert said(*EMULATOR, arm64 / "test_matmul") == expected


@pytest.mark.parametrize(
    "name",
    [
        "test_formats_baseline",
        "test_means_baseline",
        "test_params_baseline",
        "test_sums_baseline",
        "test_explog",
        "test_kernels draws",
        "test_matmul",
    ],
)
def test_arm64_keeps_to_the_golden_arrays(arm64, name):
    done = subprocess.run(
        [*EMULATOR, arm64 / name.split()[0], *name.split()[1:]], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
