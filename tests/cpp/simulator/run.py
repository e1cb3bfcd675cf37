"""`make simulate SIM=folder`: the comparisons of test_cuda_emulated, test_cuda_lowrank and
test_cuda_muon, run by the kernels' PTX in GPGPU-Sim.

    python run.py --check SIM            exits with 1 and says in one line what is missing
    python run.py SIM BUILD [PART...]    runs parts, two at a time; all without a name

Of each list of cases a sample runs, of the size in PARTS; SIM_SAMPLE=40 chooses another size,
SIM_SAMPLE=all runs everything, which takes days. First a run with a planted mistake, which must
fail: a constant of Philox in the PTX.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# What a build of GPGPU-Sim leaves (docs/kernels/cuda-tests.md).
CONFIGURATION = "configs/tested-cfgs/SM7_QV100"
NEEDED = (
    "libcuda/gpgpu_context.h",
    f"{CONFIGURATION}/gpgpusim.config",
    "build/libentrypoint.a",
    "build/libcuda/libcuda.a",
    "build/src/cuda-sim/libptxsim.a",
    "build/src/gpgpu-sim/libgpgpusim.a",
)
# Part: the program, and how many cases of a list run. Each ends within ten minutes of a core.
PARTS = {
    "probe": ("probe", 0),
    "once": ("step", 0),
    "shapes": ("step", 4),
    "options": ("step", 6),
    "every_rule": ("step", 6),
    "cut": ("step", 12),
    "codes": ("step", 40),
    "accumulate": ("step", 40),
    "every_format": ("step", 30),
    "many": ("step", 300),
    "formats": ("lowrank", 2),
    "parts": ("lowrank", 8),
    "sizes": ("lowrank", 70),
    "matrices": ("muon", 4),
    "inputs": ("muon", 2),
}


def missing(sim: str) -> str | None:
    """What make simulate lacks, in one line, or None."""
    page = 'docs/kernels/cuda-tests.md, "Without a GPU", says which and how to build it'
    if not sim:
        return f"make simulate needs SIM=FOLDER, a folder with a built GPGPU-Sim: {page}"
    for name in NEEDED:
        if not (Path(sim) / name).exists():
            return f"make simulate: SIM={sim} has no {name}, so it is not a built GPGPU-Sim: {page}"
    if shutil.which("nvcc") is None:
        return "make simulate: nvcc, which makes the PTX, is not on PATH"
    return None


class Result:
    """What a part printed: its failures, and the counts at its end."""

    def __init__(self, name: str, output: str, status: int, seconds: float) -> None:
        def numbers(pattern: str) -> list[int]:
            found = re.findall(pattern, output)
            return [int(n) for n in found[-1]] if found else []

        self.name, self.status, self.seconds = name, status, seconds
        self.failures = [line for line in output.splitlines() if line.startswith("FAILED")]
        self.checks = numbers(r"(\d+) passed, (\d+) failed\n")
        self.cases = numbers(r"(\d+) of (\d+) cases\n")
        self.executed = numbers(r"(\d+) launches, (\d+) instructions\n")

    @property
    def finished(self) -> bool:
        return bool(self.checks and self.executed and self.executed[1] > 0)

    @property
    def passed(self) -> bool:
        return self.finished and self.status == 0 and self.checks[0] > 0 and self.checks[1] == 0

    def __str__(self) -> str:
        if not self.finished:
            return (
                f"{self.name}: ended with {self.status} after "
                f"{self.seconds:.0f} s and without a result"
            )
        cases = f"{self.cases[0]} of {self.cases[1]} cases, " if self.cases else ""
        return (
            f"{self.name}: {cases}{self.checks[0]} passed, {self.checks[1]} failed; "
            f"{self.executed[0]} launches, {self.executed[1] / 1e6:,.1f} million instructions of "
            f"threads, {self.seconds:.0f} s"
        )


def run(build: Path, part: str, ptx: str = "", sample: str = "") -> Result:
    """Runs a part in a folder of its own, since the simulator writes beside itself. What it prints
    goes to output.txt there.
    """
    program, size = PARTS[part]
    folder = build / "simulated" / (part + ptx)
    folder.mkdir(parents=True, exist_ok=True)
    for file in (build / "configuration").iterdir():
        shutil.copy(file, folder)
    asked = sample or os.environ.get("SIM_SAMPLE", "")
    env = {
        **os.environ,
        "LOWBIT_PTX": str(build / f"{program}{ptx}.ptx"),
        "SIM_SAMPLE": {"": str(size), "all": "0"}.get(asked, asked),
    }
    began = time.monotonic()
    with (folder / "output.txt").open("w+") as output:
        command = [str(build / "tests/cpp" / f"simulate_{program}"), part]
        status = subprocess.run(
            command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT
        ).returncode
        output.seek(0)
        return Result(part, output.read(), status, time.monotonic() - began)


def prepare(sim: Path, build: Path) -> None:
    """The PTX, rewritten, and the simulator's configuration."""
    import ptx

    for program in ("step", "lowrank", "muon", "probe"):
        text = next(build.glob(f"csrc/cuda/**/{program}.ptx")).read_text()
        (build / f"{program}.ptx").write_text(ptx.rewrite(text))
        if program == "step":
            (build / "step.mistake.ptx").write_text(ptx.rewrite(text, mistake=True))
    shutil.copytree(sim / CONFIGURATION, build / "configuration", dirs_exist_ok=True)


def main(sim: Path, build: Path, parts: list[str]) -> int:
    for part in parts:
        if part not in PARTS:
            print(f"make simulate: no part {part}; there are {', '.join(PARTS)}", file=sys.stderr)
            return 2
    prepare(sim, build)
    planted = run(build, "shapes", ptx=".mistake", sample="1")
    print(f"a mistake is planted: {planted}", flush=True)
    if not planted.finished or not any("stochastic" in line for line in planted.failures):
        print("the planted mistake was not seen, so nothing that follows would mean anything")
        return 1
    passed = True
    with ThreadPoolExecutor(2) as two:
        for result in two.map(lambda part: run(build, part), parts or list(PARTS)):
            print(result, flush=True)
            print("".join(f"  {line}\n" for line in result.failures[:20]), end="")
            passed &= result.passed
    return 0 if passed else 1


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        line = missing(sys.argv[2])
        sys.exit(line and f"*** {line}")
    sys.exit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:]))
