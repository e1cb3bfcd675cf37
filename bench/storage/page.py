"""docs/speed/bench-storage.md from the numbers of bench.storage and bench.storage.kills: tables,
targets and whether they are met.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.pages.page import busy, filled, table

Found = dict[str, Any]
SAVES = {
    "save, page cache": ("page cache", "cp"),
    "save, on disk": ("on disk", "cp"),
    "stall": ("async, until it returns", "copy of memory"),
}
SAVE_RATIOS = {
    "save, page cache": "save, page cache: time / cp",
    "save, on disk": "save, on disk: time / cp",
    "stall": "async save: stall / memory copy",
}
LOADS = {
    "load0-2": "on 2 ranks, as saved",
    "load0-4": "on 4 ranks",
    "load1-2": "on 2 ranks, by columns",
}
UNVERIFIED = "lowbit, verify=False"


def best(turns: list[list[float]]) -> float:
    return min(turn[0] for turn in turns)


def processor(turns: list[list[float]]) -> float:
    return min(turn[1] for turn in turns)


def times(turns: list[list[float]]) -> str:
    """The best and, in brackets, the median."""
    return f"{best(turns):.3f} ({sorted(turn[0] for turn in turns)[len(turns) // 2]:.3f})"


def to_base(found: Found, name: str, who: str) -> float:
    """The time of a save over cp's, of a stall over that of a copy."""
    turns = found["save-2"]
    return best(turns[f"{name}: {who}"]) / best(turns[f"{name}: {SAVES[name][1]}"])


def to_torch(found: Found, key: str) -> float:
    turns = found[key]["seconds"]
    return best(turns["lowbit"]) / best(turns["torch"])


def faster_than_torch(found: Found, key: str) -> float:
    return 1 / to_torch(found, key)


def read(found: Found, key: str, who: str) -> float:
    """Bytes read over bytes needed."""
    return float(found[key]["bytes read to bytes needed"][who])


@dataclass(frozen=True)
class Aim:
    """
    Attributes:
        what: the number.
        target: its limit in words.
        limit: it must be at most this, or at least this if `least`.
        digits: that are shown, and compared.
        lowbit, torch: the numbers of both; None where torch's is 1 by definition.
    """

    what: str
    target: str
    limit: float
    digits: int
    lowbit: Callable[[Found], float]
    torch: Callable[[Found], float] | None = None
    least: bool = False

    def met(self, found: Found) -> bool:
        value = round(self.lowbit(found), self.digits)
        return value >= self.limit if self.least else value <= self.limit

    def cells(self, found: Found) -> list[str]:
        theirs = f"{self.torch(found):.{self.digits}f}" if self.torch else ""
        return [
            theirs,
            f"{self.lowbit(found):.{self.digits}f}",
            "yes" if self.met(found) else "**no**",
        ]


def both(number: Callable[..., float], **of: str) -> tuple[Callable[[Found], float], ...]:
    """A number of lowbit's, and of torch's."""
    return partial(number, who="lowbit", **of), partial(number, who="torch", **of)


AIMS = (
    *(
        Aim(ratio, "at most 1.20", 1.2, 2, *both(to_base, name=name))
        for name, ratio in SAVE_RATIOS.items()
    ),
    Aim(
        f"load {LOADS['load0-2']}: time / torch",
        "at most 1.00",
        1.0,
        2,
        partial(to_torch, key="load0-2"),
    ),
    *(
        Aim(
            f"load {LOADS[key]}: torch / lowbit",
            "at least 2.00",
            2.0,
            2,
            partial(faster_than_torch, key=key),
            least=True,
        )
        for key in ("load0-4", "load1-2")
    ),
    *(
        Aim(f"load {title}: bytes read / needed", "1.0", 1.0, 1, *both(read, key=key))
        for key, title in LOADS.items()
    ),
)


def saves(found: Found) -> str:
    head = [
        "save",
        "cp, or a memory copy, s",
        "torch, s",
        "lowbit, s",
        "torch / cp or copy",
        "lowbit / cp or copy",
        "torch, processor s",
        "lowbit, processor s",
    ]
    turns, rows = found["save-2"], []
    for name, (title, base) in SAVES.items():
        cells = [times(turns[f"{name}: {who}"]) for who in (base, "torch", "lowbit")]
        ratios = [f"{to_base(found, name, who):.2f}" for who in ("torch", "lowbit")]
        used = [f"{processor(turns[f'{name}: {who}']):.3f}" for who in ("torch", "lowbit")]
        rows.append([title, *cells, *ratios, *used])
    return table(head, rows)


def besides(found: Found) -> str:
    """What a save takes besides writing: plans, and the collector."""
    turns = found["save-2"]
    passes = {
        who: [turn[2] for name, some in turns.items() if name.endswith(f": {who}") for turn in some]
        for who in ("lowbit", "torch")
    }
    hit = {who: sum(seconds > 0.01 for seconds in some) for who, some in passes.items()}
    longest = max(seconds for some in passes.values() for seconds in some)
    plan = (
        "A save with a writer that writes nothing, so torch's plans and collectives alone, takes "
        f"{times(turns['save, page cache: nothing'])} s."
    )
    if not any(hit.values()):
        return filled(plan)
    return filled(
        plan,
        f"Python's garbage collector made a full pass, of up to {longest:.3f} s, in "
        f"{hit['lowbit']} of {len(passes['lowbit'])} turns of lowbit and in {hit['torch']} of "
        f"{len(passes['torch'])} of torch's.",
    )


def loads(found: Found) -> str:
    head = [
        "load",
        "torch, s",
        "lowbit, s",
        "lowbit, `verify=False`, s",
        "lowbit / torch",
        "torch, bytes read / needed",
        "lowbit, bytes read / needed",
        "torch, processor s",
        "lowbit, processor s",
    ]
    rows = []
    for key, title in LOADS.items():
        turns = found[key]["seconds"]
        cells = [times(turns[who]) for who in ("torch", "lowbit", UNVERIFIED)]
        bytes_read = [f"{read(found, key, who):.3f}" for who in ("torch", "lowbit")]
        used = [f"{processor(turns[who]):.3f}" for who in ("torch", "lowbit")]
        rows.append([title, *cells, f"{to_torch(found, key):.2f}", *bytes_read, *used])
    return table(head, rows)


def aims(result: Found) -> str:
    """For each state which targets are met, and a table of all."""
    head = ["", "target", "torch", "lowbit", "met"]
    parts = []
    for kind, found in result["states"].items():
        rows = [[aim.what, aim.target, *aim.cells(found)] for aim in AIMS]
        parts += [verdict(kind, found), table(head, rows)]
    return "\n\n".join(parts)


def verdict(kind: str, found: Found) -> str:
    missed = [
        f"{aim.what} ({aim.cells(found)[1]}, target {aim.target})"
        for aim in AIMS
        if not aim.met(found)
    ]
    kept = f"**{kind}**: {len(AIMS) - len(missed)} of {len(AIMS)} met."
    return filled(f"{kept} Missed: {'; '.join(missed)}." if missed else kept)


def title_of(kind: str) -> str:
    """ "8bit, 4 times the parameters" is the 8bit state of so many."""
    name, _, of = kind.partition(", ")
    return f"{name} state of {of}" if of else f"{name} state"


def about(facts: Found, *more: str) -> str:
    versions = ", ".join(
        f"{p} {facts['versions'][p]}" for p in ("torch", "lowbit") if facts["versions"].get(p)
    )
    where = [
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB",
        facts["system"],
        f"Python {facts['python']}, {versions}",
        facts["date"][:10],
        *more,
    ]
    return f"{'; '.join(where)}; load average {facts['load'][0]:.1f} at the start."


def killed(kills: Found) -> str:
    """What the kills left, in words that follow from the numbers."""
    left = dict(kills["left"])
    whole, broken = (left.pop(what, 0) for what in ("whole", "whole, and one that is broken"))
    if left or whole + broken != kills["kills"]:
        raise ValueError(
            f"bench.storage.kills tells of {whole} + {broken} of {kills['kills']} kills, and of "
            f"{sorted(left)}: run it again"
        )
    disk = "with fsync, the default" if kills["sync"] else "without fsync"
    return filled(
        f"{kills['ranks']} ranks save {kills['mib']} MiB to one path repeatedly, {disk}. At "
        f"random moments, {kills['kills']} times, one rank or all of them get SIGKILL.",
        "After each kill, the checkpoint of that name was whole, verified by its digests, and "
        "held the values of the last finished save or of the next one.",
        f"{broken} kills also left a broken save beside it, which `verify` refused by name and "
        f"the next save removed; {whole} left nothing else.",
        "A kill that leaves anything else ends the run, and nothing is recorded.",
        "SIGKILL loses nothing of the page cache. What a power failure leaves is not measured.",
        about(kills["machine"]),
        f"It took {kills['seconds']:.0f} s.",
    )


def span(numbers: list[float], digits: int = 1) -> str:
    low, high = (f"{f(numbers):.{digits}f}" for f in (min, max))
    return low if low == high else f"{low} to {high}"


def opening(result: Found, kills: Found) -> str:
    """What follows for a reader, in words that follow from the numbers."""
    states = list(result["states"].values())
    disk = [to_base(found, "save, on disk", "lowbit") for found in states]
    wider = [faster_than_torch(found, "load0-4") for found in states]
    ours, theirs = (
        [read(found, "load0-4", who) for found in states] for who in ("lowbit", "torch")
    )
    return filled(
        f"A save to disk takes {span(disk)} of the time of `cp`. A load on twice as many ranks is "
        f"{span(wider)} times as fast as torch's: it reads {span(ours)} times the bytes that it "
        f"needs, and torch reads {span(theirs)} times. Of {kills['kills']} killed saves, none lost "
        "the checkpoint before it."
    )


COMPARED = filled(
    "`lowbit.checkpoint.Writer` and `Reader` "
    "([checkpoint-python.md](../checkpoint-python.md#while-training-runs)) are compared with "
    "torch's `FileSystemWriter` and `FileSystemReader`, and with `cp`, on the ranks of one "
    "machine. `python -m bench.storage --record` measures and writes this page."
)
WORDS = filled(
    '"Page cache" does not wait for the disk. "On disk" does, and there `cp` is followed by `sync` '
    "of its files. The files are in the page cache when they are loaded. lowbit's loads verify "
    'what they read, except with `verify=False`; torch\'s have nothing to verify. "Bytes read" '
    'are those that all ranks read from files or copy from mapped files, and "needed" are the '
    "bytes of their shards."
)


def state(result: Found) -> str:
    return filled(
        f"The state is that of AdamW for as many parameters as have {result['gib']:g} GiB of "
        "it in float32: matrices of 1 to 4 Mi elements and some vectors, sharded by rows and "
        "saved by 2 ranks. The `8bit` state of the same parameters has a quarter of the bytes "
        "and four tensors for each matrix, so the fixed costs of a tensor and of a save weigh "
        "more there. With 4 times the parameters, it has about "
        "as many bytes as the float32 state."
    )


def turns(result: Found) -> str:
    synced = ""
    if result["synced"]:
        synced = ", and the system writes its caches to disk before each save"
    return filled(
        f"All contestants take turns in one run{synced}. A time is that of the slowest rank. "
        "The tables show the best of all rounds and, in brackets, the median; ratios are of "
        "best times. Processor seconds are summed over all ranks, the least of all rounds. "
        "Other work on the machine changes them far less than times, and they exclude waits "
        "for the disk or for another rank. `cp` has none here, because it is a process of its "
        "own. A full pass of Python's garbage collector visits every object of the program. "
        "Python starts one after a fixed number of allocations, so medians include such "
        "passes and best times rarely do."
    )


def page(result: Found, kills: Found) -> str:
    where = about(
        result["machine"], f"data on {result['file_system']}", f"{result['rounds']} rounds"
    )
    parts = [
        "# Speed of saves and loads",
        "![Times of saves and bytes of loads, of lowbit and torch](../pictures/storage.svg)",
        opening(result, kills),
        "## Targets",
        filled(
            "Each number is compared with its target as shown. torch's cell is empty where torch "
            "is the reference."
        ),
        aims(result),
        "## Method",
        COMPARED,
        filled(where, busy(result["machine"])),
        state(result),
        turns(result),
        WORDS,
    ]
    for kind, found in result["states"].items():
        needed = found["load0-2"]["bytes needed"]
        parts += [
            f"## {title_of(kind)}, {needed / 2**20:,.0f} MiB",
            saves(found),
            besides(found),
            loads(found),
        ]
    return "\n\n".join([*parts, "## Killed saves", killed(kills)]) + "\n"
