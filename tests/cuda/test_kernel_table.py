"""The table of what CUDA kernels take (csrc/cuda/resources.py): right numbers, and local memory is
an error. Needs nvcc, no GPU.
"""

import io
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.require import need

pytestmark = pytest.mark.long

SCRIPT = ROOT / "csrc" / "cuda" / "resources.py"
CLEAN = """
__global__ void __launch_bounds__(64) clean(uint4* to, const uint4* from) {
  __shared__ float room[96];
  const int i = blockIdx.x * 64 + threadIdx.x;
  room[threadIdx.x] = threadIdx.x;
  __syncthreads();
  uint4 x = from[i];
  x.x += room[63 - threadIdx.x];
  to[i] = x;
}
"""
LOCAL = """
__global__ void local(int* to, int n) {
  int kept[256] = {};
  for (int i = 0; i < n; ++i) kept[to[i] & 255] += i;
  to[n] = kept[n & 255];
}
"""
# A loop over tiles whose usual path takes two functions of the XU pipe for each of a lane's 8
# values, and whose rare one takes many more.
TILES = """
__global__ void __launch_bounds__(64)
step_fast(float4* to, const float4* from, int tiles, float limit) {
  __shared__ float table[256];
  table[threadIdx.x] = threadIdx.x;
  __syncthreads();
  for (int i = blockIdx.x * 64 + threadIdx.x; i < tiles; i += gridDim.x * 64) {
    float4 x[2] = {__ldcg(from + 2 * i), __ldcg(from + 2 * i + 1)};
    float* y = &x[0].x;
    for (int e = 0; e < 8; ++e) y[e] = __frcp_rn(table[__float_as_uint(y[e]) & 255]);
    if (y[0] > limit) {
      for (int e = 0; e < 8; ++e) y[e] = logf(y[e]) + EXTRA;
    } else {
      for (int e = 0; e < 8; ++e) {
        float r;
        asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y[e]));
        y[e] = r;
      }
    }
    __stcg(to + 2 * i, x[0]);
    __stcg(to + 2 * i + 1, x[1]);
  }
}
"""


@pytest.fixture(scope="module", autouse=True)
def nvcc():
    need("nvcc", shutil.which("nvcc") is not None, "no nvcc here")


def table(tmp_path, source):
    (tmp_path / "k.cu").write_text(source)
    command = ["nvcc", "-arch=sm_90", "-cubin", "-o", tmp_path / "k.sm_90.cubin", tmp_path / "k.cu"]
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)


def test_a_clean_kernel(tmp_path):
    run = table(tmp_path, CLEAN)
    assert run.returncode == 0, run.stderr
    assert "sm_90: 1 kernels" in run.stdout
    registers, local, shared, instructions, loads, stores, name = run.stdout.splitlines()[
        -1
    ].split()
    assert 8 <= int(registers) <= 40 and int(local) == 0
    assert int(shared) in (384, 1408)  # a kilobyte is the system's on some architectures
    assert 15 <= int(instructions) <= 80 and (int(loads), int(stores)) == (1, 1)
    assert name == "clean"


def test_local_memory_is_an_error(tmp_path):
    run = table(tmp_path, LOCAL)
    assert run.returncode == 1
    assert "k.sm_90.cubin: local keeps 1024 bytes in local memory" in run.stderr
    lenient = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "--lenient"], capture_output=True, text=True
    )
    assert lenient.returncode == 0 and (lenient.stdout, lenient.stderr) == (run.stdout, run.stderr)


def test_what_a_tile_takes(tmp_path):
    """The usual path is counted without the rare branch,
    and a kernel that takes more than its limit is an error.
    """
    for script in (SCRIPT, *(SCRIPT.with_name(f"{name}_path.py") for name in ("usual", "any"))):
        shutil.copy(script, tmp_path)

    def count(extra, *options):
        (tmp_path / "k.cu").write_text(TILES.replace("EXTRA", extra))
        command = [
            "nvcc",
            "-arch=sm_90",
            "-cubin",
            "-o",
            tmp_path / "k.sm_90.cubin",
            tmp_path / "k.cu",
        ]
        subprocess.run(command, check=True, capture_output=True)
        run = [sys.executable, tmp_path / "resources.py", tmp_path, *options]
        done = subprocess.run(run, capture_output=True, text=True)
        head, row = done.stdout.splitlines()[-2:]
        return done, dict(zip(head.replace(" clk", "_clk").split(), row.split(), strict=True))

    done, row = count("1.0f")
    assert done.returncode == 0, done.stderr
    instructions, pipes = (
        int(row["instructions"]),
        ("alu", "fp32", "imad", "xu", "memory", "control", "uniform"),
    )
    assert instructions == sum(int(row[pipe]) for pipe in pipes)
    assert (
        16 <= int(row["xu"]) <= 20
        and int(row["bytes"]) == 2 * 8 * 4 * 32
        and 60 <= instructions <= 300
    )
    # The rare branch grew.
    assert abs(int(count("expf(y[e])")[1]["instructions"]) - instructions) <= 8

    limits = tmp_path / "tile_limits.txt"
    assert count("1.0f", "--set-limits")[0].returncode == 0 and limits.exists()
    assert count("1.0f")[0].returncode == 0
    limits.write_text(limits.read_text().replace(f"90 {instructions} ", f"90 {instructions - 1} "))
    worse = count("1.0f")[0]
    assert worse.returncode == 1 and f"executes {instructions} instructions" in worse.stderr


ANY = """
__global__ void step_any(float* to, int n) {
  for (int i = threadIdx.x; i < n; i += 32) to[i] += 1.0f;
}
"""


def test_a_step_any_that_cannot_be_read_is_an_error(tmp_path):
    run = table(tmp_path, ANY)
    assert run.returncode == 1
    assert run.stderr == "sm_90: step_any has no loops over codes\n"


def test_the_way_through_step_any(tmp_path, monkeypatch):
    """Eight loads go around a loop of two four times, and what skips the loop is shorter; the loops
    of a kernel are known by their order.
    """
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import any_path
    import usual_path

    def make(code, target=None, guarded=False, size=any_path.WORD):
        return usual_path.Instruction(
            code | (0 if guarded else usual_path.ALWAYS << 12) | size << 73, target
        )

    add = 0x010
    walk = any_path.Walk.__new__(any_path.Walk)
    program = [
        make(add),
        make(usual_path.BRANCH, 7, guarded=True),
        make(usual_path.LOAD_SHARED),  # the head of the loop
        make(usual_path.LOAD_SHARED, size=any_path.HALF),
        make(usual_path.LOAD_SHARED),
        make(add),
        make(usual_path.BRANCH, 2, guarded=True),
        make(usual_path.STORE_GLOBAL),
    ]
    walk.program, walk.ways = program, any_path.ways(program)
    eight = walk.go(0, "load", walk.is_access(usual_path.LOAD_SHARED, any_path.WORD), 8)
    assert eight == (4, 2 + 3 * 5 + 2)
    assert walk.go(0, "store", walk.is_access(usual_path.STORE_GLOBAL, None), 1) == (7, 2)
    with pytest.raises(any_path.Unexpected, match="no way to add"):
        walk.go(0, "add", walk.is_access(add, None), 2, within=(6, 7))

    names = [c.name() for c in any_path.combinations()]
    assert len(set(names)) == len(names) == 3 * 11 + 2
    limits = SCRIPT.with_name("tile_limits.txt").read_text()
    for arch in (80, 90):
        for c in any_path.combinations():
            assert re.search(rf"^{arch} \d+ 0 {re.escape(c.name())}$", limits, re.MULTILINE), c
            if c.fixed:
                assert re.search(rf"^{arch} \d+ \d+ {re.escape(c.fixed)}$", limits, re.MULTILINE), c
    counted = {*any_path.SIGNS, "Adafactor", "Sgd"}
    assert set(any_path.registered("UpdateRules")) == counted | any_path.NOT_COUNTED
    assert not counted & any_path.NOT_COUNTED
    assert any_path.registered("GradFormats") == ["Float32Grad", "BFloat16Grad", "Float16Grad"]


def test_step_any_has_limits(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import any_path
    import resources

    lion = any_path.Combination("Lion", ("Dynamic8",))
    monkeypatch.setattr(resources, "limits", lambda: {("90", lion.name()): (10, 0)})
    out = io.StringIO()
    assert resources.print_any("90", [(lion, 10)], {}, out) == []
    bad = resources.print_any("90", [(lion, 11)], {lion.fixed: 5}, out)
    assert bad == [
        f"sm_90: {lion.name()} executes 11 instructions for a tile; tile_limits.txt allows 10"
    ]
    other = any_path.Combination("Adagrad", ("Dynamic8Unsigned",))
    assert resources.print_any("90", [(other, 10)], {}, out) == [
        f"sm_90: {other.name()} has no limit in tile_limits.txt"
    ]
    # an architecture that is not tested
    assert resources.print_any("80", [(other, 10)], {}, out) == []
    resources.print_any("90", [(lion, 11)], {lion.fixed: 5}, out)
    assert out.getvalue().splitlines()[-1] == f"      11     5   2.2  {lion.name()}"


def test_no_cubins_are_an_error(tmp_path):
    for how in ([], ["--lenient"]):
        run = subprocess.run(
            [sys.executable, SCRIPT, tmp_path, *how], capture_output=True, text=True
        )
        assert run.returncode == 1 and "no kernel found" in run.stderr


def test_architectures_that_are_built(tmp_path):
    """This machine's GPUs that nvcc knows, those of a wheel where there is none,
    or what is asked for.
    """
    beside = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    need("nvcc", shutil.which("cmake", path=beside) is not None, "cmake is not installed")
    cards = tmp_path / "nvidia-smi"

    def chosen(said, archs):
        cards.write_text(f"#!/bin/sh\n{said}\n")
        cards.chmod(0o755)
        command = [
            "cmake",
            "-S",
            SCRIPT.parents[2],
            "-B",
            tmp_path / "build",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DLOWBIT_TOOLS=OFF",
            "-DLOWBIT_CUDA=ON",
            f"-DLOWBIT_CUDA_ARCHS={archs}",
        ]
        environment = {**os.environ, "PATH": f"{tmp_path}:{beside}"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return re.findall(r"CUDA kernels for (.*)", done.stdout)

    release = "80;90-real;100-real;120-real"  # and the PTX of sm_80, for all others
    assert chosen("printf '9.0\\n8.0\\n9.0\\n7.5\\n99.0\\n'", "") == ["90;80"]
    assert chosen("exit 9", "") == [release]
    assert chosen("printf '9.0\\n'", "120-real") == ["120-real"]
    assert chosen("exit 9", "release") == [release]
