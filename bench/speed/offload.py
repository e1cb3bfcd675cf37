"""The step of a model whose parameters and state lie on the host: lowbit beside DeepSpeedCPUAdam,
and beside torch's fused AdamW in bfloat16, which torchao's CPUOffloadOptimizer runs there.

    python -m bench.speed.offload                      # a minute, 2 GiB of memory
    python -m bench.speed.offload --threads 2 --wall   # on a machine that has nothing else to do

The parameters are those of recipes/one_card.py's model, and contestants take turns. Time is the
processor's, of all threads, which other processes disturb less than a clock. Compare ratios.
torchao's optimizer asserts a device of CUDA or XPU, so with its copies over the bus it is measured
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


def turn(entry: Contestant, repeats: int, now: Callable[[], float]) -> Callable[[], float]:
    """Takes a turn, and returns the seconds of one of its steps."""

    def run() -> float:
        begin = now()
        for _ in range(repeats):
            entry.step()
        return (now() - begin) / repeats

    return run


def measure(
    shapes: list[tuple[int, ...]],
    rounds: int,
    repeats: int,
    now: Callable[[], float] = time.process_time,
) -> list[list[str]]:
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
    turns = [(e.name, turn(e, repeats, now)) for e in entries]
    times = clock.rounds(turns, rounds, float("inf"))
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
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="time by the clock")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = [tuple(p.shape) for p in made(args.layers).parameters()]
    now = time.perf_counter if args.wall else time.process_time
    rows = measure(shapes, args.rounds, args.repeats, now)
    facts = machine.describe("cpu")
    versions: dict[str, str | None] = facts["versions"]  # type: ignore[assignment]
    known = ", ".join(f"{p} {versions[p]}" for p in ("torch", "lowbit", "deepspeed") if versions[p])
    print(f"{table(HEAD, rows)}\n")
    where = f"{facts['cpu']}, {facts['isa']}, threads: {args.threads}, load {facts['load']}"
    print(f"{where}; {known}; {facts['date']}")


if __name__ == "__main__":
    main()
