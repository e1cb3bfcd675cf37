"""Memory over many calls of operators and steps: what the process holds before and after.

    python -m tests.soak.memory --calls 100000

tests/optim/test_operator_leak.py has the same calls, a hundred of each.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowbit
from tests.optim import test_operator_leak as calls

WARM = 1000  # calls before the first look: caches fill
LIMIT = 1 << 20  # bytes that may stay over all calls, as allocators keep pages


def resident() -> int:
    """Bytes of the process in memory."""
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def steps(cls: type[Any], **options: Any) -> Callable[[], Callable[[], None]]:
    """A maker of steps of an optimizer."""

    def make() -> Callable[[], None]:
        p = nn.Parameter(torch.ones(32, 64, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        opt = cls([p], lr=1e-3, min_numel=64, **options)
        return lambda: opt.step()

    return make


MAKERS: dict[str, Callable[[], Callable[[], Any]]] = {
    "quantize, dequantize": calls.codes,
    "split, join": calls.stored,
    "accumulate": calls.accumulated,
    "AdamW": steps(lowbit.AdamW),
    "AdamW, 4 bits": steps(lowbit.AdamW, state_format="4bit"),
    "Adafactor": steps(lowbit.Adafactor),
    "LAMB": steps(lowbit.LAMB),
    "Lion": steps(lowbit.Lion),
    "other gradients at each step": calls.changing_sets,
    "in a subspace": calls.low_rank,
    "Muon": steps(lowbit.Muon),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.memory")
    parser.add_argument("--calls", type=int, default=100_000, help="of each; 100000 by default")
    count = parser.parse_args().calls
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    worst = 0
    for name, make in MAKERS.items():
        call = make()
        for _ in range(WARM):
            call()
        before = resident()
        for _ in range(count):
            call()
        grown = resident() - before
        worst = max(worst, grown)
        print(f"{name:30} {count} calls: {grown:+9} bytes", flush=True)
    sys.exit(f"memory grew by {worst} bytes" if worst > LIMIT else 0)


if __name__ == "__main__":
    main()
