"""The step on many threads: what a core and memory each allow, measured on this machine, and a
model of servers made of both (docs/speed/scaling.md).

    python -m bench.speed.scaling          measures: 5 minutes on a quiet machine; writes
                                           bench/results/scaling.json and docs/speed/scaling.md
    python -m bench.speed.scaling --quick  smaller tensors and fewer rounds: a minute, to try it
    python -m bench.speed.scaling --page   docs/speed/scaling.md and the table of
                                           docs/speed/bench.md, from what was measured

Each contestant is measured three ways, in turns: on tensors that the nearest cache holds (what a
core needs for a value), on one large tensor with 1, 2, ... threads (what memory allows), and on
that tensor with one thread while other processes saturate memory, as training does.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import time
from dataclasses import dataclass
from typing import Any

import torch

from bench import ROOT
from bench.contestants.baselines import DeepSpeed, InPlace, Torch, TorchBfloat16, TorchForeach
from bench.contestants.contestant import Contestant
from bench.contestants.ours import Eight, EightFloat32, Factored, Floats, Four, Kahan
from bench.measuring import clock, machine
from bench.speed import scaling_page
from bench.speed.step import Params, turn
from bench.speed.stream import Streams

RESULTS = ROOT / "bench" / "results" / "scaling.json"
CONTESTANTS: tuple[type[Contestant], ...] = (
    Torch,
    TorchForeach,
    TorchBfloat16,
    DeepSpeed,
    Eight,
    Four,
    Floats,
    EightFloat32,
    Kahan,
    Factored,
    InPlace,
)
# float32 weights, gradients and state of the latter: 512 KiB
SMALLER, SMALL = ((32, 256), (128, 256))


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        numel: log2 of the elements of the large tensor.
        rounds: turns of each contestant on the large tensor.
        short: turns on the small ones.
        threads: of the large tensor.
        streams: processes that saturate memory.
    """

    numel: int = 26
    rounds: int = 9
    short: int = 200
    threads: tuple[int, ...] = (1, 2)
    streams: int = 1


def prepared(shape: tuple[int, int]) -> tuple[list[Contestant], dict[str, str]]:
    """The contestants on a tensor of that shape, and the reasons why others are missing."""
    params, entries, missing = Params([shape], "cpu"), [], {}
    for kind in CONTESTANTS:
        entry = kind()
        reason = entry.missing("cpu")
        if reason is None:
            entry.prepare(params.of(entry.dtype))
            entries.append(entry)
        else:
            missing[entry.name] = reason
    return entries, missing


def least(entries: list[Contestant], rounds: int, seconds: float) -> dict[str, float]:
    """Seconds of a step of each, the least of many turns of some `seconds`: whatever else the
    machine does only adds to them.
    """
    turns = []
    for entry in entries:
        repeats = clock.repeats_for(
            min(clock.seconds(entry.step, "cpu") for _ in range(3)), seconds
        )
        turns.append((entry.name, functools.partial(clock.seconds, entry.step, "cpu", repeats)))
    times = clock.rounds(turns, rounds, 1e9)
    return {name: min(t for t in several if t is not None) for name, several in times.items()}


def nearest(settings: Settings) -> dict[str, float]:
    """Nanoseconds of a value in the nearest cache: what more values add to a step, so that its
    fixed costs do not count.
    """
    torch.set_num_threads(1)
    few, many = (least(prepared(shape)[0], settings.short, 3e-4) for shape in (SMALLER, SMALL))
    values = SMALL[0] * SMALL[1] - SMALLER[0] * SMALLER[1]
    found = {name: (many[name] - few[name]) / values * 1e9 for name in many}
    if off := {name: round(ns, 2) for name, ns in found.items() if ns <= 0}:
        raise SystemExit(
            f"the machine is too busy to measure: nanoseconds of a value came out as {off}; try "
            "again when it is quiet"
        )
    return found


def measure(settings: Settings) -> dict[str, Any]:
    half = settings.numel // 2
    cache = nearest(settings)
    torch.set_num_threads(max(settings.threads))
    entries, missing = prepared((1 << half, 1 << settings.numel - half))
    count = 1 << settings.numel
    rows = [
        {
            "name": e.name,
            "bytes": e.traffic() / count,
            "state_bytes": e.state_bytes() / count,
            "cache_ns": cache[e.name],
            "memory_ns": {},
            "beside": {},
        }
        for e in entries
    ]
    for threads in settings.threads:
        torch.set_num_threads(threads)
        seconds = least(entries, settings.rounds, 5e-3)
        for made in rows:
            made["memory_ns"][str(threads)] = seconds[made["name"]] / count * 1e9
    torch.set_num_threads(1)
    with Streams(settings.streams) as streams:
        alone = streams.alone()
        quiet, pressed, at_once = beside(entries, settings.rounds, streams)
    for made in rows:
        name, first = made["name"], entries[0].name
        made["beside"] = {
            "slower": clock.ratio(pressed[name], quiet[name]),
            "quiet_to_torch": clock.ratio(quiet[name], quiet[first]),
            "to_torch": clock.ratio(pressed[name], pressed[first]),
        }
    return {
        "machine": machine.describe("cpu"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "numel": count,
        "rounds": settings.rounds,
        "threads": list(settings.threads),
        "streams": settings.streams,
        "streams_gb_per_second": alone,
        "streams_gb_per_second_beside": at_once,
        "rows": rows,
        "missing": missing,
    }


def beside(
    entries: list[Contestant], rounds: int, streams: Streams
) -> tuple[clock.Times, clock.Times, float]:
    """Seconds without and with the streams, round by round in turn, so that both see the same
    machine, and the streams' GB/s meanwhile.
    """
    moved = spent = 0.0
    quiet: clock.Times = {e.name: [] for e in entries}
    pressed: clock.Times = {e.name: [] for e in entries}
    turns = [(e.name, turn(e, "cpu")) for e in entries]
    for r in range(rounds):
        for times in (quiet, pressed):
            if times is pressed:
                before, start = streams.moved(), time.perf_counter()
                streams.go()
            for i in range(len(turns)):
                name, take = turns[(i + r) % len(turns)]
                times[name].append(take())
            streams.stop()
            if times is pressed:
                spent += time.perf_counter() - start
                moved += streams.moved() - before
    return quiet, pressed, moved / spent / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--streams",
        type=int,
        default=1,
        help="processes that saturate memory; one for each core but one is most",
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write the result there and no page"
    )
    args = parser.parse_args()
    if not args.page:
        smaller = {"numel": 22, "rounds": 3} if args.quick else {}
        settings = Settings(threads=tuple(args.threads), streams=args.streams, **smaller)
        result = measure(settings)
        file = args.json or RESULTS
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(scaling_page.measured(result) + "\n\n" + scaling_page.pressed(result))
        if args.json:
            return
    scaling_page.write(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
