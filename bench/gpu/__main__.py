"""All checks on a GPU, without a network, within the minutes that there are: `make gpu`.

    python -m bench.gpu [-C cmake.define.NAME=VALUE ...]  builds; writes out/gpu.json and
                                                          out/gpu.md, and logs in out/gpu/
    python -m bench.gpu --wheel FILE                      takes a wheel of lowbit, builds nothing
    python -m bench.gpu --parts bits speed --minutes 4    some parts (bench/gpu/stages.py), in order
    python -m bench.gpu --wheels FOLDER                   installs baselines for the bench first
    python -m bench.gpu --out A --work B                  results in A; logs, and what is installed,
                                                          in B instead of A/gpu
    python -m bench.gpu --rehearse                        the same on the CPU, at tiny sizes
    python -m bench.gpu --page out/gpu.json               rewrites the page

The stages depend on the build, not on each other. A failed stage is a line of the page, and the
exit status is 1. If the machine lacks a requirement (no GPU, no nvcc, an old torch), the command
reports it at once and exits with 2. The JSON and the page are written after every stage, and the
verdict is printed as soon as the tests and the step are known.
"""

from __future__ import annotations

import argparse
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
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone

from bench import ROOT
from bench.gpu import asked, tile_model
from bench.gpu.stages import PARTS, Choice, nvcc, stages, together
from bench.pages.page import page as bench_page
from bench.pages.page import summary, table

BEGAN = time.perf_counter()  # before torch is imported, which takes seconds on a fresh machine
MINUTES = 9.5  # for everything, from BEGAN on
MODULES = ("pytest", "numpy", "yaml")
TO_BUILD = ("scikit_build_core", "pathspec")


def oldest_torch() -> str:
    """The version of torch from which on lowbit works, as pyproject.toml has it."""
    (oldest,) = re.findall(r'^ *"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    return oldest


def refusals(choice: Choice) -> list[str]:
    """The reasons why this machine cannot run the checks, each with what to do."""
    reasons = []
    builds = choice.wheel is None and not choice.rehearse
    if sys.version_info < (3, 10):  # noqa: UP036 this runs before anything is installed
        reasons.append(
            f"Python {platform.python_version()} is too old: lowbit needs 3.10; make gpu "
            "PY=python3.12"
        )
    needed = (*MODULES, *TO_BUILD) if builds else MODULES
    lacking = [m for m in needed if importlib.util.find_spec(m) is None]
    if lacking:
        reasons.append(
            f"{sys.executable} has no {', '.join(lacking)}: `make gpu` downloads nothing, so "
            "install them first"
        )
    if choice.wheel and not choice.wheel.is_file():
        reasons.append(f"{choice.wheel}: no such file; `make wheel` writes one into out/")
    for tool in ("cmake", "ninja") if builds else ():
        if not shutil.which(tool) and importlib.util.find_spec(tool) is None:
            reasons.append(f"{tool} is not on PATH")
    if builds and not nvcc():
        reasons.append(
            "nvcc was found neither on PATH nor in CUDA_HOME nor in /usr/local/cuda*/bin: the "
            "kernels cannot be built"
        )
    if importlib.util.find_spec("torch") is None:
        return [
            *reasons,
            f"{sys.executable} has no torch: lowbit needs {oldest_torch()}"
            " or later, built for CUDA",
        ]
    import torch

    def numbers(version: str) -> list[int]:
        return [int(n) for n in version.split("+")[0].split(".")[:2]]

    if numbers(torch.__version__) < numbers(oldest_torch()):
        reasons.append(f"torch {torch.__version__} is too old: lowbit needs {oldest_torch()}")
    if choice.rehearse:
        return reasons
    if torch.version.cuda is None:
        reasons.append(f"torch {torch.__version__} is built without CUDA")
    elif not torch.cuda.is_available():
        reasons.append(
            f"torch {torch.__version__} sees no GPU (torch.cuda.is_available() is False); "
            "nvidia-smi shows whether there is one"
        )
    return reasons


def describe() -> dict:
    import torch

    from bench.measuring import machine

    gpu = machine.query(machine.GPU_FIELDS)
    if not torch.cuda.is_available():
        gpu = {"name": "No GPU, a rehearsal"}
    elif "name" not in gpu:
        gpu |= {
            "name": torch.cuda.get_device_name(),
            "compute_cap": "{}.{}".format(*torch.cuda.get_device_capability()),
        }
    if torch.cuda.is_available():
        gpu["multiprocessors"] = str(torch.cuda.get_device_properties(0).multi_processor_count)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": printed("git", "rev-parse", "--short", "HEAD").strip() or "unknown",
        "cores": os.cpu_count(),
        "nvcc": next(
            (
                line
                for line in printed(nvcc() or "nvcc", "--version").splitlines()
                if "release" in line
            ),
            "unknown",
        ).strip(),
    }


def printed(*command: str) -> str:
    """The output of a tool; empty if it is missing (the sources may be a copy without git)."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def page(report: dict) -> str:
    """The report as Markdown."""
    stages = report["stages"]
    parts = [
        *opening(report),
        *(["## Asked, measured, met", asked.page(report["asked"])] if report.get("asked") else []),
        "## Stages",
        baselines_line(stages),
        table(
            ["stage", "status", "seconds", ""],
            [[s["name"], s["status"], f"{s['seconds']:.0f}", note(s)] for s in stages],
        ),
        *(part for s in stages for part in trouble(s)),
        *(part for s in stages for part in told(s)),
        *benched(report),
    ]
    return "\n\n".join(parts) + "\n"


def opening(report: dict) -> list[str]:
    """The title, whether all passed, and the machine."""
    machine, gpu = report["machine"], report["machine"]["gpu"]
    failed = [s["name"] for s in report["stages"] if s["status"] != "passed"]

    def listed(facts: dict) -> str:
        return ", ".join(f"{k} {v}" for k, v in facts.items())

    return [
        f"# {gpu.get('name', 'A GPU')}: build, tests, sanitizers, bench",
        f"`make gpu`, {machine['date']}, commit {machine['commit']}, "
        f"{report['seconds'] / 60:.1f} minutes. "
        + (f"**Not passed: {', '.join(failed)}.**" if failed else "All stages passed."),
        f"* before: {listed(gpu)}\n"
        f"* after: {listed(report.get('clocks_after', {}))}\n"
        f"* Python {machine['python']}, torch {machine['torch']}, CUDA {machine['cuda']}, "
        f"{machine['nvcc']}, {machine['cores']} cores",
    ]


def trouble(stage: dict) -> list[str]:
    """What failed in a stage, the end of its log, and what it skipped."""
    parts, name = [], stage["name"]
    if lines := [*stage.get("failures", []), *stage.get("errors", [])]:
        parts += [f"### {name}: what failed", "\n".join(f"* `{line}`" for line in lines)]
    if stage["status"].startswith(("failed", "timed out")):
        tail = stage["tail"][-2000:].replace("```", chr(39) * 3)
        parts += [f"### {name}: the end of its log", f"```\n{tail}\n```"]
    if skipped := stage.get("skipped"):
        lines = [f"* {count}: {reason}" for reason, count in skipped.items()]
        parts += [f"### {name}: skipped", "\n".join(lines)]
    return parts


def told(stage: dict) -> list[str]:
    """The tables of a stage, and what it printed."""
    parts = []
    for made in stage.get("tables", []):
        parts += [f"## {made['title']}", table(made["head"], made["rows"])]
    if stage.get("said"):
        parts += ["## The order in which memory is asked", f"```text\n{stage['said']}\n```"]
    return parts


def benched(report: dict) -> list[str]:
    """The results of the bench, which stages measured in parts, as one."""
    results = [s["result"] for s in report["stages"] if "result" in s]
    if not results:
        return []
    merged: dict = {}
    for result in results:
        merged |= result
    merged["failed"] = {k: reason for r in results for k, reason in r["failed"].items()}
    merged["seconds"] = {"all": sum(r["seconds"].get("all", 0.0) for r in results)}
    parts = []
    if merged.get("step"):
        parts += ["## In short", summary(merged)]
        parts += ["## A tile, counted and measured", tile_model.page(report)]
    return [*parts, bench_page(merged, "make gpu").replace("# Measured", "## Measured", 1)]


def baselines_line(stages: list[dict]) -> str:
    """A sentence about the baselines installed for the bench."""
    stage = next((s for s in stages if s["name"] == "baselines"), None)
    if stage is None:
        return (
            "No wheels of baselines were given (`make gpu WHEELS=folder`): baselines that are not "
            "installed are skipped."
        )
    found = ", ".join(
        f"{name} {version}" for name, version in sorted(stage.get("baselines", {}).items())
    )
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
        print(f"the goals could not be evaluated: {type(error).__name__}: {error}", file=sys.stderr)
    path.write_text(json.dumps(report, indent=1) + "\n")
    try:
        path.with_suffix(".md").write_text(page(report))
    except Exception as error:  # the JSON is complete, so the page can be rewritten
        print(f"the page could not be written: {type(error).__name__}: {error}", file=sys.stderr)


def run(
    options: list[str],
    out: pathlib.Path,
    choice: Choice | None = None,
    minutes: float = MINUTES,
    work: pathlib.Path | None = None,
) -> int:
    from bench.measuring import machine

    folder = work or out / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    report: dict = {"machine": describe(), "stages": [], "seconds": 0.0}
    passed: set[str] = set()
    print(", ".join(f"{k} {v}" for k, v in report["machine"]["gpu"].items()), flush=True)
    made = stages(folder, options, report["machine"]["gpu"].get("compute_cap", "9.0"), choice)
    said = False
    for group in together(made):
        with ThreadPoolExecutor(len(group)) as pool:
            left = minutes * 60 - (time.perf_counter() - BEGAN)
            running = {pool.submit(stage.run, folder, left, passed): stage for stage in group}
            for done in as_completed(running):
                stage, result = running[done], done.result()
                passed |= {stage.name} if result["status"] == "passed" else set()
                report["stages"].append(result)
                report["seconds"] = time.perf_counter() - BEGAN
                report["clocks_after"] = machine.gpu_clocks()
                write(report, out / "gpu.json")
                print(
                    f"[{report['seconds']:5.0f} s] {stage.name}: {result['status']} {note(result)}",
                    flush=True,
                )
        try:
            verdict = None if said else asked.verdict(report)
        except Exception as error:  # an unexpected form of a result; the next stages still run
            verdict = f"none, {type(error).__name__}: {error}"
        if verdict:
            said = True
            print(f"[{report['seconds']:5.0f} s] VERDICT: {verdict}", flush=True)
    print(f"{out / 'gpu.md'} and {out / 'gpu.json'}; logs in {folder}")
    return 0 if all(s["status"] == "passed" for s in report["stages"]) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out", help="for the results")
    parser.add_argument(
        "--work",
        type=pathlib.Path,
        metavar="FOLDER",
        help="for logs and what is installed; gpu/ beside the results by default",
    )
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
    parser.add_argument(
        "--wheels",
        type=pathlib.Path,
        metavar="FOLDER",
        help="wheels of baselines, for the bench: docs/speed/bench.md",
    )
    parser.add_argument(
        "--wheel", type=pathlib.Path, metavar="FILE", help="of lowbit, instead of a build"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"for everything; {MINUTES} by default"
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny sizes")
    given = parser.parse_args()
    if given.page:
        write(json.loads(given.page.read_text()), given.page)
        return 0
    wheel, wheels = (path.resolve() if path else None for path in (given.wheel, given.wheels))
    choice = Choice(given.parts, wheel, wheels, given.rehearse)
    if reasons := refusals(choice):
        print(
            "make gpu cannot run here:", *[f"  - {r}" for r in reasons], sep="\n", file=sys.stderr
        )
        return 2
    out, work = given.out.resolve(), given.work.resolve() if given.work else None
    os.chdir(ROOT)
    options = [x for option in given.options for x in ("-C", option)]
    return run(options, out, choice, given.minutes, work)


if __name__ == "__main__":
    sys.exit(main())
