"""The stages of `make gpu`, in parts that can be chosen, with what each took on the last card.

    bits      the CUDA tests
    speed     the step beside baselines, then the kernels of a step, and Muon
    check     memcheck and racecheck over small tests
    profile   ncu over single steps, and in which order memory answers fastest (bench/patterns.cu)
    offload   state in the host's memory beside the bus's own speed
    train     a GPT of 124 M parameters

A rehearsal has the same stages on the CPU, at tiny sizes: an error that it can find costs no minute of a card.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions

from bench import tile_model
from bench.stage import Stage, junit, sanitizer

ROOT = pathlib.Path(__file__).parent.parent
PARTS = ("bits", "speed", "check", "profile", "offload", "train")
# Seconds on an H100 with 16 cores (2026-11-27), where they were measured; the others are guesses.
TOOK = {
    "wheel": 5, "build": 110, "baselines": 3, "cuda-tests": 35, "bench-step": 60, "kernels": 25, "muon": 40, "memcheck": 12,
    "racecheck": 60, "profile": 35, "patterns": 15, "bus": 15, "train": 60,
}  # fmt: skip
# Tests that take seconds even under a tool that is fifty times slower, and run every kernel: short blocks, odd ends, misaligned memory, all formats.
SMALL = "test_blocks_and_shards or test_values_at_the_edges or test_a_thousand_tensors or (test_encode_decode and 64)"
PATIENT = 5  # times as long a stage of a rehearsal may take, which tests run on machines that do other work
NOT_ON_GPU = ("test_kernel_table", "test_simulate", "test_two_gpus", "test_waiting")


@dataclass(frozen=True)
class Choice:
    """What a run does.

    Attributes:
        parts: names of PARTS, in the order in which they run.
        wheel: a wheel of lowbit that is installed into a folder of its own; None builds the sources.
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
        "speed": [made.bench(), made.card("kernels"), made.card("muon")],
        "check": [made.checked("memcheck"), made.checked("racecheck")],
        "profile": [made.profile(), made.patterns()],
        "offload": [made.card("bus")],
        "train": [made.card("train")],
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
            path = os.pathsep.join([f"{site}/bin", os.environ.get("PATH", "")])
            self.env = {"PYTHONPATH": site, "PATH": path}
        self.installs, self.with_baselines = baselines(folder, choice.wheels)
        if self.with_baselines and choice.wheel:
            both = os.pathsep.join([self.with_baselines["PYTHONPATH"], self.env["PYTHONPATH"]])
            self.with_baselines = {"PYTHONPATH": both}

    def tree(self) -> pathlib.Path:
        """A copy without lowbit's own sources, which have no operators and would be imported first."""
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

    def stage(self, name: str, limit: float, command: list[str] | str, **more: object) -> Stage:
        env = {**self.env, **more.pop("env", {})}  # type: ignore[dict-item]
        limit *= PATIENT if self.choice.rehearse else 1
        made = Stage(name, limit, command, env, after="build", **more)  # type: ignore[arg-type]
        made.took, made.cwd = (0 if self.choice.rehearse else TOOK[name]), self.cwd
        return made

    def build(self, options: list[str]) -> Stage:
        """Installs the wheel, or builds the sources for this card."""
        if self.choice.rehearse:
            command = [sys.executable, "-c", "import lowbit"]
            return Stage("build", 60 * PATIENT, command, self.env)
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check"]  # fmt: skip
        if self.choice.wheel:
            site = self.folder / "site"
            shutil.rmtree(site, ignore_errors=True)
            command = [*pip, "--quiet", "--no-compile", "--target", str(site), str(self.choice.wheel)]  # fmt: skip
            return Stage("build", 60, command, self.env, took=TOOK["wheel"])
        architecture = f"{self.capability.replace('.', '')}-real"
        command = [
            *pip, "--no-build-isolation", "-e", ".", *options, "-C", "cmake.define.LOWBIT_CUDA=ON", "-C", "cmake.define.LOWBIT_CUDA_STRICT=OFF",
            "-C", f"cmake.define.LOWBIT_CUDA_ARCHS={architecture}",
        ]  # fmt: skip

        def read(text: str) -> dict:
            return {"tiles": tile_model.counted(ROOT / "build" / "lowbit" / "kernels.txt")}

        return Stage("build", 240, command, {"CUDACXX": nvcc() or "nvcc"}, read, took=TOOK["build"])

    def pytest(self) -> list[str]:
        # -vv prints a line per test, so a killed run still leaves results (the project's own options include -q).
        return [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "--continue-on-collection-errors"]  # fmt: skip

    def files(self) -> list[str]:
        found = sorted((ROOT / "tests" / "cuda").glob("test_*.py"))
        return [f"tests/cuda/{p.name}" for p in found if p.stem not in NOT_ON_GPU]

    def tests(self) -> Stage:
        """All CUDA tests. A rehearsal runs the small ones with the CPU in the card's place, and collects the others."""
        report = self.report("cuda-tests.xml")
        many = ["--numprocesses", str(min(8, os.cpu_count() or 1)), "--dist", "load"]
        many = many if importlib.util.find_spec("xdist") and not self.choice.rehearse else []
        env = {"LOWBIT_REQUIRE": "cuda", "OMP_NUM_THREADS": "2"}
        some = []
        if self.choice.rehearse:
            env, some = {"LOWBIT_STAND_IN": "cpu", "OMP_NUM_THREADS": "1"}, ["-k", SMALL]
        command = [*self.pytest(), *many, f"--junitxml={report}", *some, *self.files()]
        return self.stage("cuda-tests", 200, command, env=env, read=junit(report))

    def checked(self, tool: str) -> Stage:
        report = self.report(f"{tool}.txt")
        checker = found_tool("compute-sanitizer")
        command: list[str] | str = (
            "compute-sanitizer was not found (it is part of the CUDA toolkit)"
        )
        if self.choice.rehearse:
            command = "a rehearsal has no kernels to check"
        elif checker:
            command = [checker, "--tool", tool, "--error-exitcode", "99", "--log-file", str(report), "--kernel-regex", "kns=lowbit",
                       *self.pytest(), "-k", SMALL, *self.files()]  # fmt: skip
        # Every tensor has an allocation of its own, so an access past its end is detected.
        env = {"LOWBIT_REQUIRE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        made = self.stage(tool, 150, command, env=env, read=sanitizer(report))
        made.parallel = tool == "racecheck"  # beside memcheck: neither times anything
        return made

    def bench(self) -> Stage:
        out = self.report("bench-step.json")
        size = ["--tiny"] if self.choice.rehearse else []
        command = [sys.executable, "-m", "bench", "--device", self.device, *size, "--json", str(out), "--only", "step"]  # fmt: skip
        return self.stage("bench-step", 180, command, env=self.with_baselines, read=result_in(out))

    def card(self, name: str) -> Stage:
        out = self.report(f"{name}.json")
        size = ["--tiny"] if self.choice.rehearse else []
        command = [sys.executable, "-m", "bench.card", name, "--device", self.device, *size, "--json", str(out)]  # fmt: skip
        return self.stage(name, 150, command, read=lambda text: json.loads(out.read_text()))

    def profile(self) -> Stage:
        """ncu's full set of some kernels: the report, and its text."""
        ncu, out = found_tool("ncu"), self.report("profile.ncu-rep")
        steps = f"{sys.executable} -m bench.card profiled --device {self.device}"
        if self.choice.rehearse:
            return self.stage("profile", 60, [*steps.split(), "--tiny"])
        if not ncu:
            return self.stage("profile", 60, "ncu was not found (it is part of the CUDA toolkit)")
        text = f"{ncu} --set full --clock-control none -k 'regex:step_fast|step_any|measure' -f -o {out} {steps} && "
        text += f"{ncu} --import {out} --page details > {self.report('profile.txt')}"
        return self.stage("profile", 120, ["bash", "-c", text])

    def patterns(self) -> Stage:
        """Compiled for the card that is there."""
        compiler, out = nvcc(), self.report("patterns")
        source = ROOT / "bench" / "patterns.cu"
        if self.choice.rehearse or not compiler:
            why = "a rehearsal has no kernels to time" if self.choice.rehearse else "no nvcc"
            return self.stage("patterns", 60, why)
        text = f"{compiler} -std=c++17 -O3 -arch=sm_{self.capability.replace('.', '')} -o {out} {source} && {out}"
        return self.stage("patterns", 90, ["bash", "-c", text], read=lambda said: {"said": said})

    def report(self, name: str) -> pathlib.Path:
        """A file of a stage, without what an earlier run left."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        return path


def result_in(path: pathlib.Path) -> Callable[[str], dict]:
    return lambda text: {"result": json.loads(path.read_text())}


def baselines(
    folder: pathlib.Path, wheels: pathlib.Path | None
) -> tuple[list[Stage], dict[str, str]]:
    """The stage that installs the wheels of baselines into a folder for the bench only, and the environment variables that add it."""
    if wheels is None:
        return [], {}
    target = folder / "baselines"
    shutil.rmtree(target, ignore_errors=True)
    found = sorted(str(w) for w in wheels.glob("*.whl"))
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "--target", str(target), *found]  # fmt: skip

    def read(text: str) -> dict:
        return {
            "baselines": {d.metadata["Name"]: d.version for d in distributions(path=[str(target)])}
        }

    path = os.pathsep.join(p for p in (str(target), os.environ.get("PYTHONPATH", "")) if p)
    command = install if found else f"there are no wheels in {wheels}"
    return [Stage("baselines", 60, command, {}, read)], {"PYTHONPATH": path}


def nvcc() -> str | None:
    """The path of nvcc, or None."""
    return found_tool("nvcc", os.environ.get("CUDACXX", ""))


def found_tool(name: str, first: str = "") -> str | None:
    """The path of a CUDA tool: on PATH, in CUDA_HOME, or in the newest toolkit of the usual folders."""
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
