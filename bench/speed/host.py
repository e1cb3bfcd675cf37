"""What a step takes of the host beside its arithmetic: `python -m bench.speed.host`.

2,000 parameters of 16 k values, AdamW with 8-bit state. found_inf is set, so nothing is computed:
on a GPU the launches come on top, which cost the host some microseconds each. Then the whole step
of 2,000 parameters of 1 k on the CPU, where the host's share is largest. Times are of the thread
that steps, in microseconds, the best and the median.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import lowbit

WAYS = {
    "the same gradients": lambda ps, kept: None,
    "new gradients at the same addresses": lambda ps, kept: give(
        ps, [g.view_as(g) for g in kept[0]]
    ),
    "new gradients at other addresses": lambda ps, kept: give(ps, swapped(kept)),
}


def swapped(kept: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    kept.reverse()
    return [g.view_as(g) for g in kept[0]]


def give(ps: list[Any], grads: list[torch.Tensor]) -> None:
    for p, grad in zip(ps, grads, strict=True):
        p.grad = grad


def timed(before: Callable[[], None], step: Callable[[], Any], rounds: int) -> tuple[float, float]:
    times = []
    for _ in range(rounds):
        before()
        begin = time.thread_time()
        step()
        times.append(1e6 * (time.thread_time() - begin))
    return min(times), statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--values", type=int, default=1 << 14)
    parser.add_argument("--rounds", type=int, default=50)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ps = [
        torch.nn.Parameter(torch.zeros(asked.values // 64, 64, dtype=torch.bfloat16))
        for _ in range(asked.tensors)
    ]
    opt = lowbit.AdamW(ps, min_numel=0)
    kept = [[torch.zeros_like(p) for p in ps] for _ in range(2)]
    give(ps, kept[0])
    opt.step()
    opt.found_inf = torch.ones(())  # as a GradScaler sets it
    print(
        f"{asked.tensors:,} tensors of {asked.values:,}, nothing computed: microseconds of the host"
    )
    for name, way in WAYS.items():
        best, median = timed(functools.partial(way, ps, kept), opt.step, asked.rounds)
        print(f"  {name:40} {best:8.0f} best {median:8.0f} median")
    grads, _ = timed(lambda: None, lambda: [p.grad for p in ps], asked.rounds)
    print(f"  {'reading p.grad, in Python':40} {grads:8.0f} best")
    small = [
        torch.nn.Parameter(torch.zeros(16, 64, dtype=torch.bfloat16)) for _ in range(asked.tensors)
    ]
    give(small, [torch.full_like(p, 1e-3) for p in small])
    opt = lowbit.AdamW(small, min_numel=0)
    opt.step()
    best, median = timed(lambda: None, opt.step, asked.rounds)
    print(
        f"{asked.tensors:,} tensors of 1,024 on the CPU, whole step of one thread\n"
        f"  {'8-bit AdamW':40} {best:8.0f} best {median:8.0f} median"
    )


if __name__ == "__main__":
    main()
