"""Cost as size grows: time per parameter from 2^10 to 2^28 elements, and what each tensor costs beside its elements."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from bench import clock, machine, roster
from bench.contestant import Contestant
from bench.settings import Settings
from bench.step import BYTES, Params, Say, turn
from bench.workload import Equal, Shapes

Curves = dict[str, list[list[float]]]  # of a name: elements, nanoseconds for each
Fits = dict[str, list[tuple[float, float]]]  # elements, seconds
COUNT = 1000
SIZES = (4096, 8192, 16384, 32768)  # from 4,096 on state is low-bit


def run(settings: Settings, say: Say) -> Iterator[dict]:
    """What there is after each size."""
    torch.set_num_threads(settings.threads[0])
    curves: Curves = {}
    limit = int(machine.free_memory(settings.device) * 0.8) // (BYTES // 2)
    for power in range(10, settings.largest + 1, 2):
        if 1 << power > limit:
            say(f"2^{power} elements: not enough memory")
            break
        say(f"a tensor of 2^{power}")
        shapes, _ = Equal("", 1, 1 << power).shapes(1 << power)
        for name, seconds in race(settings, shapes).items():
            curves.setdefault(name, []).append([1 << power, seconds / (1 << power) * 1e9])
        yield made(settings, curves, {})
    fits: Fits = {}
    for size in SIZES:
        if COUNT * size > settings.limit:
            break
        say(f"{COUNT} tensors of {size}")
        shapes, _ = Equal("", COUNT, size).shapes(COUNT * size)
        for name, seconds in race(settings, shapes).items():
            fits.setdefault(name, []).append((COUNT * size, seconds))
        yield made(settings, curves, fits)


def made(settings: Settings, curves: Curves, fits: Fits) -> dict:
    return {
        "threads": settings.threads[0],
        "ns_per_parameter": curves,
        "tensors": COUNT,
        "sizes": SIZES,
        "overhead": {name: overhead(points) for name, points in fits.items() if len(points) > 2},
    }


def race(settings: Settings, shapes: Shapes) -> dict[str, float]:
    """Median seconds of a step of each contestant."""
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


def overhead(points: list[tuple[float, float]]) -> dict[str, float]:
    """A line through (elements, seconds) of COUNT tensors, by least squares of relative errors: what a tensor costs without its elements."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    y = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    slope = sum(w * (n - x) * (s - y) for w, (n, s) in zip(weights, points, strict=True)) / sum(
        w * (n - x) ** 2 for w, (n, _) in zip(weights, points, strict=True)
    )
    return {"us_per_tensor": (y - slope * x) / COUNT * 1e6, "ns_per_parameter": slope * 1e9}
