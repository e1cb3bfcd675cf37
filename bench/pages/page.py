"""A result as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

Result = dict

SHOWS = {  # what a picture of a page shows
    "bench-cpu-step.png": "Time of each optimizer's step beside torch's fused float32 AdamW",
    "bench-cpu-growth.png": "Time of a step for each parameter as a tensor grows",
}
SUMMARY = {  # contestants of the first table, by what a reader is told
    "lowbit 8-bit, bf16 stochastic": "lowbit 8bit",
    "lowbit 4-bit, bf16 stochastic": "lowbit 4bit",
    "lowbit 8-bit, float32 weights": "lowbit 8bit, float32 weights",
    "torch fused, bf16 nearest": "torch fused, bfloat16",
    "torchao AdamW8bit compiled, bf16 stochastic": "torchao 8-bit, compiled",
    "bitsandbytes AdamW8bit, bf16 nearest": "bitsandbytes 8-bit",
}


def quoted(text: str, marks: tuple[str, str], made: str) -> str:
    """A page with what is between its marks replaced."""
    before, rest = text.split(marks[0], 1)
    _, after = rest.split(marks[1], 1)
    return f"{before}{marks[0]}\n{made}\n{marks[1]}{after}"


def page(result: Result, command: str, pictures: Sequence[str] = ()) -> str:
    """The page of a result."""
    facts = result["machine"]
    device = facts.get("gpu", {}).get("name", "the CPU") if "gpu" in facts else "the CPU"
    parts = [
        f"# Measured on {device}",
        *[f"![{SHOWS[name]}](../pictures/{name})" for name in pictures],
        *([opening(result["step"])] if result.get("step") else []),
    ]
    for key, title, write in (
        ("step", "The step", step),
        ("growth", "Cost as size grows", growth),
        ("training", "Whole training steps", training),
        ("checkpoint", "Checkpoints", checkpoint),
        ("start", "Before training begins", start),
    ):
        failed = result.get("failed", {}).get(key)
        if key in result or failed:
            parts.append(f"## {title}")
        if key in result:
            parts.append(write(result[key]))
        if failed:
            parts.append(f"Failed: {failed}")
    parts += [
        "## Method",
        filled(
            f"`{command}` writes this page; [bench.md](bench.md#method) describes the method. The "
            f"run took {result['seconds']['all'] / 60:.1f} minutes."
        ),
        machine(result),
    ]
    return "\n\n".join(parts) + "\n"


def opening(cases: list[dict]) -> str:
    """The range of lowbit's 8-bit step over all workloads, and those of other 8-bit steps."""

    def ratios(start: str) -> list[float]:
        return [
            r["to_torch"]
            for c in cases
            for r in c["rows"]
            if r["to_torch"] and r["name"].startswith(start)
        ]

    ours = ratios("lowbit 8-bit, bf16 stochastic")
    others = ratios("torchao AdamW8bit") + ratios("bitsandbytes AdamW8bit")
    if not ours:
        return "How long a step takes, beside torch's fused float32 AdamW."
    said = (
        f"A step of 8-bit AdamW takes {min(ours):.1f} to {max(ours):.1f} times as long as torch's "
        "fused float32 step, over all workloads and threads below."
    )
    if others:
        said += f" torchao's and bitsandbytes' take {min(others):.0f} to {max(others):.0f} times."
    return filled(said)


def machine(result: Result) -> str:
    m = result["machine"]
    lines = [
        f"{m['date']}, settings `{result['settings']}`",
        (
            f"{m['cpu']} (family {m['cpu_family']}, model {m['cpu_model']}, {m['mhz']} MHz, "
            f"cache {m['cache']}), {m['cores']} cores, {m['memory_gib']} GiB; "
            f"{' '.join(m['flags'])}; lowbit's kernels: {m['isa']}"
        ),
        f"load at the start: {', '.join(f'{x:.1f}' for x in m['load'])}",
        f"{m['system']}, Python {m['python']}, "
        + ", ".join(f"{p} {v}" for p, v in m["versions"].items() if v),
    ]
    if "gpu" in m:
        lines.append(f"CUDA {m.get('cuda')}; " + ", ".join(f"{k} {v}" for k, v in m["gpu"].items()))
    return bullets(*lines)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def filled(*sentences: str, indent: str = "") -> str:
    """A paragraph whose lines fit a screen."""
    return textwrap.fill(
        " ".join(s for s in sentences if s),
        120,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def folded(title: str, *parts: str) -> str:
    """What a reader opens, on GitHub and on the site."""
    inside = "\n\n".join(part for part in parts if part)
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{inside}\n\n</details>'


def bullets(*items: str) -> str:
    """A list whose lines fit a screen."""
    return "\n".join(filled(f"* {item}", indent="  ") for item in items if item)


def busy(facts: Result) -> str:
    """What a reader must know of a timing beside other work; empty where the machine was quiet."""
    return (
        "**It was busy with other work: measure again when it is quiet.**"
        if facts["load"][0] > facts["cores"] / 2
        else ""
    )


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def step(cases: list[dict]) -> str:
    parts = [
        "The time of a step as a multiple of that of torch's fused float32 AdamW:",
        first_table(cases),
        filled(
            "Each workload opens to a table of all contestants. Times are medians over rounds in "
            "which all of them take turns; ratios are medians over the same rounds. `of copy` is "
            "the bytes that the step moves over its time, as a share of the copy's speed."
        ),
    ]
    for c in cases:
        clocks = ", ".join(f"{k} {v}" for k, v in c["clocks"].items())
        parts.append(
            folded(
                f"{workload(c)}, {c['numel'] / 1e6:,.1f} M parameters in {c['tensors']:,} "
                f"tensor{'s' * (c['tensors'] != 1)}",
                of_workload(c["rows"]),
                f"Just after: {clocks}" if clocks else "",
                left_out(c["missing"]) if c["missing"] else "",
            )
        )
    return "\n\n".join(parts)


def workload(case: dict) -> str:
    """What is stepped, and by how many threads where these are the CPU's."""
    threads = f", {case['threads']} thread{'s' * (case['threads'] > 1)}"
    cut = f" ({case['cut']})" if case["cut"] else ""
    return f"{case['workload']}{cut}{'' if case['clocks'] else threads}"


def first_table(cases: list[dict]) -> str:
    """A row for each workload, a column for each contestant of SUMMARY that took part in any."""
    found = [{r["name"]: r["to_torch"] for r in c["rows"]} for c in cases]
    shown = [name for name in SUMMARY if any(name in each for each in found)]
    return table(
        ["workload", *(SUMMARY[name] for name in shown)],
        [
            [workload(c), *(number(each.get(name)) for name in shown)]
            for c, each in zip(cases, found, strict=True)
        ],
    )


def of_workload(rows: list[dict]) -> str:
    return table(
        [
            "step",
            "ns / parameter",
            "to torch fused float32",
            "to the copy",
            "of copy",
            "GB/s",
            "state B / parameter",
        ],
        [
            [
                r["name"],
                number(r["ns_per_parameter"], 3),
                number(r["to_torch"]),
                number(r["to_copy"]),
                f"{r['of_copy_speed']:.0%}" if r["of_copy_speed"] else "",
                number(r["gb_per_second"], 1),
                number(r["state_bytes"]),
            ]
            for r in rows
        ],
    )


def left_out(missing: dict[str, str]) -> str:
    """Contestants that a table lacks, a line for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in missing.items():
        names.setdefault(reason, []).append(name)
    return bullets(
        *(f"not measured ({reason}): {'; '.join(some)}" for reason, some in names.items())
    )


def growth(g: dict) -> str:
    names = list(g["ns_per_parameter"])
    curves = {name: dict(map(tuple, points)) for name, points in g["ns_per_parameter"].items()}
    sizes = sorted({n for points in curves.values() for n in points})
    parts = [
        f"Nanoseconds per parameter for a step of one tensor, {g['threads']} thread(s):",
        table(
            ["elements", *names],
            [
                [f"2^{n.bit_length() - 1}", *[number(curves[m].get(n), 3) for m in names]]
                for n in sizes
            ],
        ),
    ]
    if "us_per_tensor" in g:
        parts += [
            filled(
                f"Microseconds for each of {g['tensors']:,} tensors of "
                f"{' x '.join(map(str, g['shape']))}, including the work of its elements: "
                "consecutive steps, and a step with cold caches."
            ),
            table(
                ["", "again", "cold"],
                [[n, number(t["again"]), number(t["cold"])] for n, t in g["us_per_tensor"].items()],
            ),
        ]
    return "\n\n".join(parts)


def training(t: dict) -> str:
    rows = [
        [
            r["name"],
            number(r["ms_per_step"], 1),
            f"{r['tokens_per_second']:,.0f}",
            number(r["to_torch"]),
            number(r["peak_bytes"] / 2**20, 0),
        ]
        for r in t["rows"]
    ]
    return "\n\n".join(
        [
            filled(
                f"The model of recipes/train_gpt.py, width {t['width']}, {t['depth']} layers, "
                f"{t['parameters'] / 1e6:.1f} M parameters, {t['batch']} sequences of "
                f"{t['context']}, {t['threads']} thread(s), each optimizer in its own process, in "
                "turn. Memory is the peak above that of the process before the model is built."
            ),
            table(["", "ms / step", "tokens / s", "to torch fused float32", "peak MiB"], rows),
            *([left_out(t["missing"])] if t["missing"] else []),
        ]
    )


def checkpoint(c: dict) -> str:
    verbs = list(c["rows"][0]["seconds"])
    parts = [
        (
            f"The state of {c['parameters'] / 2**20:.0f} Mi parameters, files in the page cache; "
            "seconds, and the ratio to a copy of the file:"
        ),
        table(
            ["", "MiB on disk", *verbs],
            [
                [
                    r["name"],
                    number(r["bytes"] / 2**20, 1),
                    *[f"{r['seconds'][v]:.3f} ({r['to_copy'][v]:.1f})" for v in verbs],
                ]
                for r in c["rows"]
            ],
        ),
    ]
    if not c["tool"]:
        return "\n\n".join([*parts, "lowbit-ckpt is not on PATH, so resharding is not measured."])
    parts += [
        (
            f"lowbit-ckpt on {c['tool']['bytes'] / 2**30:.2f} GiB of float32 state of two ranks, "
            f"best of {c['tool']['repeats']}:"
        ),
        table(
            ["", "seconds", "to cp", "to cp and sync", "peak MiB"],
            [
                [name, r["best_seconds"], r["to_cp"], r["to_cp_and_sync"], r["peak_mib"]]
                for name, r in c["tool"]["results"].items()
            ],
        ),
    ]
    return "\n\n".join(parts)


def start(s: dict) -> str:
    parts = [
        table(
            ["import", "seconds, with torch", "without torch"],
            [
                [name, number(t), number(s["beside_torch"].get(name))]
                for name, t in s["import_seconds"].items()
            ],
        ),
        table(
            ["8 matrices of 512 x 512", "first step, ms", "later step, ms"],
            [
                [name, number(t["first_seconds"] * 1e3, 1), number(t["later_seconds"] * 1e3, 2)]
                for name, t in s["steps"].items()
            ],
        ),
    ]
    return "\n\n".join([*parts, *([left_out(s["missing"])] if s["missing"] else [])])


def summary(result: Result) -> str:
    """The table of docs/speed/bench.md: step time as a ratio to torch's fused float32 AdamW,
    for one tensor and many.
    """
    cases = [c for c in result["step"] if c["workload"].startswith(("one tensor", "1,000"))]
    names = list(dict.fromkeys(r["name"] for c in cases for r in c["rows"]))
    found = {(c["workload"], c["threads"], r["name"]): r for c in cases for r in c["rows"]}
    head = [f"{c['workload']}, {c['threads']} thread{'s' * (c['threads'] > 1)}" for c in cases]
    rows = []
    for name in names:
        cells = [found.get((c["workload"], c["threads"], name)) for c in cases]
        any_row = next(cell for cell in cells if cell)
        rows.append(
            [
                name,
                number(any_row["state_bytes"]),
                *[
                    f"{cell['to_torch']:.2f} ({cell['ns_per_parameter']:.2f} ns)" if cell else ""
                    for cell in cells
                ],
            ]
        )
    m = result["machine"]
    where = (
        f"{m.get('gpu', {}).get('name') or m['cpu']}, {m['cores']} cores, {m['isa']}, torch "
        f"{m['versions']['torch']}, {m['date'][:10]}"
    )
    said = filled(
        "Time of a step as a ratio to torch's fused float32 AdamW (nanoseconds per "
        f"parameter); {where}."
    )
    return f"{said}\n\n" + table(["", "state B / parameter", *head], rows)
