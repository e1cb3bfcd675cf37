"""docs/speed/scaling.md, and the table of docs/speed/bench.md beside a process that saturates
memory, from bench/results/scaling.json.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench import ROOT
from bench.contestants.baselines import InPlace, Torch
from bench.contestants.ours import Eight, Four
from bench.pages.page import bullets, busy, filled, quoted, table

MARKS = ("<!-- python -m bench.speed.scaling -->", "<!-- end -->")
SHARE = 0.8  # of the theoretical bandwidth that programs reach; an assumption, which the page names
THREADS = (8, 16, 32, 64, 128)
FIRST, OURS = Torch.name, (Eight.name, Four.name)
ROW = dict[str, Any]


@dataclass(frozen=True)
class Server:
    """One socket. Bandwidth is channels of 8 bytes times transfers."""

    name: str
    cores: int
    memory: str
    gb: float
    source: str

    @property
    def reached(self) -> float:
        """GB/s, which is also bytes per ns."""
        return SHARE * self.gb


def channels(count: int, mts: int) -> float:
    return count * mts * 8 / 1e3


# With AVX-512, as the machine that was measured: others have other nanoseconds of a core.
SERVERS = (
    Server(
        "AMD EPYC 9004",
        96,
        "12 x DDR5-4800",
        channels(12, 4800),
        "https://www.tomshardware.com/news/amd-confirms-12-ddr5-memory-channels-on-genoa",
    ),
    Server(
        "Intel Xeon, 4th generation",
        52,
        "8 x DDR5-4800",
        channels(8, 4800),
        "https://www.ai-hpc.org/en/guide/02-cluster/stream-benchmark",
    ),
    Server(
        "Intel Xeon 6 (6900P)",
        120,
        "12 x DDR5-8800",
        channels(12, 8800),
        "https://blog.progressiverobot.co.uk/intel-confirms-ddr5-8800-memory-for-gra"
        "nite-rapids-xeon-6-cpus-jedec-ddr5-8800-for-next-gen-servers",
    ),
)


def model(row: ROW, threads: float, gb: float) -> float:
    """Nanoseconds of a value: what the cores need, or what memory needs, whichever is more."""
    return max(row["cache_ns"] / threads, row["bytes"] / gb)


def waits(row: ROW, gb: float) -> float:
    """The threads from which memory bounds the step."""
    return row["cache_ns"] * gb / row["bytes"]


def passes(row: ROW, other: ROW, gb: float) -> float | None:
    """The threads from which a step is faster than another one, None if it never is.

    The other one is faster with one thread and moves more bytes, so the other has come to wait for
    memory when the two are equal.
    """
    if row["cache_ns"] <= other["cache_ns"]:
        return 1.0 if row["bytes"] <= other["bytes"] else None
    return row["cache_ns"] * gb / other["bytes"] if row["bytes"] < other["bytes"] else None


def by_name(result: dict[str, Any]) -> dict[str, ROW]:
    return {row["name"]: row for row in result["rows"] if row["name"] != InPlace.name}


def bandwidth(result: dict[str, Any]) -> dict[int, float]:
    """GB/s of this machine's memory, by threads: those of an inversion in place,
    which reads and writes each byte once.
    """
    yardstick = next(row for row in result["rows"] if row["name"] == InPlace.name)
    return {int(n): yardstick["bytes"] / ns for n, ns in yardstick["memory_ns"].items()}


def about(result: dict[str, Any]) -> str:
    m = result["machine"]
    versions = ", ".join(
        f"{p} {m['versions'][p]}" for p in ("torch", "lowbit", "deepspeed") if m["versions"].get(p)
    )
    load = f"{m['load'][0]:.1f}"
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['isa']}; {versions}; {result['date']}; a tensor of "
        f"{result['numel']:,} values, {result['rounds']} rounds; "
        f"load {load} when it began. {busy(m)}"
    ).rstrip()


def measured(result: dict[str, Any]) -> str:
    threads = [str(n) for n in result["threads"]]
    head = [
        "step",
        "bytes moved",
        "nearest cache, 1 thread, ns",
        *(f"memory, {n} thread{'s' * (n != '1')}, ns" for n in threads),
    ]
    return table(
        head,
        [
            [
                row["name"],
                f"{row['bytes']:.2f}",
                f"{row['cache_ns']:.2f}",
                *(f"{row['memory_ns'][n]:.2f}" for n in threads),
            ]
            for row in result["rows"]
        ],
    )


def pressed(result: dict[str, Any]) -> str:
    """The table of docs/speed/bench.md."""
    rows = [
        [row["name"], f"{b['quiet_to_torch']:.2f}", f"{b['to_torch']:.2f}", f"{b['slower']:.2f}"]
        for row in result["rows"]
        for b in [row["beside"]]
    ]
    streams = result["streams"]
    head = [
        "step, 1 thread",
        "to torch fused float32, alone",
        "to torch fused float32, beside streams",
        "beside streams to alone",
    ]
    said = filled(
        f"{about(result)} {streams} stream{'s' * (streams > 1)}, "
        f"{result['streams_gb_per_second']:.1f} GB/s when nothing of the bench ran beside, and "
        f"{result['streams_gb_per_second_beside']:.1f} GB/s beside it."
    )
    return f"{said}\n\n{table(head, rows)}"


def at(threads: float) -> str:
    return f"{math.ceil(threads)}" if threads > 1 else "1"


def crossings(rows: dict[str, ROW]) -> str:
    head = [
        "server, one socket",
        "GB/s",
        *rows,
        *(f"{name.split(',')[0]} passes torch fused" for name in OURS),
    ]
    made = []
    for server in SERVERS:
        cells = [
            at(waits(row, server.reached))
            if waits(row, server.reached) <= server.cores
            else f"{at(waits(row, server.reached))} (it has {server.cores})"
            for row in rows.values()
        ]
        over = [passes(rows[name], rows[FIRST], server.reached) for name in OURS]
        made.append(
            [
                server.name,
                f"{server.reached:.0f}",
                *cells,
                *("never" if x is None else at(x) for x in over),
            ]
        )
    return table(head, made)


def modelled(rows: dict[str, ROW], names: Sequence[str]) -> str:
    head = ["server", "step", *(f"{n} threads" for n in THREADS)]
    made = []
    for server in SERVERS:
        for name in names:
            cells = [
                f"{model(rows[name], n, server.reached):.3f}"
                + (
                    ""
                    if model(rows[name], n, math.inf) >= model(rows[name], n, server.reached)
                    else " m"
                )
                if n <= server.cores
                else ""
                for n in THREADS
            ]
            made.append([server.name, name, *cells])
    return table(head, made)


def said(rows: dict[str, ROW]) -> list[str]:
    """What the numbers say, in words that follow from them."""
    first, eight = rows[FIRST], rows[Eight.name]
    order = sorted(rows.values(), key=lambda row: row["cache_ns"] / row["bytes"])
    over = [x for x in (passes(eight, first, s.reached) for s in SERVERS) if x is not None]
    waiting = [[waits(row, s.reached) for s in SERVERS] for row in (first, eight)]
    if over:
        fewest, most = at(min(over)), at(max(over))
        lead = (
            "On a server, lowbit's 8-bit step becomes faster than torch's fused float32 step: with "
            f"{fewest} thread{'s' * (fewest != '1')} where memory is slow, and with {most} where "
            "it is fast."
        )
    else:
        lead = "lowbit's 8-bit step is not faster than torch's fused float32 step on any server."
    return [
        lead,
        (
            f"**Where both wait for memory**, the 8-bit step takes "
            f"{eight['bytes'] / first['bytes']:.2f} of the time, the ratio of their bytes."
        ),
        (
            f"**torch's fused step** waits for memory from {at(min(waiting[0]))} to "
            f"{at(max(waiting[0]))} threads, lowbit's 8-bit step from {at(min(waiting[1]))} to "
            f"{at(max(waiting[1]))}, by server."
        ),
        (
            f"**{order[0]['name']} waits first**: it needs {order[0]['cache_ns']:.2f} ns of a core "
            f"for {order[0]['bytes']:.0f} bytes, so memory bounds it from "
            f"{at(min(waits(order[0], s.reached) for s in SERVERS))} to "
            f"{at(max(waits(order[0], s.reached) for s in SERVERS))} threads."
        ),
    ]


def check(result: dict[str, Any], rows: dict[str, ROW]) -> str:
    """The model beside what was measured here, with this machine's bandwidth."""
    gb = bandwidth(result)
    head = ["step", *(f"{n} thread{'s' * (n > 1)}: model, measured, ns" for n in gb)]
    return table(
        head,
        [
            [name, *(f"{model(row, n, gb[n]):.2f}, {row['memory_ns'][str(n)]:.2f}" for n in gb)]
            for name, row in rows.items()
        ],
    )


def trust(rows: dict[str, ROW], gb: dict[int, float]) -> str:
    """Whether the model is a bound from below of what was measured here."""
    below = [
        f"{name} with {n}"
        for n in gb
        for name, row in rows.items()
        if row["memory_ns"][str(n)] < 0.95 * model(row, n, gb[n])
    ]
    if below:
        return (
            f"Steps were faster here than the model says ({'; '.join(below)}): the inversion did "
            "not reach this memory's bandwidth. Do not trust these numbers, and measure again."
        )
    return (
        "A step whose core time and memory time are alike takes longer than either, since they "
        "overlap only in part."
    )


CACHE = filled(
    "The nearest cache: how much longer a step takes on 32,768 values than on 8,192, for each "
    "value more. Fixed costs of a step do not count there. torch's foreach step reads and writes "
    "memory for each of its operators, 21 times 4 bytes a value, counted from its source."
)
MODEL = filled(
    "A step takes, for each value, the longer of two: the nanoseconds of a core, divided by the "
    "threads, and the bytes, divided by the bandwidth. Cores are taken to be those measured here, "
    "so the servers are of their instruction set, and to be as fast with all of them busy. "
    "Programs are taken to reach 80 % of the bandwidth that channels and transfers give. Both "
    "favour no contestant, but neither is measured on these servers: real servers have slower "
    "clocks with all cores busy, and several sockets and memory nodes."
)
CROSSINGS = filled(
    "Of one socket, at 80 % of its bandwidth; the last columns are the crossings. Where a socket "
    "has fewer cores than that, its memory is not the limit."
)
MODELLED = filled(
    "Nanoseconds of a value; `m` where memory is the limit. Empty where a socket has fewer cores."
)
BANDWIDTHS = filled(
    "Theoretical bandwidth is channels times transfers times 8 bytes. Cores are those of a common "
    "large model of the series."
)


def page(result: dict[str, Any]) -> str:
    rows, gb = by_name(result), bandwidth(result)
    shown = (FIRST, "torch foreach, float32", "DeepSpeedCPUAdam, float32", *OURS)
    missing = "".join(f" {name} is missing: {why}." for name, why in result["missing"].items())
    reached = ", ".join(f"{x:.1f} GB/s with {n} thread{'s' * (n > 1)}" for n, x in gb.items())
    lead, *facts = said(rows)
    parts = [
        "# Many threads",
        "![Time of a step of torch and of lowbit by threads, modelled](../pictures/scaling.svg)",
        filled(
            f"{lead} This is a model of servers: two threads are measured, and the rest follows "
            "from what a value costs a core and how many bytes it moves."
        ),
        bullets(*facts),
        "## Measured",
        filled(
            f"{about(result)} Nanoseconds of a value; bytes are those that a step must read and "
            "write for it. Contestants take turns; a time is the least of all turns, to which a "
            f"busy machine only adds. `python -m bench.speed.scaling` measures and writes this "
            f"page.{missing}"
        ),
        measured(result),
        CACHE,
        "## The model",
        MODEL,
        filled(
            "This machine's memory is measured by an inversion of bits in place, which reads and "
            "writes each byte once. A copy would not do: it fetches the lines that it is about to "
            f"write, and so moves more than it counts. The inversion moves {reached}, and with "
            "that the model says:"
        ),
        check(result, rows),
        filled(trust(rows, gb)),
        "## Threads from which a step waits for memory",
        CROSSINGS,
        crossings(rows),
        "## Modelled times",
        MODELLED,
        modelled(rows, [name for name in rows if name in shown]),
        "## Bandwidths",
        table(
            ["server, one socket", "cores", "memory", "GB/s, theoretical", "source"],
            [[s.name, s.cores, s.memory, f"{s.gb:.1f}", f"[source]({s.source})"] for s in SERVERS],
        ),
        BANDWIDTHS,
    ]
    return "\n\n".join(parts) + "\n"


def write(result: dict[str, Any], docs: pathlib.Path = ROOT / "docs" / "speed") -> None:
    (docs / "scaling.md").write_text(page(result))
    bench = docs / "bench.md"
    bench.write_text(quoted(bench.read_text(), MARKS, pressed(result)))
