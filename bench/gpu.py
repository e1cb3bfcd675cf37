"""All checks on a GPU, within ten minutes and without a network: build, tests, sanitizers, bench. `make gpu` runs this.

    python -m bench.gpu [-C cmake.define.NAME=VALUE ...]      writes out/gpu.json, out/gpu.md and logs in out/gpu/
    python -m bench.gpu --wheels FOLDER ...                   installs the wheels of baselines first, for the bench only
    python -m bench.gpu --page out/gpu.json                   rewrites the page

The stages depend on the build, not on each other. A failed stage is a line of the page, and the exit status is 1. If the machine lacks a requirement
(no GPU, no nvcc, an old torch), the command reports it at once and exits with 2. The JSON and the page are written after every stage.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import distributions

from bench import asked, tile_model
from bench.page import page as bench_page
from bench.page import summary, table
from bench.stage import Stage, junit, sanitizer

ROOT = pathlib.Path(__file__).parent.parent
BEGAN = time.perf_counter()  # before torch is imported, which takes seconds on a fresh machine
ALL = 9.5 * 60  # seconds for everything, from BEGAN on
# Tests that take seconds even under a tool that is fifty times slower, and run every kernel: short blocks, odd ends, misaligned memory, all formats.
SMALL = "test_blocks_and_shards or test_values_at_the_edges or test_a_thousand_tensors or (test_encode_decode and 64)"
MODULES = ("scikit_build_core", "pathspec", "pytest", "numpy", "yaml")


def oldest_torch() -> str:
    """The version of torch from which on lowbit works, as pyproject.toml has it."""
    (oldest,) = re.findall(r'^ *"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    return oldest


def refusals() -> list[str]:
    """The reasons why this machine cannot run the checks, each with what to do."""
    reasons = []
    if sys.version_info < (3, 10):  # noqa: UP036 this runs before anything is installed
        reasons.append(
            f"Python {platform.python_version()} is too old: lowbit needs 3.10; make gpu PY=python3.12"
        )
    lacking = [m for m in MODULES if importlib.util.find_spec(m) is None]
    if lacking:
        reasons.append(
            f"{sys.executable} has no {', '.join(lacking)}: `make gpu` downloads nothing, so install them first"
        )
    for tool in ("cmake", "ninja"):
        if not shutil.which(tool) and importlib.util.find_spec(tool) is None:
            reasons.append(f"{tool} is not on PATH")
    if not nvcc():
        reasons.append(
            "nvcc was found neither on PATH nor in CUDA_HOME nor in /usr/local/cuda*/bin: the kernels cannot be built"
        )
    if importlib.util.find_spec("torch") is None:
        return [
            *reasons,
            f"{sys.executable} has no torch: lowbit needs {oldest_torch()} or later, built for CUDA",
        ]
    import torch

    def numbers(version: str) -> list[int]:
        return [int(n) for n in version.split("+")[0].split(".")[:2]]

    if numbers(torch.__version__) < numbers(oldest_torch()):
        reasons.append(f"torch {torch.__version__} is too old: lowbit needs {oldest_torch()}")
    if torch.version.cuda is None:
        reasons.append(f"torch {torch.__version__} is built without CUDA")
    elif not torch.cuda.is_available():
        reasons.append(
            f"torch {torch.__version__} sees no GPU (torch.cuda.is_available() is False); nvidia-smi shows whether there is one"
        )
    return reasons


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


def stages(
    folder: pathlib.Path, options: list[str], capability: str, wheels: pathlib.Path | None = None
) -> list[Stage]:
    python, require = sys.executable, {"LOWBIT_REQUIRE": "cuda"}
    architecture = f"{capability.replace('.', '')}-real"
    env = {"CUDACXX": nvcc() or "nvcc"}
    install = [python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "-e", ".", *options,
               "-C", "cmake.define.LOWBIT_CUDA=ON", "-C", "cmake.define.LOWBIT_CUDA_STRICT=OFF", "-C", f"cmake.define.LOWBIT_CUDA_ARCHS={architecture}"]  # fmt: skip
    # -vv prints a line per test, so a killed run still leaves results (the project's own options include -q).
    pytest = [python, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "--continue-on-collection-errors"]  # fmt: skip
    cuda_tests = sorted(
        str(p.relative_to(ROOT)) for p in (ROOT / "tests" / "cuda").glob("test_cuda*.py")
    )
    many = (
        ["--numprocesses", str(min(8, os.cpu_count() or 1)), "--dist", "loadfile"]
        if importlib.util.find_spec("xdist")
        else []
    )
    checker = found_tool("compute-sanitizer")
    installs, with_baselines = baselines(folder, wheels)
    # Every tensor has an allocation of its own, so an access past its end is detected.
    uncached = {**require, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def checked(tool: str) -> Stage:
        report = folder / f"{tool}.txt"
        report.unlink(missing_ok=True)
        command = [checker, "--tool", tool, "--error-exitcode", "99", "--log-file", str(report), "--kernel-regex", "kns=lowbit",
                   *pytest, "-k", SMALL, *cuda_tests] if checker else "compute-sanitizer was not found (it is part of the CUDA toolkit)"  # fmt: skip
        return Stage(tool, 120, command, uncached, sanitizer(report), after="build")

    def bench(name: str, limit: float, *sections: str) -> Stage:
        out = folder / f"{name}.json"
        out.unlink(missing_ok=True)
        command = [
            python,
            "-m",
            "bench",
            "--device",
            "cuda",
            "--json",
            str(out),
            "--only",
            *sections,
        ]
        return Stage(
            name,
            limit,
            command,
            with_baselines,
            lambda text: {"result": json.loads(out.read_text())},
            after="build",
        )

    def tests(name: str, limit: float, *arguments: str) -> Stage:
        report = folder / f"{name}.xml"
        report.unlink(missing_ok=True)
        return Stage(
            name,
            limit,
            [*pytest, f"--junitxml={report}", *arguments],
            require,
            junit(report),
            after="build",
        )

    # The required results come first. Sanitizers and the remaining tests time nothing, so they run in parallel.
    return [
        Stage("build", 240, install, env, lambda text: {"tiles": tile_model.counted(ROOT / "build" / "lowbit" / "kernels.txt")}),
        *installs,
        tests("cuda-tests", 200, *cuda_tests),
        bench("bench-step", 180, "step"),
        checked("memcheck"),
        replace(checked("racecheck"), parallel=True),
        replace(tests("all-tests", 160, *many, "tests", *[f"--ignore={f}" for f in cuda_tests]), parallel=True),
        bench("bench-growth", 60, "growth"),
        bench("bench-rest", 100, "training", "checkpoint", "start"),
    ]  # fmt: skip


def together(made: Iterable[Stage]) -> list[list[Stage]]:
    """Groups of stages: each group runs in parallel, one group after another."""
    groups: list[list[Stage]] = []
    for stage in made:
        if stage.parallel and groups:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def describe() -> dict:
    from bench import machine

    gpu = machine.query(machine.GPU_FIELDS)
    if "name" not in gpu:
        import torch

        gpu |= {
            "name": torch.cuda.get_device_name(),
            "compute_cap": "{}.{}".format(*torch.cuda.get_device_capability()),
        }
    import torch

    gpu["multiprocessors"] = str(torch.cuda.get_device_properties(0).multi_processor_count)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"), "gpu": gpu, "python": platform.python_version(),
        "torch": torch.__version__, "cuda": torch.version.cuda, "commit": printed("git", "rev-parse", "--short", "HEAD").strip() or "unknown", "cores": os.cpu_count(),
        "nvcc": next((line for line in printed(nvcc() or "nvcc", "--version").splitlines() if "release" in line), "unknown").strip(),
    }  # fmt: skip


def printed(*command: str) -> str:
    """The output of a tool; empty if it is missing (the sources may be a copy without git)."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def page(report: dict) -> str:
    """The report as Markdown."""
    machine, results = report["machine"], [s["result"] for s in report["stages"] if "result" in s]
    gpu = machine["gpu"]
    failed = [s["name"] for s in report["stages"] if s["status"] != "passed"]
    parts = [
        f"# {gpu.get('name', 'A GPU')}: build, tests, sanitizers, bench",
        f"`make gpu`, {machine['date']}, commit {machine['commit']}, {report['seconds'] / 60:.1f} minutes. "
        + (f"**Not passed: {', '.join(failed)}.**" if failed else "All stages passed."),
        "\n".join([
            "* before: " + ", ".join(f"{k} {v}" for k, v in gpu.items()),
            "* after: " + ", ".join(f"{k} {v}" for k, v in report.get("clocks_after", {}).items()),
            f"* Python {machine['python']}, torch {machine['torch']}, CUDA {machine['cuda']}, {machine['nvcc']}, {machine['cores']} cores",
        ]),
        *(["## Asked, measured, met", asked.page(report["asked"])] if report.get("asked") else []),
        "## Stages",
        baselines_line(report["stages"]),
        table(["stage", "status", "seconds", ""], [[s["name"], s["status"], f"{s['seconds']:.0f}", note(s)] for s in report["stages"]]),
    ]  # fmt: skip
    for s in report["stages"]:
        trouble = [*s.get("failures", []), *s.get("errors", [])]
        if trouble:
            parts += [f"### {s['name']}: what failed", "\n".join(f"* `{line}`" for line in trouble)]
        if s["status"].startswith(("failed", "timed out")):
            parts += [
                f"### {s['name']}: the end of its log",
                f"```\n{s['tail'][-2000:].replace('```', chr(39) * 3)}\n```",
            ]
        if s.get("skipped"):
            parts += [
                f"### {s['name']}: skipped",
                "\n".join(f"* {count}: {reason}" for reason, count in s["skipped"].items()),
            ]
    if results:
        merged: dict = {"failed": {}, "seconds": {"all": 0.0}}
        for r in results:
            seconds = merged["seconds"]["all"] + r["seconds"].get("all", 0.0)
            merged = {
                **merged,
                **r,
                "failed": merged["failed"] | r["failed"],
                "seconds": {"all": seconds},
            }
        if merged.get("step"):
            parts += ["## In short", summary(merged)]
            parts += ["## A tile, counted and measured", tile_model.page(report)]
        parts.append(bench_page(merged, "make gpu").replace("# Measured", "## Measured", 1))
    return "\n\n".join(parts) + "\n"


def baselines_line(stages: list[dict]) -> str:
    """A sentence about the baselines installed for the bench."""
    stage = next((s for s in stages if s["name"] == "baselines"), None)
    if stage is None:
        return "No wheels of baselines were given (`make gpu WHEELS=folder`): baselines that are not installed are skipped."
    found = ", ".join(f"{name} {version}" for name, version in sorted(stage.get("baselines", {}).items()))  # fmt: skip
    return f"Baselines of the bench, from wheels: {found or 'none'}."


def note(stage: dict) -> str:
    if stage["status"] in ("missing", "left out"):
        return stage["tail"]
    notes = [f"{v} {k}" for k, v in stage.get("tests", {}).items() if v]
    if "summary" in stage:
        notes.append(stage["summary"])
    if "unread" in stage:
        notes.append(f"its result could not be read: {stage['unread']}")
    return "; ".join(notes)


def write(report: dict, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        report["asked"] = asked.lines(report)
    except Exception as error:  # an unexpected form of a result
        print(f"the goals could not be evaluated: {type(error).__name__}: {error}", file=sys.stderr)  # fmt: skip
    path.write_text(json.dumps(report, indent=1) + "\n")
    try:
        path.with_suffix(".md").write_text(page(report))
    except Exception as error:  # the JSON is complete, so the page can be rewritten
        print(f"the page could not be written: {type(error).__name__}: {error}", file=sys.stderr)


def run(options: list[str], out: pathlib.Path, wheels: pathlib.Path | None = None) -> int:
    from bench import machine

    folder = out / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    report: dict = {"machine": describe(), "stages": [], "seconds": 0.0}
    passed: set[str] = set()
    print(", ".join(f"{k} {v}" for k, v in report["machine"]["gpu"].items()), flush=True)
    made = stages(folder, options, report["machine"]["gpu"].get("compute_cap", "9.0"), wheels)
    for group in together(made):
        with ThreadPoolExecutor(len(group)) as pool:
            left = ALL - (time.perf_counter() - BEGAN)
            running = {pool.submit(stage.run, folder, left, passed): stage for stage in group}
            for done in as_completed(running):
                stage, result = running[done], done.result()
                passed |= {stage.name} if result["status"] == "passed" else set()
                report["stages"].append(result)
                report["seconds"] = time.perf_counter() - BEGAN
                report["clocks_after"] = machine.gpu_clocks()
                write(report, out / "gpu.json")
                print(f"[{report['seconds']:5.0f} s] {stage.name}: {result['status']} {note(result)}", flush=True)  # fmt: skip
    print(f"{out / 'gpu.md'} and {out / 'gpu.json'}; logs in {folder}")
    return 0 if all(s["status"] == "passed" for s in report["stages"]) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out")
    parser.add_argument(
        "--page",
        type=pathlib.Path,
        metavar="FILE",
        help="rewrite the page of this report, in its folder",
    )
    parser.add_argument(
        "-C",
        dest="options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for pip install",
    )
    parser.add_argument("--wheels", type=pathlib.Path, metavar="FOLDER", help="wheels of baselines, for the bench: docs/bench.md")  # fmt: skip
    given = parser.parse_args()
    if given.page:
        write(json.loads(given.page.read_text()), given.page)
        return 0
    if reasons := refusals():
        print(
            "make gpu cannot run here:", *[f"  - {r}" for r in reasons], sep="\n", file=sys.stderr
        )
        return 2
    wheels = given.wheels.resolve() if given.wheels else None
    os.chdir(ROOT)
    return run([x for option in given.options for x in ("-C", option)], given.out, wheels)


if __name__ == "__main__":
    sys.exit(main())
