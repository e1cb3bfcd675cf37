"""Every rule, pair of state formats and parameter format on this machine.

    cmake -S . -B build/lowbit -DLOWBIT_BUILD_TESTS=ON && cmake --build build/lowbit --target
    bench_steps
    python -m bench.speed.rules           the tables of docs/speed/bench-rules.md, in two or three
                                          minutes
    python -m bench.speed.rules --quick   in the second-level cache only, half a minute
    python -m bench.speed.rules --record  writes docs/speed/bench-rules.md and
                                          bench/results/rules.json
    python -m bench.speed.rules --count   counts instructions, writes bench/results/rule_counts.json
                                          and the page
    python -m bench.speed.rules --page    writes the page of the recorded results again

The program bench_steps (bench/speed/steps.cpp) measures: each step and 8-bit AdamW take turns
in one process, and a time is the minimum over many short turns. Compare ratios, never
times of two runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Collection
from typing import Any

from bench import ROOT
from bench.measuring import machine
from bench.pages import page

PROGRAM = ROOT / "build" / "lowbit" / "tests" / "cpp" / "bench_steps"
COUNTS = ROOT / "bench" / "results" / "rule_counts.json"
RESULT, PAGE = ROOT / "bench" / "results" / "rules.json", ROOT / "docs" / "speed" / "bench-rules.md"
LISTS = {
    "rules": (
        "Rules",
        (
            "8-bit state (AdEMAMix's slow mean and Schedule-Free's weights: bfloat16), bfloat16 "
            "weights rounded stochastically."
        ),
    ),
    "formats": (
        "State formats",
        "AdamW; the format of the first moment, then that of the second. Stochastic: of the codes.",
    ),
    "params": ("Parameter formats", "8-bit AdamW."),
}
LANES = {"avx512vbmi": 16, "avx512": 16, "avx2": 8}  # values in a register
PER_CYCLE = {"avx512vbmi": 2, "avx512": 2, "avx2": 4}  # vector instructions of a Zen 4 core
LIMIT = 1.5
NAMES = {"avx512vbmi": "AVX-512", "avx512": "AVX-512 without byte permutes", "avx2": "AVX2"}


def measured(output: str) -> list[dict]:
    """The program's lines. A place that was not measured has no time."""
    rows = []
    for line in output.splitlines():
        isa, kind, name, size, *times = line.split("\t")
        own_cache, adamw_cache, own_memory, adamw_memory = map(float, times)
        rows.append(
            {
                "isa": isa,
                "list": kind,
                "name": name,
                "bytes": float(size),
                "cache": [own_cache, adamw_cache],
                "memory": [own_memory, adamw_memory] if own_memory < 1e9 else None,
            }
        )
    return rows


def ratio(row: dict, place: str, adamw_bytes: float) -> float:
    """The time over that of 8-bit AdamW, for the same number of bytes."""
    own, adamw = row[place]
    return own / adamw * adamw_bytes / row["bytes"]


def counted(output: str) -> list[dict]:
    """The program's lines with `count`: instructions for each register of values."""
    rows = []
    for line in output.splitlines():
        isa, kind, name, *numbers = line.split("\t")
        size, instructions, vectors, divisions, roots = map(float, numbers)
        rows.append(
            {
                "isa": isa,
                "list": kind,
                "name": name,
                "bytes": size,
                "instructions": instructions,
                "vectors": vectors,
                "divisions": divisions,
                "roots": roots,
            }
        )
    return rows


def floor(row: dict) -> float:
    """Cycles of one value in which its vector instructions can be executed."""
    return float(row["vectors"] / PER_CYCLE[row["isa"]] / LANES[row["isa"]])


def adamw_bytes(rows: list[dict]) -> float:
    """The bytes a value of 8-bit AdamW's step, to which all others are compared."""
    return next(r["bytes"] for r in rows if (r["list"], r["name"]) == ("rules", "adamw"))


def above(rows: list[dict]) -> set[tuple[str, str]]:
    """The steps that took more than LIMIT times as long as 8-bit AdamW for their bytes,
    anywhere.
    """
    adamw = adamw_bytes(rows)
    return {
        (r["list"], r["name"])
        for r in rows
        if any(r[p] and ratio(r, p, adamw) > LIMIT for p in ("cache", "memory"))
    }


def counts_table(rows: list[dict], slow: Collection[tuple[str, str]] = ()) -> str:
    """8-bit AdamW, what is slow, and what executes more than LIMIT times AdamW's vector
    instructions for its bytes.
    """
    found = {(r["list"], r["name"], r["isa"]): r for r in rows}
    isas = list(dict.fromkeys(r["isa"] for r in rows))

    def share(row: dict) -> float:
        adamw = found["rules", "adamw", row["isa"]]
        return row["vectors"] / adamw["vectors"] * adamw["bytes"] / row["bytes"]

    lines = []
    for kind, name in dict.fromkeys((r["list"], r["name"]) for r in rows):
        own = [found[kind, name, isa] for isa in isas]
        if name != "adamw" and (kind, name) not in slow and max(map(share, own)) <= LIMIT:
            continue
        cells = [name, f"{own[0]['bytes']:.2f}"]
        for r in own:
            cells += [
                f"{r['instructions']:.0f}",
                f"{r['vectors']:.0f} ({share(r):.2f})",
                f"{r['divisions']:.1f}, {r['roots']:.1f}",
            ]
        lines.append(cells)
    head = [
        f"{NAMES.get(isa, isa)}{what}"
        for isa in isas
        for what in (", instructions", ", of vectors", ", divisions, roots")
    ]
    return page.table(["", "B", *head], lines)


def tables(rows: list[dict], counts: list[dict] | None = None) -> str:
    """Times, and beside them the least cycles, where they are counted."""
    least = {(r["list"], r["name"], r["isa"]): floor(r) for r in counts or ()}
    adamw = adamw_bytes(rows)
    isas = list(dict.fromkeys(r["isa"] for r in rows))
    places = [p for p in ("cache", "memory") if all(r[p] for r in rows)]
    found = {(r["list"], r["name"], r["isa"]): r for r in rows}
    parts = []
    for kind, (title, what) in LISTS.items():
        names = list(dict.fromkeys(r["name"] for r in rows if r["list"] == kind))
        head = [
            f"{NAMES.get(isa, isa)}, {place}"
            for isa in isas
            for place in (*places, *(["least cycles"] if least else []))
        ]
        lines = []
        for name in names:
            own = [found[kind, name, isa] for isa in isas]
            cells = [name, f"{own[0]['bytes']:.2f}"]
            for r in own:
                cells += [f"{r[p][0]:.2f} ({ratio(r, p, adamw):.2f})" for p in places]
                if least:
                    cycles = least.get((kind, name, r["isa"]))
                    cells.append("" if cycles is None else f"{cycles:.1f}")
            lines.append(cells)
        parts += [f"## {title}", what, page.table(["", "B", *head], lines)]
    return "\n\n".join(parts)


def opening(rows: list[dict]) -> str:
    """What follows for a reader, of the widest instruction set."""
    isa, adamw = rows[0]["isa"], adamw_bytes(rows)
    place = "memory" if all(r["memory"] for r in rows) else "cache"
    own = {(r["list"], r["name"]): ratio(r, place, adamw) for r in rows if r["isa"] == isa}
    fast = sum(x <= LIMIT for x in own.values())
    slow = {kind: max((x, n) for (k, n), x in own.items() if k == kind) for kind in LISTS}
    (rule_ratio, rule), (format_ratio, formats), _ = slow.values()
    return page.filled(
        f"Most steps are as fast as 8-bit AdamW for the bytes that they move: {fast} of {len(own)} "
        f"take at most {LIMIT} times as long, with {NAMES.get(isa, isa)}. The slowest rule is "
        f"`{rule}`, at {rule_ratio:.1f} times, and the slowest state is `{formats}`, at "
        f"{format_ratio:.1f} times. Stochastic "
        "codes, logarithms and rules that measure before they update cost most."
    )


def written(result: dict[str, Any], counts: list[dict] | None = None) -> str:
    m = result["machine"]
    parts: list[str] = [
        "# Every rule and format on a CPU",
        "![Time of a step of every rule, state format and parameter format beside 8-bit AdamW]"
        "(../pictures/rules.svg)",
        opening(result["rows"]),
        page.bullets(
            "**Numbers** are nanoseconds per parameter of one thread, in the second-level cache or "
            "in memory.",
            "**In brackets** is the time over that of 8-bit AdamW in the same minute, for the same "
            "number of bytes. 1 is as fast as 8-bit AdamW for what it moves.",
            "**B** is the bytes that a step moves for a parameter.",
            "**Least cycles** are those of one value: its counted vector instructions at two in a "
            "cycle (AVX-512) or four (AVX2), Zen 4's most.",
        ),
        tables(result["rows"], counts),
    ]
    if counts:
        parts += [
            "## Counted instructions",
            page.filled(
                f"Listed are 8-bit AdamW, the steps that take more than {LIMIT} times as long as "
                "it for their bytes above, and those that execute as many of its vector "
                "instructions."
            ),
            page.filled(
                "Instructions are those for one register of values, 16 with AVX-512 and 8 with "
                "AVX2. Those of vectors have loads and stores among them, and in brackets their "
                "number over AdamW's for the same number of bytes. Divisions and square roots "
                "occupy the divider longer; they are counted among the instructions and again."
            ),
            counts_table(counts, above(result["rows"])),
        ]
    counting = page.filled(
        "`python -m bench.speed.rules --count` steps a copy of the process through one step of a "
        "matrix of 32 x 256, instruction by instruction. With so few rows, what is done once for a "
        "column weighs more than in a tall matrix."
    )
    parts += [
        "## Method",
        page.filled(
            f"{m['cpu']} (family {m['cpu_family']}, model {m['cpu_model']}), load "
            f"{m['load'][0]:.0f} on {m['cores']} shared cores, {m['date'][:10]}. `python -m "
            "bench.speed.rules --record` writes this page. [bench.md](bench.md#rules-and-formats) "
            "says how it measures and what the slow ones wait for."
        ),
        *([counting] if counts else []),
    ]
    return "\n\n".join(parts) + "\n"


def recorded_counts() -> list[dict] | None:
    return json.loads(COUNTS.read_text())["rows"] if COUNTS.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speed.rules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    if asked.quick and asked.record:
        parser.error("--quick measures the cache only; --record keeps whole results")
    if asked.page:
        PAGE.write_text(written(json.loads(RESULT.read_text()), recorded_counts()))
        return 0
    if not PROGRAM.exists():
        print(
            f"{PROGRAM} is not built: cmake --build build/lowbit --target bench_steps",
            file=sys.stderr,
        )
        return 2
    if asked.count:
        done = subprocess.run(
            [PROGRAM, "-", "-", "-", "count"], stdout=subprocess.PIPE, text=True, check=True
        )
        rows = counted(done.stdout)
        COUNTS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        PAGE.write_text(written(json.loads(RESULT.read_text()), rows))
        print(counts_table(rows))
        return 0
    arguments = ["-", "-", "-", *(["quick"] if asked.quick else [])]
    done = subprocess.run([PROGRAM, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = {"machine": machine.describe("cpu"), "rows": measured(done.stdout)}
    print(tables(result["rows"]))
    if asked.record:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        PAGE.write_text(written(result, recorded_counts()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
