"""Muon on this machine: the own product beside torch's float32 one,
and whole steps beside torch.optim.Muon.

    python -m bench.speed.muon                                                                     r
                                                                                                   a
                                                                                                   t
                                                                                                   i
                                                                                                   o
                                                                                                   s
                                                                                                   o
                                                                                                   f
                                                                                                   t
                                                                                                   h
                                                                                                   e
                                                                                                   p
                                                                                                   r
                                                                                                   o
                                                                                                   d
                                                                                                   u
                                                                                                   c
                                                                                                   t
                                                                                                   a
                                                                                                   n
                                                                                                   d
                                                                                                   o
                                                                                                   f
                                                                                                   a
                                                                                                   s
                                                                                                   t
                                                                                                   e
                                                                                                   p
                                                                                                   ,
                                                                                                   f
                                                                                                   o
                                                                                                   r
                                                                                                   o
                                                                                                   n
                                                                                                   e
                                                                                                   a
                                                                                                   n
                                                                                                   d
                                                                                                   t
                                                                                                   w
                                                                                                   o
                                                                                                   t
                                                                                                   h
                                                                                                   r
                                                                                                   e
                                                                                                   a
                                                                                                   d
                                                                                                   s
    python -m bench.speed.muon --size 512                                                          o
                                                                                                   t
                                                                                                   h
                                                                                                   e
                                                                                                   r
                                                                                                   s
                                                                                                   q
                                                                                                   u
                                                                                                   a
                                                                                                   r
                                                                                                   e
                                                                                                   m
                                                                                                   a
                                                                                                   t
                                                                                                   r
                                                                                                   i
                                                                                                   c
                                                                                                   e
                                                                                                   s
                                                                                                   ;
                                                                                                   1
                                                                                                   0
                                                                                                   2
                                                                                                   4
                                                                                                   b
                                                                                                   y
                                                                                                   d
                                                                                                   e
                                                                                                   f
                                                                                                   a
                                                                                                   u
                                                                                                   l
                                                                                                   t
    python -m bench.speed.muon --rounds 1                                                          f
                                                                                                   e
                                                                                                   w
                                                                                                   e
                                                                                                   r
                                                                                                   r
                                                                                                   o
                                                                                                   u
                                                                                                   n
                                                                                                   d
                                                                                                   s
                                                                                                   t
                                                                                                   h
                                                                                                   a
                                                                                                   n
                                                                                                   9
    python -m bench.speed.muon --torch                                                             a
                                                                                                   l
                                                                                                   s
                                                                                                   o
                                                                                                   t
                                                                                                   o
                                                                                                   r
                                                                                                   c
                                                                                                   h
                                                                                                   .
                                                                                                   o
                                                                                                   p
                                                                                                   t
                                                                                                   i
                                                                                                   m
                                                                                                   .
                                                                                                   M
                                                                                                   u
                                                                                                   o
                                                                                                   n
                                                                                                   i
                                                                                                   n
                                                                                                   b
                                                                                                   f
                                                                                                   l
                                                                                                   o
                                                                                                   a
                                                                                                   t
                                                                                                   1
                                                                                                   6
                                                                                                   ,
                                                                                                   a
                                                                                                   m
                                                                                                   i
                                                                                                   n
                                                                                                   u
                                                                                                   t
                                                                                                   e
                                                                                                   a
                                                                                                   s
                                                                                                   t
                                                                                                   e
                                                                                                   p
                                                                                                   w
                                                                                                   h
                                                                                                   e
                                                                                                   r
                                                                                                   e
                                                                                                   t
                                                                                                   h
                                                                                                   e
                                                                                                   p
                                                                                                   r
                                                                                                   o
                                                                                                   c
                                                                                                   e
                                                                                                   s
                                                                                                   s
                                                                                                   o
                                                                                                   r
                                                                                                   h
                                                                                                   a
                                                                                                   s
                                                                                                   n
                                                                                                   o
                                                                                                   A
                                                                                                   V
                                                                                                   X
                                                                                                   5
                                                                                                   1
                                                                                                   2
                                                                                                   -
                                                                                                   B
                                                                                                   F
                                                                                                   1
                                                                                                   6
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 LOWBIT_ISA=avx2  p
                                                                                                   y
                                                                                                   t
                                                                                                   h
                                                                                                   o
                                                                                                   n
                                                                                                   -
                                                                                                   m
                                                                                                   b
                                                                                                   e
                                                                                                   n
                                                                                                   c
                                                                                                   h
                                                                                                   .
                                                                                                   s
                                                                                                   p
                                                                                                   e
                                                                                                   e
                                                                                                   d
                                                                                                   .
                                                                                                   m
                                                                                                   u
                                                                                                   o
                                                                                                   n
                                                                                                   -
                                                                                                   -
                                                                                                   t
                                                                                                   o
                                                                                                   r
                                                                                                   c
                                                                                                   h
                                                                                                   a
                                                                                                   s
                                                                                                   i
                                                                                                   f
                                                                                                   i
                                                                                                   t
                                                                                                   h
                                                                                                   a
                                                                                                   d
                                                                                                   n
                                                                                                   o
                                                                                                   n
                                                                                                   e

Compare ratios, never times: all contestants of a ratio take turns in one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import lowbit
from bench.measuring import clock
from lowbit import ops
from lowbit.config import muon

ROUNDS = 9
TORCH = "torch.optim.Muon, bf16"
BUDGET = 20.0  # seconds, after which a contestant is left out of further rounds


def turns(runs: dict[str, Callable[[], object]], rounds: int) -> clock.Times:
    for name, run in runs.items():
        if name != TORCH:  # whose steps may take a minute, so that nothing shows of the first
            run()  # warm up
    made = [(name, lambda run=run: clock.seconds(run, "cpu")) for name, run in runs.items()]
    return clock.rounds(made, rounds, BUDGET)


def products(size: int) -> dict[str, Callable[[], object]]:
    a, b = torch.randn(size, size), torch.randn(size, size)
    narrow, other = a.bfloat16(), b.bfloat16()
    steps, factor = muon.schedule(muon.QUINTIC, 5)
    return {
        "torch float32 product": lambda: a @ b.t(),
        "own product": lambda: ops.bfloat16_product(narrow, other),
        "own Newton-Schulz, 5 steps": lambda: ops.newton_schulz(
            narrow.clone(), steps, factor, 1e-7
        ),
    }


def steps(size: int, with_torch: bool) -> dict[str, Callable[[], object]]:
    made: dict[str, Callable[[], object]] = {}

    def add(
        name: str, make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, **options: object
    ) -> None:
        p = torch.nn.Parameter(torch.randn(size, size).to(dtype))
        p.grad = torch.randn(size, size).to(dtype)
        made[name] = make([p], **options).step

    add("lowbit.Muon 8-bit, bf16", lowbit.Muon, torch.bfloat16)
    add("lowbit.Muon float32 state, float32", lowbit.Muon, torch.float32, state_format="float32")
    if with_torch:
        add(TORCH, torch.optim.Muon, torch.bfloat16)
    return made


def state_bytes(size: int) -> float:
    """Of a parameter, with 8-bit momentum."""
    p = torch.nn.Parameter(torch.zeros(size, size))
    state = lowbit.Muon([p]).state[p]
    return sum(t.nbytes for t in state.values()) / p.numel()


def report(runs: dict[str, Callable[[], object]], flops: dict[str, float], rounds: int) -> None:
    """Prints times, and beside the first contestant the speed of products or the time of steps."""
    times = turns(runs, rounds)
    first, *others = times
    for name, found in times.items():
        seconds = clock.median(found)
        speed = f", {flops[name] / seconds * 1e-9:6.1f} GFLOP/s" if flops else ""
        beside = ""
        if name in others and flops:
            share = clock.ratio(times[first], found) * flops[name] / flops[first]
            beside = f", {share:6.2f} of the speed of the {first}"
        elif name in others:
            beside = f", {clock.ratio(found, times[first]):6.2f} times that of {first}"
        print(f"  {name:36} {seconds * 1e3:10.2f} ms{speed}{beside}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    n = given.size
    flops = {
        "torch float32 product": 2.0 * n**3,
        "own product": 2.0 * n**3,
        "own Newton-Schulz, 5 steps": 30.0 * n**3,
    }
    print(f"8-bit state: {state_bytes(n):.3f} bytes a parameter")
    for threads in given.threads:
        torch.set_num_threads(threads)
        print(f"{n} x {n}, {threads} threads, {lowbit.catalog()['isa']}")
        report(products(n), flops, given.rounds)
        report(steps(n, given.torch), {}, given.rounds)


if __name__ == "__main__":
    main()
