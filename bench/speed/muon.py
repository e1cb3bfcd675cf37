"""Muon on this machine: the own product beside torch's float32 one,
and whole steps beside torch.optim.Muon.

    python -m bench.speed.muon              ratios of the product and of a step, 1 and 2 threads
    python -m bench.speed.muon --size 512   other square matrices; 1024 by default
    python -m bench.speed.muon --rounds 1   fewer rounds than 9
    python -m bench.speed.muon --torch      also torch.optim.Muon in bfloat16: a minute a step where
                                            the processor has no AVX512-BF16

As if the processor had none:

    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 LOWBIT_ISA=avx2 \
        python -m bench.speed.muon --torch

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
