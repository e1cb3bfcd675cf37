"""The stages of `make gpu`, in parts that can be chosen, with what each took on the last card.

    bits      the CUDA tests
    speed     the step beside baselines, then the kernels of a step
    muon      a step of Muon beside torch's
    check     memcheck and racecheck over small tests
    profile   ncu over single steps
    patterns  in which order memory answers fastest (bench/gpu/patterns.cu)
    offload   state in the host's memory beside the bus's own speed and torchao's offload
    train     a GPT of 124 M parameters
    large     a Llama of 8 B parameters inside 24 GiB, beside others' optimizers

A rehearsal has the same stages on the CPU, at tiny sizes: an error that it can find costs no minute
of a card.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions

from bench import ROOT
from bench.gpu import tile_model
from bench.gpu.stage import Stage, junit, sanitizer

PARTS = ("bits", "speed", "muon", "check", "profile", "patterns", "offload", "train", "large")
# Seconds on an H100 with 16 cores (2026-11-27), where they were measured; the others are guesses.
TOOK = {
    "wheel": 5,
    "build": 110,
    "cuda-tests": 35,
    "bench-step": 60,
    "kernels": 25,
    "muon": 40,
    "memcheck": 12,
    "racecheck": 60,
    "profile": 35,
    "patterns": 40,
    "bus": 30,
    "train": 60,
    "large": 240,
}
# Tests that take seconds even under a tool that is fifty times slower, and run every kernel: short
# blocks, odd ends, misaligned memory, all formats.
SMALL = (
    "test_blocks_and_shards or test_values_at_the_edges or test_a_thousand_tensors"
    " or (test_encode_decode and 64)"
)
# How many times as long a stage of a rehearsal may take: tests run it beside other work.
PATIENT = 5
PYTHON = sys.executable
PIP = [PYTHON, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check"]
# -vv prints a line per test, so a killed run still leaves results (the project's options have -q).
PYTEST = [
    PYTHON,
    "-m",
    "pytest",
    "-vv",
    "-p",
    "no:cacheprovider",
    "--continue-on-collection-errors",
]


@dataclass(frozen=True)
class Choice:
    """What a run does.

    Attributes:
        parts: names of PARTS, in the order in which they run.
        wheel: a wheel of lowbit, installed into a folder of its own; None builds the sources.
        wheels: a folder of wheels of baselines for the bench, or None.
        rehearse: on the CPU, at tiny sizes, with the lowbit that is installed.
    """

    parts: Sequence[str] = PARTS
    wheel: pathlib.Path | None = None
    wheels: pathlib.Path | None = None
    rehearse: bool = False


def stages(
    folder: pathlib.Path, options: list[str], capability: str, choice: Choice | None = None
) -> list[Stage]:
    """The stages of the chosen parts: first what the others need, then one part after another."""
    made = Stages(folder, choice or Choice(), capability)
    all_parts = {
        "bits": [made.tests()],
        "speed": [made.bench(), made.card("kernels")],
        "muon": [made.card("muon")],
        "check": [made.checked("memcheck"), made.checked("racecheck")],
        "profile": [made.profile()],
        "patterns": [made.patterns()],
        "offload": [made.card("bus")],
        "train": [made.card("train")],
        "large": [made.large()],
    }
    chosen = [stage for part in made.choice.parts for stage in all_parts[part]]
    if made.choice.rehearse:  # what has no kernels to look at is left out
        chosen = [stage for stage in chosen if not isinstance(stage.command, str)]
    return [made.build(options), *made.installs, *chosen]


class Stages:
    """Makes stages that write into `folder`."""

    def __init__(self, folder: pathlib.Path, choice: Choice, capability: str) -> None:
        self.folder, self.choice, self.capability = folder, choice, capability
        self.device = "cpu" if choice.rehearse else "cuda"
        self.env, self.cwd = {}, None
        if choice.wheel or choice.rehearse:
            self.cwd = self.tree()
        if choice.wheel:
            site = str(folder / "site")
            path = joined(f"{site}/bin", os.environ.get("PATH"))
            self.env = {"PYTHONPATH": joined(site, os.environ.get("PYTHONPATH")), "PATH": path}
        self.installs, self.with_baselines = baselines(folder, choice.wheels)
        if self.with_baselines and choice.wheel:
            both = joined(self.with_baselines["PYTHONPATH"], self.env["PYTHONPATH"])
            self.with_baselines = {"PYTHONPATH": both}

    def tree(self) -> pathlib.Path:
        """A copy without lowbit's sources, which have no operators and would be imported first."""
        tree = self.folder / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        for name in ("tests", "bench", "recipes", "pyproject.toml"):
            source, to = ROOT / name, tree / name
            to.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, to)
        return tree

    def stage(
        self,
        name: str,
        limit: float,
        command: list[str] | str,
        env: Mapping[str, str] = {},
        read: Callable[[str], dict] = lambda text: {},
        parallel: bool = False,
    ) -> Stage:
        """A stage that needs the build. In a rehearsal it has time, and took none on a card."""
        rehearse, given = self.choice.rehearse, {**self.env, **env}
        limit, took = (limit * PATIENT, 0) if rehearse else (limit, TOOK[name])
        return Stage(name, limit, command, given, read, "build", parallel, took, self.cwd)

    def build(self, options: list[str]) -> Stage:
        """Installs the wheel, or builds the sources for this card."""
        if self.choice.rehearse:
            return Stage("build", 60 * PATIENT, [PYTHON, "-c", "import lowbit"], self.env)
        if self.choice.wheel:
            site = self.folder / "site"
            shutil.rmtree(site, ignore_errors=True)
            where = ["--quiet", "--no-compile", "--target", str(site), str(self.choice.wheel)]
            return Stage("build", 60, [*PIP, *where], self.env, took=TOOK["wheel"])
        defined = {
            "CUDA": "ON",
            "CUDA_STRICT": "OFF",
            "CUDA_ARCHS": f"{self.capability.replace('.', '')}-real",
        }
        for name, value in defined.items():
            options = [*options, "-C", f"cmake.define.LOWBIT_{name}={value}"]

        def read(text: str) -> dict:
            return {"tiles": tile_model.counted(ROOT / "build" / "lowbit" / "kernels.txt")}

        command = [*PIP, "--no-build-isolation", "-e", ".", *options]
        return Stage("build", 240, command, {"CUDACXX": nvcc() or "nvcc"}, read, took=TOOK["build"])

    def files(self) -> list[str]:
        """The tests of kernels."""
        return sorted(f"tests/cuda/{p.name}" for p in (ROOT / "tests/cuda").glob("test_cuda*.py"))

    def tests(self) -> Stage:
        """All CUDA tests; in a rehearsal the small ones, with the CPU in the card's place."""
        report = self.report("cuda-tests.xml")
        some: list[str] = []
        if self.choice.rehearse:
            env, some = {"LOWBIT_STAND_IN": "cpu", "OMP_NUM_THREADS": "1"}, ["-k", SMALL]
        else:
            env = {"LOWBIT_REQUIRE": "cuda", "OMP_NUM_THREADS": "2"}
            if importlib.util.find_spec("xdist"):
                some = ["--numprocesses", str(min(8, os.cpu_count() or 1)), "--dist", "load"]
        command = [*PYTEST, *some, f"--junitxml={report}", *self.files()]
        return self.stage("cuda-tests", 200, command, env, junit(report))

    def checked(self, tool: str) -> Stage:
        """compute-sanitizer over small tests; racecheck beside memcheck, as neither is timed."""
        report, checker = self.report(f"{tool}.txt"), found_tool("compute-sanitizer")
        command: list[str] | str = lacking("compute-sanitizer")
        if self.choice.rehearse:
            command = "a rehearsal has no kernels to check"
        elif checker:
            options = ["--error-exitcode", "99", "--log-file", str(report)]
            options += ["--kernel-regex", "kns=lowbit"]
            command = [checker, "--tool", tool, *options, *PYTEST, "-k", SMALL, *self.files()]
        # Every tensor has an allocation of its own, so an access past its end is detected.
        env = {"LOWBIT_REQUIRE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        return self.stage(tool, 150, command, env, sanitizer(report), tool == "racecheck")

    def measured(self, name: str, module: str, *arguments: str) -> tuple[list[str], pathlib.Path]:
        """The command of a module of the bench, and the JSON that it writes."""
        out = self.report(f"{name}.json")
        size = ["--tiny"] if self.choice.rehearse else []
        where = ["--device", self.device, *size, "--json", str(out)]
        return [PYTHON, "-m", module, *arguments, *where], out

    def bench(self) -> Stage:
        command, out = self.measured("bench-step", "bench", "--only", "step")

        def read(text: str) -> dict:
            return {"result": json.loads(out.read_text())}

        return self.stage("bench-step", 180, command, self.with_baselines, read)

    def card(self, name: str) -> Stage:
        command, out = self.measured(name, "bench.gpu.card", name)
        env = self.with_baselines if name == "bus" else {}
        return self.stage(name, 90, command, env, read=lambda text: json.loads(out.read_text()))

    def large(self) -> Stage:
        command, out = self.measured("large", "bench.gpu.large")

        def read(text: str) -> dict:
            return json.loads(out.read_text())

        return self.stage("large", 400, command, self.with_baselines, read)

    def profile(self) -> Stage:
        """ncu's full set of some kernels: the report, and its text."""
        ncu, out = found_tool("ncu"), self.report("profile.ncu-rep")
        steps, _ = self.measured("profile", "bench.gpu.card", "profiled")
        if self.choice.rehearse:
            return self.stage("profile", 60, steps)
        if not ncu:
            return self.stage("profile", 60, lacking("ncu"))
        taken = f"{ncu} --set full --clock-control none -k 'regex:step_fast|step_any|measure'"
        shown = f"{ncu} --import {out} --page details > {self.report('profile.txt')}"
        command = ["bash", "-c", f"{taken} -f -o {out} {' '.join(steps)} && {shown}"]
        return self.stage("profile", 120, command)

    def patterns(self) -> Stage:
        """Compiled for this machine's card. A rehearsal compiles it alone."""
        compiler, out = nvcc(), self.report("patterns")
        if not compiler:
            return self.stage("patterns", 60, lacking("nvcc"))
        if float(self.capability) < 9.0:
            return self.stage("patterns", 60, "bulk copies need compute capability 9.0")
        arch = f"-arch=sm_{self.capability.replace('.', '')}"
        source = ROOT / "bench" / "gpu" / "patterns.cu"
        made = f"{compiler} -std=c++17 -O3 {arch} -o {out} {source}"
        if self.choice.rehearse:
            return self.stage("patterns", 90, ["bash", "-c", made])
        command = ["bash", "-c", f"{made} && {out}"]
        return self.stage("patterns", 90, command, read=lambda said: {"said": said})

    def report(self, name: str) -> pathlib.Path:
        """A file of a stage, without what an earlier run left."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        return path


def lacking(tool: str) -> str:
    return f"{tool} was not found (it is part of the CUDA toolkit)"


def baselines(
    folder: pathlib.Path, wheels: pathlib.Path | None
) -> tuple[list[Stage], dict[str, str]]:
    """The stage that installs baselines for the bench only, and the variables that add them."""
    if wheels is None:
        return [], {}
    target = folder / "baselines"
    shutil.rmtree(target, ignore_errors=True)
    found = sorted(str(w) for w in wheels.glob("*.whl"))
    install = [*PIP, "--no-compile", "--target", str(target), *found]

    def read(text: str) -> dict:
        return {
            "baselines": {d.metadata["Name"]: d.version for d in distributions(path=[str(target)])}
        }

    path = joined(str(target), os.environ.get("PYTHONPATH"))
    command = install if found else f"there are no wheels in {wheels}"
    return [Stage("baselines", 60, command, {}, read)], {"PYTHONPATH": path}


def joined(*paths: str | None) -> str:
    """Folders of a search path, without those that are not there."""
    return os.pathsep.join(path for path in paths if path)


def nvcc() -> str | None:
    """The path of nvcc, or None."""
    return found_tool("nvcc", os.environ.get("CUDACXX", ""))


def found_tool(name: str, first: str = "") -> str | None:
    """The path of a CUDA tool: on PATH, in CUDA_HOME, or in the newest toolkit of usual folders."""
    places = [first, shutil.which(name) or ""]
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home:
            places += [f"{home}/bin/{name}", f"{home}/compute-sanitizer/{name}"]
    for pattern in (
        f"/usr/local/cuda*/bin/{name}",
        f"/usr/local/cuda*/compute-sanitizer/{name}",
        f"/opt/cuda/bin/{name}",
    ):
        places += sorted(glob.glob(pattern), reverse=True)
    return next((p for p in places if p and os.access(p, os.X_OK) and os.path.isfile(p)), None)


def together(made: Iterable[Stage]) -> list[list[Stage]]:
    """Groups of stages: each group runs in parallel, one group after another."""
    groups: list[list[Stage]] = []
    for stage in made:
        if stage.parallel and groups:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups
