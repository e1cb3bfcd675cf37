"""The exact mean of gradients beside torch's reduce-scatter in bfloat16 and in float32, over gloo.

    python -m bench.speed.exact  2 and 4 ranks, a unit of 4 M parameters; a minute
    python -m bench.speed.exact --numel 16777216 --ranks 2

All contestants take turns in one run. Compare ratios, not times. The error is that of a step of 12
micro-batches: its distance from the mean in float64, as a part of the gradients' root mean square.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bench.pages.page import table
from lowbit import ops, sharding

MICRO = 12  # addends of a step


def contestants(numel: int) -> dict[str, Callable[[], object]]:
    """What each does with the bfloat16 gradients of one unit, [ranks, numel / ranks]."""
    group = dist.group.WORLD
    assert group is not None
    ranks = dist.get_world_size()
    grads = torch.randn(ranks, numel // ranks).bfloat16()
    words = torch.zeros(numel // ranks, dtype=torch.int64)
    by_node = sharding.Exchange(group, 2, words_of)

    def reduce_scatter(dtype: torch.dtype) -> Tensor:
        given = grads.to(dtype, copy=True)
        made = torch.empty(numel // ranks, dtype=dtype)
        dist.reduce_scatter_tensor(made, given.view(-1))
        return made.bfloat16()

    def at_once() -> Tensor:
        rows = sharding.exchange_rows(grads, group)
        made = torch.empty(numel // ranks, dtype=torch.bfloat16)
        ops.mean_of([], [rows], [made], MICRO, MICRO)
        return made

    def keep() -> None:
        ops.mean_add([words], [sharding.exchange_rows(grads, group)], MICRO)
        words.zero_()

    def by_nodes() -> Tensor:
        made = torch.empty(numel // ranks, dtype=torch.bfloat16)
        ops.mean_of([], [by_node(grads)], [made], MICRO, MICRO)
        return made

    return {
        "torch, reduced in bfloat16": lambda: reduce_scatter(torch.bfloat16),
        "torch, reduced in float32": lambda: reduce_scatter(torch.float32),
        "exact, one micro-batch a rank": at_once,
        "exact, a micro-batch that is not the last": keep,
        "exact, one micro-batch a rank, nodes of two ranks first": by_nodes,
        "exchange alone": lambda: sharding.exchange_rows(grads, group),
    }


def words_of(rows: Tensor) -> Tensor:
    words = torch.zeros(rows.shape[1], dtype=torch.int64)
    ops.mean_add([words], [rows], MICRO)
    return words


def errors(numel: int) -> dict[str, float]:
    """The error of a step's mean gradient in bfloat16, by how it was added up."""
    group = dist.group.WORLD
    assert group is not None
    ranks, n = dist.get_world_size(), numel // dist.get_world_size()
    exact, words = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)
    sums = {dtype: torch.zeros(n, dtype=torch.bfloat16) for dtype in (torch.bfloat16, torch.float)}
    for _ in range(MICRO // ranks):
        grads = torch.randn(ranks, n).bfloat16()
        for dtype, added in sums.items():
            made = torch.empty(n, dtype=dtype)
            dist.reduce_scatter_tensor(made, grads.to(dtype).view(-1))
            added += made.bfloat16()
        rows = sharding.exchange_rows(grads, group)
        exact += rows.double().sum(0)
        ops.mean_add([words], [rows], MICRO)
    mean = torch.empty(n, dtype=torch.bfloat16)
    ops.mean_of([words], [], [mean], MICRO, MICRO)
    exact /= MICRO

    def error(found: Tensor) -> float:
        return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    return {
        "torch, reduced in bfloat16": error(sums[torch.bfloat16] / MICRO),
        "torch, reduced in float32": error(sums[torch.float] / MICRO),
        "exact": error(mean),
        "the mean in float64, rounded once": error(exact.bfloat16()),
    }


def rank(me: int, ranks: int, numel: int, rounds: int, store: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=me, world_size=ranks)
    times: dict[str, list[float]] = {}
    made = contestants(numel)
    for turn in range(rounds + 1):
        for name, run in made.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            dist.barrier()
            if turn:
                times.setdefault(name, []).append(time.perf_counter() - begin)
    found = errors(min(numel, 1 << 20))
    if me == 0:
        seconds = {name: statistics.median(of) for name, of in times.items()}
        torch.save((seconds, found), result)
    dist.destroy_process_group()


def measure(ranks: int, numel: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each contestant, and errors."""
    with tempfile.TemporaryDirectory() as folder:
        store, result = os.path.join(folder, "store"), os.path.join(folder, "result")
        mp.spawn(rank, (ranks, numel, rounds, store, result), nprocs=ranks)
        seconds, error = torch.load(result, weights_only=True)
        return seconds, error


def cell(times: dict[str, float], name: str) -> str:
    """A contestant's time, over torch's reduction in bfloat16."""
    ratio = times[name] / times["torch, reduced in bfloat16"]
    return f"{ratio:.2f} ({times[name] * 1e3:.1f} ms)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--numel", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    measured = {ranks: measure(ranks, args.numel, args.rounds) for ranks in args.ranks}
    head = [f"{ranks} ranks" for ranks in measured]
    times, error = zip(*measured.values(), strict=True)
    rows = [[name, *(cell(of, name) for of in times)] for name in times[0]]
    print(table(["", *head], rows) + "\n")
    print(table(["error", *head], [[n, *(f"{of[n]:.5f}" for of in error)] for n in error[0]]))


if __name__ == "__main__":
    main()
