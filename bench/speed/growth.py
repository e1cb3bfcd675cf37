"""Cost by size: time per parameter from 2^10 to 2^28 elements,
and the fixed cost of each tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from bench.contestants import baselines, ours, roster
from bench.contestants.contestant import Contestant
from bench.measuring import clock, machine
from bench.measuring.settings import Settings
from bench.measuring.workload import Equal, Shapes
from bench.speed.step import BYTES, Params, Say, turn

# Tensors of the smallest shape measured here, with low-bit state forced.
COUNT, ROWS, COLS = 1000, 2, 64
CACHES = 1 << 28  # bytes: more than the caches


class SmallEight(ours.Eight):
    options: ClassVar = {**ours.Eight.options, "min_numel": 0}


class SmallFour(ours.Four):
    options: ClassVar = {**ours.Four.options, "min_numel": 0}


def run(settings: Settings, say: Say) -> Iterator[dict]:
    """Yields the results so far after each size."""
    torch.set_num_threads(settings.threads[0])
    curves: dict[str, list[list[float]]] = {}  # by name: elements, nanoseconds per element
    made: dict[str, Any] = {"threads": settings.threads[0], "ns_per_parameter": curves}
    limit = int(machine.free_memory(settings.device) * 0.8) // (BYTES // 2)
    for power in range(10, settings.largest + 1, 2):
        if 1 << power > limit:
            say(f"2^{power} elements: not enough memory")
            break
        say(f"a tensor of 2^{power}")
        shapes, _ = Equal("", 1, 1 << power).shapes(1 << power)
        for name, seconds in race(settings, shapes).items():
            curves.setdefault(name, []).append([1 << power, seconds / (1 << power) * 1e9])
        yield made
    say(f"{COUNT} tensors of {ROWS} x {COLS}")
    each = each_tensor(settings)
    yield made | {"tensors": COUNT, "shape": [ROWS, COLS], "us_per_tensor": each}


def race(settings: Settings, shapes: Shapes) -> dict[str, float]:
    """Median seconds per step of each contestant."""
    params = Params(shapes, settings.device)
    entries: list[Contestant] = [kind() for kind in roster.GROWING]
    for entry in entries:
        entry.prepare(params.of(entry.dtype))
    times = clock.rounds(
        [(e.name, turn(e, settings.device)) for e in entries], settings.rounds, settings.budget
    )
    del entries, params
    gc.collect()
    return {name: clock.median(t) for name, t in times.items()}


def each_tensor(settings: Settings) -> dict[str, dict[str, float]]:
    """Median microseconds for each of COUNT tiny tensors: in consecutive steps,
    and in a step with cold caches.
    """
    params = Params([(ROWS, COLS)] * COUNT, settings.device)
    entries: list[Contestant] = [
        kind() for kind in (baselines.Torch, baselines.TorchBfloat16, SmallEight, SmallFour)
    ]
    for entry in entries:
        entry.prepare(params.of(entry.dtype))
    other = torch.zeros(CACHES // 4)

    def cold(entry: Contestant) -> float:
        other.add_(1)
        with entry.running():
            return clock.seconds(entry.step, settings.device)

    rounds, budget = settings.rounds, settings.budget
    warm = clock.rounds([(e.name, turn(e, settings.device)) for e in entries], rounds, budget)
    first = clock.rounds([(e.name, lambda e=e: cold(e)) for e in entries], rounds, budget)
    return {
        name: {
            "again": clock.median(warm[name]) / COUNT * 1e6,
            "cold": clock.median(first[name]) / COUNT * 1e6,
        }
        for name in warm
    }
