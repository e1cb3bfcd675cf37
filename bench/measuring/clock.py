"""Timing in rounds: every contestant takes a turn per round,
so all see the same machine conditions.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Times = dict[str, list["float | None"]]


def seconds(run: Callable[[], object], device: str, repeats: int = 1) -> float:
    """Seconds of one run, the mean of `repeats`. A GPU is timed by its events; the host waits
    before and after, not in between.
    """
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def repeats_for(once: float, minimum: float) -> int:
    """The number of runs that take at least `minimum` seconds together."""
    return max(1, min(1000, math.ceil(minimum / max(once, 1e-9))))


def rounds(
    turns: Sequence[tuple[str, Callable[[], float]]],
    number: int,
    budget: float,
    always: Sequence[str] = (),
    failed: dict[str, Exception] | None = None,
) -> Times:
    """Seconds of each turn, round by round. Each round begins with another contestant.

    Args:
        turns: names, and functions that take a turn and return its seconds.
        number: number of rounds.
        budget: seconds after which a name is skipped (None in its list), from the third round on.
        always: names that are never skipped.
        failed: gets the error of each turn that raises one. That name takes no further turn, and
            has no times. Without it the error is raised.
    """
    times: Times = {name: [] for name, _ in turns}
    used = dict.fromkeys(times, 0.0)
    for r in range(number):
        for i in range(len(turns)):
            name, turn = turns[(i + r) % len(turns)]
            if name not in times:
                continue
            if r >= 2 and used[name] > budget and name not in always:
                times[name].append(None)
                continue
            begin = time.perf_counter()
            try:
                times[name].append(turn())
            except Exception as error:
                if failed is None:
                    raise
                failed[name] = error.with_traceback(None)  # whose frames hold what it allocated
                del times[name]
                continue
            used[name] += time.perf_counter() - begin
    return times


def median(times: Sequence[float | None]) -> float:
    return statistics.median(t for t in times if t is not None)


def ratio(times: Sequence[float | None], to: Sequence[float | None]) -> float:
    """The median ratio over the rounds in which both ran."""
    both = [a / b for a, b in zip(times, to, strict=True) if a is not None and b is not None]
    return statistics.median(both)
