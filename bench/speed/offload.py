"""The step of a model whose parameters and state lie on the host: lowbit beside DeepSpeedCPUAdam,
and beside torch's fused AdamW in bfloat16, which torchao's CPUOffloadOptimizer runs there.

    python -m bench.speed.offload                  # a minute, 2 GiB of memory
    python -m bench.speed.offload --rounds 31 --layers 4

The parameters are those of recipes/one_card.py's model, one thread steps them, and contestants take
turns. Time is the processor's, which other processes disturb less than a clock. Compare ratios. The
optimizer of torchao itself asserts a device of CUDA or XPU, so its copies over the bus are measured
by `bench.gpu.card bus`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from bench.contestants import baselines, ours
from bench.contestants.contestant import Contestant
from bench.measuring import clock, machine
from bench.pages.page import table
from bench.speed.overlap import made
from bench.speed.step import Params

FIRST = baselines.DeepSpeed
CONTESTANTS: tuple[type[Contestant], ...] = (
    FIRST,
    baselines.DeepSpeedBfloat16,
    baselines.Torch,
    baselines.TorchBfloat16,
    ours.Eight,
    ours.Four,
    ours.Wide,
)
HEAD = ["step", "ns / parameter", f"to {FIRST.name}", "weights, gradients, state: B / parameter"]


def turn(entry: Contestant, repeats: int) -> Callable[[], float]:
    """Takes a turn, and returns the processor's seconds of one of its steps."""

    def run() -> float:
        begin = time.process_time()
        for _ in range(repeats):
            entry.step()
        return (time.process_time() - begin) / repeats

    return run


def measure(shapes: list[tuple[int, ...]], rounds: int, repeats: int) -> list[list[str]]:
    """The rows of the table."""
    params = Params(shapes, "cpu")
    entries: list[Contestant] = []
    for kind in CONTESTANTS:
        entry = kind()
        if reason := entry.missing("cpu"):
            print(f"{entry.name}: {reason}")
            continue
        entry.prepare(params.of(entry.dtype))
        entries.append(entry)
    times = clock.rounds([(e.name, turn(e, repeats)) for e in entries], rounds, float("inf"))
    values = sum(torch.Size(shape).numel() for shape in shapes)
    rows = []
    for entry in entries:
        mine = times[entry.name]
        to = clock.ratio(mine, times[FIRST.name]) if FIRST.name in times else float("nan")
        held = entry.state_bytes() + 2 * sum(p.nbytes for p in entry.params)
        each = f"{clock.median(mine) / values * 1e9:.3f}"
        rows.append([entry.name, each, f"{to:.2f}", f"{held / values:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3, help="steps of a turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [tuple(p.shape) for p in made(args.layers).parameters()]
    rows = measure(shapes, args.rounds, args.repeats)
    facts = machine.describe("cpu")
    versions: dict[str, str | None] = facts["versions"]  # type: ignore[assignment]
    known = ", ".join(f"{p} {versions[p]}" for p in ("torch", "lowbit", "deepspeed") if versions[p])
    print(f"{table(HEAD, rows)}\n")
    print(f"{facts['cpu']}, {facts['isa']}, one thread, load {facts['load']}; {known}")
    print(facts["date"])


if __name__ == "__main__":
    main()
