"""docs/bench-storage.md from the numbers of bench/storage.py and bench/kills.py: tables, what was asked and whether it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.page import busy, filled, table

Found = dict[str, Any]
SAVES = {
    "save, page cache": ("save, page cache", "cp"),
    "save, on disk": ("save, on disk", "cp"),
    "stall": ("async save, until it returns", "copy of memory"),
}
LOADS = {"load0-2": "on 2 ranks, as saved", "load0-4": "on 4 ranks", "load1-2": "on 2 ranks, by columns"}  # fmt: skip
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


def read(found: Found, key: str, who: str) -> float:
    """Bytes read over bytes needed."""
    return float(found[key]["bytes read to bytes needed"][who])


@dataclass(frozen=True)
class Aim:
    """
    Attributes:
        what: the number.
        asked: its limit in words.
        limit: it must be at most this, or at least this if `least`.
        digits: that are shown, and compared.
        lowbit, torch: the numbers of both; None where torch's is 1 by definition.
    """

    what: str
    asked: str
    limit: float
    digits: int
    lowbit: Callable[[Found], float]
    torch: Callable[[Found], float] | None = None
    least: bool = False

    def holds(self, found: Found) -> bool:
        value = round(self.lowbit(found), self.digits)
        return value >= self.limit if self.least else value <= self.limit

    def cells(self, found: Found) -> list[str]:
        theirs = f"{self.torch(found):.{self.digits}f}" if self.torch else ""
        return [theirs, f"{self.lowbit(found):.{self.digits}f}", "yes" if self.holds(found) else "**no**"]  # fmt: skip


def to_base_of(name: str, who: str) -> Callable[[Found], float]:
    return lambda found: to_base(found, name, who)


def read_of(key: str, who: str) -> Callable[[Found], float]:
    return lambda found: read(found, key, who)


def faster_than_torch(key: str) -> Callable[[Found], float]:
    return lambda found: 1 / to_torch(found, key)


AIMS = (
    *(Aim(f"{title}, its time to that of {base}", "at most 1.20", 1.2, 2, to_base_of(name, "lowbit"), to_base_of(name, "torch")) for name, (title, base) in SAVES.items()),
    Aim(f"load {LOADS['load0-2']}, its time to torch's", "at most 1.00", 1.0, 2, lambda found: to_torch(found, "load0-2")),
    *(Aim(f"load {LOADS[key]}, torch's time to its own", "at least 2.00", 2.0, 2, faster_than_torch(key), least=True) for key in ("load0-4", "load1-2")),
    *(Aim(f"load {title}, bytes read to bytes needed", "1.0", 1.0, 1, read_of(key, "lowbit"), read_of(key, "torch")) for key, title in LOADS.items()),
)  # fmt: skip


def saves(found: Found) -> str:
    head = ["", "cp, or a copy of memory, s", "torch, s", "lowbit, s", "torch to cp or copy", "lowbit to cp or copy", "processor, torch, s", "processor, lowbit, s"]  # fmt: skip
    turns, rows = found["save-2"], []
    for name, (title, base) in SAVES.items():
        cells = [times(turns[f"{name}: {who}"]) for who in (base, "torch", "lowbit")]
        ratios = [f"{to_base(found, name, who):.2f}" for who in ("torch", "lowbit")]
        used = [f"{processor(turns[f'{name}: {who}']):.3f}" for who in ("torch", "lowbit")]
        rows.append([title, *cells, *ratios, *used])
    return table(head, rows)


def besides(found: Found) -> str:
    """What a save takes besides writing: planning, and the collector."""
    turns = found["save-2"]
    passes = {who: [turn[2] for name, some in turns.items() if name.endswith(f": {who}") for turn in some] for who in ("lowbit", "torch")}  # fmt: skip
    hit = {who: sum(seconds > 0.01 for seconds in some) for who, some in passes.items()}
    longest = max(seconds for some in passes.values() for seconds in some)
    plan = f"A save with a writer that writes nothing, which leaves torch's plans and collectives, takes {times(turns['save, page cache: nothing'])} s."
    if not any(hit.values()):
        return filled(plan)
    return filled(
        plan,
        f"Python's garbage collector made a full pass, of up to {longest:.3f} s, in {hit['lowbit']} of {len(passes['lowbit'])} turns of lowbit and in {hit['torch']} of {len(passes['torch'])} of torch's.",
    )  # fmt: skip


def loads(found: Found) -> str:
    head = ["load", "torch, s", "lowbit, s", "lowbit, `verify=False`, s", "lowbit to torch", "bytes read to needed, torch", "lowbit", "processor, torch, s", "processor, lowbit, s"]  # fmt: skip
    rows = []
    for key, title in LOADS.items():
        turns = found[key]["seconds"]
        cells = [times(turns[who]) for who in ("torch", "lowbit", UNVERIFIED)]
        bytes_read = [f"{read(found, key, who):.3f}" for who in ("torch", "lowbit")]
        used = [f"{processor(turns[who]):.3f}" for who in ("torch", "lowbit")]
        rows.append([title, *cells, f"{to_torch(found, key):.2f}", *bytes_read, *used])
    return table(head, rows)


def aims(result: Found) -> str:
    states = result["states"]
    head = ["", "asked", *(f"{kind}: {what}" for kind in states for what in ("torch", "lowbit", "holds"))]  # fmt: skip
    return table(head, [[aim.what, aim.asked, *(cell for found in states.values() for cell in aim.cells(found))] for aim in AIMS])  # fmt: skip


def verdict(result: Found) -> list[str]:
    """Which aims hold and which do not, a line for each state."""
    lines = []
    for kind, found in result["states"].items():
        missed = [f"{aim.what} ({aim.cells(found)[1]}, asked {aim.asked})" for aim in AIMS if not aim.holds(found)]  # fmt: skip
        kept = f"* **{kind}**: {len(AIMS) - len(missed)} of {len(AIMS)} aims hold."
        lines.append(filled(f"{kept} Missed: {'; '.join(missed)}." if missed else kept).replace("\n", "\n  "))  # fmt: skip
    return lines


def about(facts: Found, *more: str) -> str:
    versions = ", ".join(f"{p} {facts['versions'][p]}" for p in ("torch", "lowbit") if facts["versions"].get(p))  # fmt: skip
    where = [f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB", facts["system"], f"Python {facts['python']}, {versions}", facts["date"][:10], *more]  # fmt: skip
    return f"{'; '.join(where)}; load {facts['load'][0]:.1f} when it began."


def killed(kills: Found) -> str:
    """What the kills left, in words that follow from the numbers."""
    left = dict(kills["left"])
    whole, broken = (left.pop(what, 0) for what in ("whole", "whole, and one that is broken"))
    if left or whole + broken != kills["kills"]:
        raise ValueError(f"bench.kills tells of {whole} + {broken} of {kills['kills']} kills, and of {sorted(left)}: run it again")  # fmt: skip
    disk = "and waits for the disk, as by default" if kills["sync"] else "without waiting for the disk"  # fmt: skip
    return filled(
        f"{kills['kills']} times, {kills['ranks']} ranks save {kills['mib']} MiB into one path over and over, {disk}. After a random moment one of them, or all, get SIGKILL.",
        f"After each of the {kills['kills']} kills the checkpoint of that name was whole, verified by its digests, and held the values of the last save that ended, or of the next one.",
        f"{broken} kills also left a broken save beside it, which `verify` refused by name and the next save removed; {whole} left nothing else.",
        "The first kill after which anything else is found ends the run, and nothing is recorded.",
        "SIGKILL loses no pages of the system's cache: what a power failure leaves is not measured.",
        about(kills["machine"]),
        f"It took {kills['seconds']:.0f} s.",
    )  # fmt: skip


def page(result: Found, kills: Found) -> str:
    synced = ", and the system writes its caches to disk before each save" if result["synced"] else ""  # fmt: skip
    parts = [
        "# Speed of saves and loads",
        filled("`lowbit.checkpoint.Writer` and `Reader` ([checkpoint-python.md](checkpoint-python.md#while-training-runs)) beside torch's `FileSystemWriter` and `FileSystemReader`, and beside `cp`, on ranks of one machine. `python -m bench.storage --record` measures and writes this page."),
        filled(about(result["machine"], f"data on {result['file_system']}", f"{result['rounds']} rounds"), busy(result["machine"])),
        "## What was asked",
        "\n".join(verdict(result)),
        aims(result),
        filled("A number is compared with its limit as it is shown. torch's time to its own is 1, and its cell is empty."),
        "## How it is measured",
        filled(f"The state is that of AdamW for as many parameters as have {result['gib']:g} GiB of it in float32: matrices of 1 to 4 Mi elements and some vectors, sharded by rows, which 2 ranks save. `8bit` state of the same parameters is a quarter of it and has four tensors for each matrix, so what a tensor or a save costs weighs more there; of 4 times the parameters it is 1 GiB again."),
        filled(f"All take turns in one run{synced}. A time is that of the slowest rank: the best of all rounds, and in brackets the median; ratios are those of best times. Processor seconds are those of all ranks together, the least of all rounds. Other work on the machine changes them far less, and they leave out what a wait for the disk or for another rank takes; `cp` has none here, since it is a process of its own. A full pass of Python's garbage collector visits every object of the program. It begins after so many allocations, in whatever turn that is: medians have such passes in them, best times seldom."),
        filled("\"Page cache\" does not wait for the disk; \"on disk\" does, and `cp` is then followed by `sync` of its files. The files are in the page cache when they are loaded. lowbit's loads verify what they read, unless it says `verify=False`; torch's have nothing to verify. Bytes are those that all ranks read of files, with what they copy of mapped ones, over the bytes of their shards."),
    ]  # fmt: skip
    for kind, found in result["states"].items():
        needed = found["load0-2"]["bytes needed"]
        parts += [
            f"## {kind} state, {needed / 2**20:,.0f} MiB",
            saves(found),
            besides(found),
            loads(found),
        ]
    return "\n\n".join([*parts, "## Saves that are killed", killed(kills)]) + "\n"
