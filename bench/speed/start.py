"""Start-up: seconds to import a package, and of the first step against a later one,
each in a fresh process.

python -m bench.speed.start NAME DEVICE      the command of such a process
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from bench.measuring.child import Child, answer
from bench.measuring.settings import Settings
from bench.measuring.workload import Shapes

IMPORTS = ("torch", "lowbit", "torchao.optim", "bitsandbytes")
SHAPES: Shapes = [(512, 512)] * 8
STARTED = ("Torch", "Eight", "Torchao", "Bitsandbytes")


def run(settings: Settings, say: Callable[[str], None]) -> Iterator[dict]:
    times: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    for number in range(max(1, settings.rounds // 2 if settings.device == "cpu" else 2)):
        for package in IMPORTS:
            if f"import {package}" in missing:
                continue
            say(f"import {package}, {number + 1}")
            begin = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", f"import torch, {package}"], capture_output=True, text=True
            )
            if done.returncode:
                missing[f"import {package}"] = (done.stderr.strip().splitlines() or ["fails"])[-1][
                    :160
                ]
                continue
            times.setdefault(package, []).append(time.perf_counter() - begin)
    steps: dict[str, dict[str, float]] = {}
    for kind in STARTED:
        if kind == "Torchao" and settings.name != "full":
            continue
        say(f"first step of {kind}")
        try:
            child = Child("bench.speed.start", kind, settings.device)
            reply = child.hello()
            steps[reply.pop("name")] = reply
            child.close()
        except RuntimeError as error:
            missing[kind] = str(error)
    imports = {name: statistics.median(t) for name, t in times.items()}
    without_torch = {name: t - imports["torch"] for name, t in imports.items() if name != "torch"}
    yield {
        "import_seconds": imports,
        "beside_torch": without_torch,
        "steps": steps,
        "missing": missing,
    }


def start(kind: str, device: str) -> tuple[dict, dict]:
    """In the child: times the first step, including the creation of state, and later ones."""
    import torch

    from bench.contestants import roster
    from bench.measuring import clock
    from bench.speed.step import Params

    entry = next(k for k in roster.ALL if k.__name__ == kind)()
    if reason := entry.missing(device):
        raise RuntimeError(reason)
    params = Params(SHAPES, device).of(entry.dtype)
    torch.ones(1, device=device)
    first = clock.seconds(lambda: entry.prepare(params), device)
    clock.seconds(entry.step, device)
    later = clock.seconds(entry.step, device, 5)
    return {"name": entry.name, "first_seconds": first, "later_seconds": later}, {}


if __name__ == "__main__":
    answer(lambda: start(*sys.argv[1:]))
