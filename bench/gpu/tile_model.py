"""The clocks that a tile of 256 values should take, counted in the machine code of the build,
beside those it took: one table of `make gpu`.

The counts are those of kernels.txt (csrc/cuda/resources.py). What memory needs is taken at the
speed of a copy in the same run. Clocks are of one multiprocessor.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import Any

from bench.measuring.workload import QUARTER
from bench.pages.page import table

TILE = 256
ADAMW = "AdamRule<true, false>, "
STOCHASTIC = ADAMW + "BFloat16Stochastic, BFloat16Grad, "
# Contestants by name, as in bench/gpu/asked.py, and what their kernels are specialized for.
KERNELS = {
    "lowbit 8-bit, bf16 stochastic": STOCHASTIC + "Dynamic8, Dynamic8Unsigned",
    "lowbit 8-bit, bf16 stochastic, in a CUDA graph": STOCHASTIC + "Dynamic8, Dynamic8Unsigned",
    "lowbit 8-bit, float32 weights": ADAMW
    + "Float32Param, Float32Grad, Dynamic8, Dynamic8Unsigned",
    "lowbit 8-bit, bf16 Kahan": ADAMW + "BFloat16Kahan, BFloat16Grad, Dynamic8, Dynamic8Unsigned",
    "lowbit 8-bit, bf16 + 8 bits": ADAMW
    + "BFloat16Split8, BFloat16Grad, Dynamic8, Dynamic8Unsigned",
    "lowbit 4-bit, bf16 stochastic": STOCHASTIC + "Dynamic4, PowerOne4Unsigned",
    "lowbit fp8, bf16 stochastic": STOCHASTIC + "Float8E4M3, Float8E4M3Unsigned",
    "lowbit log8, bf16 stochastic": STOCHASTIC + "Log8Signed, Log8",
    "lowbit companded8, bf16 stochastic": STOCHASTIC + "Companded8, Companded8Unsigned",
}
COPY = "copy of the bytes of an 8-bit step"
COLUMNS = ("issue clk", "alu clk", "wavefronts", "bytes")


def counted(file: pathlib.Path) -> dict[str, dict[str, float]]:
    """The columns of the tables of tiles in kernels.txt, by kernel.
    Of several architectures the last one's.
    """
    found: dict[str, dict[str, float]] = {}
    head: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        if line.split()[:2] == ["instructions", "alu"]:
            head = re.split(r"\s+(?!clk)", line.strip())
        elif not line.strip():
            head = []
        elif head:
            cells = line.split(maxsplit=len(head) - 1)
            found[cells[-1]] = {
                name: float(cell)
                for name, cell in zip(head[:-1], cells, strict=False)
                if name in COLUMNS
            }
    return found


def page(report: dict[str, Any]) -> str:
    """The table, or the reason why it is missing."""
    counts = next((s["tiles"] for s in report["stages"] if s.get("tiles")), {})
    cases = [c for s in report["stages"] for c in s.get("result", {}).get("step", [])]
    case = next((c for c in cases if c["workload"] == QUARTER.name), None)
    gpu = report["machine"]["gpu"]
    clock = (case or {}).get("clocks", {}).get("clocks.sm") or gpu.get("clocks.max.sm")
    processors = gpu.get("multiprocessors")
    if not (counts and case and clock and processors):
        needed = {
            "the build counted no tiles": counts,
            "the step was not timed": case,
            "no clock is known": clock,
            "the number of multiprocessors is not known": processors,
        }
        return f"Not measured: {', '.join(what for what, there in needed.items() if not there)}."
    said = (
        f"Clocks of one of {processors} multiprocessors at {clock} MHz for 256 values, "
        f"{QUARTER.name}. Issue, ALU and wavefronts of shared memory are counted "
        "(docs/kernels/cuda-counts.md), memory is the kernel's bytes at the copy's speed; "
        "the last column is the measured time over the largest of the four."
    )
    head = ["step", "issue", "ALU", "shared memory", "memory", "measured", "over the bound"]
    return f"{said}\n\n{table(head, rows(case, counts, float(clock) * 1e6 * float(processors)))}"


def rows(
    case: dict[str, Any], counts: dict[str, dict[str, float]], hertz: float
) -> Iterator[list[str]]:
    """A row for each step whose kernel was counted; `hertz` is of all multiprocessors together."""
    speeds = (r["gb_per_second"] for r in case["rows"] if r["name"] == COPY)
    copy = next((1e9 * speed for speed in speeds if speed), None)
    for row in case["rows"]:
        count = counts.get(f"step_fast<{KERNELS.get(row['name'])}>")
        times = sorted(t for t in row["seconds"] if t)
        if count is None or not times:
            continue
        took = times[len(times) // 2] * hertz * TILE / case["numel"]
        counted = [count[name] for name in COLUMNS[:3]]
        memory = [count["bytes"] * hertz / copy] if copy else []
        yield [
            row["name"],
            *(f"{clocks:.0f}" for clocks in counted),
            f"{memory[0]:.0f}" if memory else "",
            f"{took:.0f}",
            f"{took / max([*counted, *memory]):.2f}",
        ]
