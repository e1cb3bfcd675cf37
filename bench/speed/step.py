"""The optimizer's step alone: lowbit against baselines and a copy of the same bytes,
on several workloads.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch

from bench.contestants import roster
from bench.contestants.baselines import Copy
from bench.contestants.contestant import Contestant
from bench.measuring import clock, machine
from bench.measuring.settings import Settings
from bench.measuring.workload import Shapes, Workload, numel

Say = Callable[[str], None]
# Bytes per element of a workload: weights and gradients in both dtypes, the state of all
# contestants, the two buffers of the copy. Measured, then rounded up.
BYTES = 80


def run(settings: Settings, say: Say) -> Iterator[list[dict]]:
    """Results of each workload and thread count. Yields all results so far after each workload."""
    results = []
    slow = too_slow(settings, say)
    for workload in settings.workloads:
        limit = min(settings.limit, int(machine.free_memory(settings.device) * 0.8) // BYTES)
        shapes, cut = workload.shapes(limit)
        try:
            results += case(settings, say, workload, shapes, cut, slow)
        # out of memory, or a baseline that broke the GPU's context: earlier results stay
        except Exception as error:
            say(f"{workload.name} failed: {error}")
            results.append(
                {
                    "workload": workload.name,
                    "cut": cut,
                    "tensors": len(shapes),
                    "numel": numel(shapes),
                    "threads": 0,
                    "rows": [],
                    "clocks": {},
                    "missing": {"all": f"{type(error).__name__}: {str(error)[:300]}"},
                }
            )
        # Only here: while the error is handled, its traceback holds what the workload allocated.
        emptied(settings.device)
        yield results
    if not any(r["rows"] for r in results):
        raise RuntimeError(
            "; ".join(r["missing"].get("all", "no contestant could run") for r in results)
        )


def too_slow(settings: Settings, say: Say) -> dict[str, float]:
    """Seconds per element of contestants that would exceed `patience` for 2^24 elements.

    Two steps on a small tensor tell. Not on a GPU: there they are launches and compilations, which
    took two minutes of a lease.
    """
    if settings.device != "cpu":
        return {}
    torch.set_num_threads(min(settings.threads))
    found = {}
    for kind in roster.ALL:
        entry = kind()
        if entry.one_shape or entry.missing(settings.device):
            continue
        try:
            entry.prepare(Params([(256, 256)], settings.device).of(entry.dtype))
            each = clock.seconds(entry.step, settings.device) / (1 << 16)
        except Exception:
            continue  # `case` reports the reason
        if each * min(settings.limit, 1 << 24) > settings.patience:
            found[entry.name] = each
            say(f"{entry.name}: {each * 1e9:.0f} ns per element, skipped")
    return found


class Params:
    """Weights and gradients of a workload, one set per dtype, shared by all contestants."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        self.shapes, self.device = shapes, device
        self.made: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        self.noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(device)

    def of(self, dtype: torch.dtype) -> list[torch.nn.Parameter]:
        if dtype not in self.made:
            self.made[dtype] = [self.one(shape, dtype) for shape in self.shapes]
        return self.made[dtype]

    def one(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
        p = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device))
        p.grad = torch.empty_like(p)
        for part, grad in zip(
            p.data.view(-1).split(1 << 20), p.grad.view(-1).split(1 << 20), strict=True
        ):
            part.copy_(self.noise[: part.numel()] * 0.02)
            grad.copy_(self.noise[: part.numel()] * 1e-3)
        return p


def case(
    settings: Settings,
    say: Say,
    workload: Workload,
    shapes: Shapes,
    cut: str,
    slow: dict[str, float],
) -> list[dict]:
    """Measures one workload with each thread count."""
    torch.set_num_threads(max(settings.threads))
    entries, missing = prepared(settings, say, workload, Params(shapes, settings.device), slow)
    results: list[dict] = []
    gone: dict[str, str] = {}
    for threads in settings.threads:
        torch.set_num_threads(threads)
        say(
            f"{workload.name}: {len(entries)} contestants with {threads} "
            f"thread{'s' * (threads > 1)}"
        )
        failed: dict[str, Exception] = {}
        turns = []
        for e in entries:
            try:
                turns.append((e.name, turn(e, settings.device)))
            except Exception as error:
                failed[e.name] = error.with_traceback(None)
        always = (roster.ALL[0].name, Copy.name)
        times = clock.rounds(turns, settings.rounds, settings.budget, always, failed)
        entries = [e for e in entries if e.name in times]
        gone |= {name: short(error) for name, error in failed.items()}
        results.append(
            {
                "workload": workload.name,
                "cut": cut,
                "tensors": len(shapes),
                "numel": numel(shapes),
                "threads": threads,
                "rows": rows(entries, times, numel(shapes)),
                "missing": missing | gone if threads == settings.threads[0] else dict(gone),
                "clocks": machine.gpu_clocks() if settings.device == "cuda" else {},
            }
        )
    return results


def prepared(
    settings: Settings, say: Say, workload: Workload, params: Params, slow: dict[str, float]
) -> tuple[list[Contestant], dict[str, str]]:
    """The contestants that can step a workload, and by name why others cannot."""
    entries: list[Contestant] = []
    missing: dict[str, str] = {}
    for kind in roster.ALL:
        entry = kind()
        reason = entry.missing(settings.device)
        if reason is None and entry.name in slow:
            reason = (
                f"too slow: {slow[entry.name] * 1e9:.0f} ns per element on a tensor of 64 k, "
                f"{min(settings.threads)} thread"
            )
        if reason is None and entry.one_shape and not (workload.one_shape and settings.compile):
            reason = "it would compile for each shape"
        if reason is None:
            try:
                say(f"{workload.name}: {entry.name} prepares")
                entry.prepare(params.of(entry.dtype))
                entries.append(entry)
            except Exception as error:  # any error of a baseline is a line of the page
                reason = short(error)
        if reason is not None:
            missing[entry.name] = reason
    return entries, missing


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def emptied(device: str) -> None:
    """Gives back the memory of what is gone, for the next workload to find."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def turn(entry: Contestant, device: str) -> Callable[[], float]:
    """A turn of one contestant: steps of at least 5 ms in total, after an untimed one, since the
    previous contestant changed the caches.
    """
    with entry.running():
        repeats = clock.repeats_for(clock.seconds(entry.step, device), 5e-3)

    def take() -> float:
        with entry.running():
            return clock.seconds(entry.step, device, repeats)

    return take


def rows(entries: list[Contestant], times: clock.Times, count: int) -> list[dict]:
    copy = next((e for e in entries if isinstance(e, Copy)), None)
    reference = times.get(roster.ALL[0].name)
    speed = copy.traffic() / clock.median(times[copy.name]) if copy else None
    made = []
    for e in entries:
        middle = clock.median(times[e.name])
        made.append(
            {
                "name": e.name,
                "ns_per_parameter": middle / count * 1e9,
                "to_torch": clock.ratio(times[e.name], reference) if reference else None,
                "to_copy": clock.ratio(times[e.name], times[copy.name]) if copy else None,
                "of_copy_speed": e.traffic() / middle / speed if speed else None,
                "gb_per_second": e.traffic() / middle / 1e9,
                "weight_bytes": e.params[0].element_size(),
                "state_bytes": e.state_bytes() / count,
                "seconds": times[e.name],
            }
        )
    return made
