"""The pictures of speed: saves and loads, steps on CPUs and GPUs, exact means."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable

from pictures import INK, heading, log_x, panel, picture, without_scale
from plots import GROUND, RESULTS, ROOT, above, behind, color_of

# Saves and loads

STORED = {
    "save, on disk: time / cp": "save to disk: time, where cp takes 1",
    "load on 4 ranks: bytes read / needed": "load on twice as many ranks: bytes read, of 1 needed",
}
STORED_ROW = re.compile(r"^\| (.*?) \| [^|]* \| ([\d.]+) \| ([\d.]+) \|", re.M)


def storage() -> None:
    text = (ROOT / "docs" / "speed" / "bench-storage.md").read_text()
    parts = re.split(r"^\*\*(.*?)\*\*: \d+ of \d+ met", text, flags=re.M)
    found = {
        state: {row: (float(a), float(b)) for row, a, b in STORED_ROW.findall(rows)}
        for state, rows in zip(parts[1::2], parts[2::2], strict=True)
    }
    with picture("storage", "Saves and loads of lowbit beside torch's", 4.9) as figure:
        heading(figure, "Saves and loads of checkpoints", "lowbit.checkpoint beside torch's")
        for at, (row, told) in enumerate(STORED.items()):
            bottom = 2.3 - 2.25 * at
            figure.text(0.04, (bottom + 1.98) / 4.9, told, size=9, color=INK.muted)
            axes = panel(figure, bottom, 1.9)
            y = 0.0
            for state, rows in found.items():
                above(axes, 0, y + 0.36, state, False)
                for who, value in zip(("torch", "lowbit"), rows[row], strict=True):
                    ours = who == "lowbit"
                    axes.barh(y, value, height=0.62, color=color_of(ours))
                    behind(axes, value, y, f"{value:.1f} {who}", ours).set_bbox(GROUND)
                    y -= 0.75
                y -= 0.8
            axes.axvline(1, color=INK.muted, lw=1, ls=(0, (3, 3)))
            axes.set_xlim(0, 2.75)
            axes.set_ylim(y + 0.9, 1.1)
            without_scale(axes)


# Many threads

SERVER = "Intel Xeon, 4th generation"
THREADS = {  # rows of scaling.md by what a reader is told
    "torch fused, float32": ("torch fused, float32", INK.other, "-"),
    "DeepSpeedCPUAdam, float32": ("DeepSpeedCPUAdam, float32", INK.other, (0, (3, 3))),
    "lowbit 8-bit, bf16 stochastic": ("lowbit 8bit", INK.ours, "-"),
    "lowbit 4-bit, bf16 stochastic": ("lowbit 4bit", INK.ours, (0, (3, 3))),
}


def scaling() -> None:
    text = (ROOT / "docs" / "speed" / "scaling.md").read_text()
    cost = {
        name: (float(moved), float(core))
        for name, moved, core in re.findall(r"^\| (.*?) \| ([\d.]+) \| ([\d.]+) \| ", text, re.M)
    }
    socket = re.search(rf"^\| {SERVER} \| (\d+) \|", text, re.M)
    cores = re.search(rf"^\| {SERVER} \| (\d+) \| \d+ x DDR5", text, re.M)
    assert socket and cores
    bandwidth, count = int(socket[1]), int(cores[1])
    with picture("scaling", "Time of a step by threads, modelled for a server", 3.4) as figure:
        heading(
            figure,
            "A step of AdamW by threads, modelled",
            f"{SERVER}, {count} cores: ns per parameter",
        )
        axes = panel(figure, 0.42, 2.4, left=0.1)
        axes.spines["left"].set_visible(True)
        for name, (told, color, dashes) in THREADS.items():
            moved, core = cost[name]
            threads = [x / 8 for x in range(8, 8 * count + 1)]
            times = [max(core / x, moved / bandwidth) for x in threads]
            axes.plot(threads, times, color=color, lw=2, ls=dashes, label=told)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        axes.set_yticks([0.05, 0.1, 0.2, 0.5], ["0.05", "0.1", "0.2", "0.5"])
        axes.set_ylim(0.025, 1.0)
        axes.set_xlabel("threads; a flat line waits for memory", size=9)
        axes.grid(axis="y", lw=0.6)
        axes.legend(frameon=False, fontsize=8.8, handlelength=2.6, loc="upper right")


# Speed

GPU = {  # rows of gpu-h100-2.json by what a reader is told
    "torch fused, float32": "torch fused, float32",
    "torch fused, bf16 nearest": "torch fused, bfloat16",
    "bitsandbytes AdamW8bit, bf16 nearest": "bitsandbytes, 8-bit",
    "torchao AdamW8bit compiled, bf16 stochastic": "torchao, 8-bit, compiled",
    "lowbit 4-bit, bf16 stochastic": "lowbit 4bit",
    "lowbit 8-bit, bf16 stochastic": "lowbit 8bit",
    "lowbit 8-bit, bf16 stochastic, in a CUDA graph": "lowbit 8bit, in a CUDA graph",
    "copy of the bytes of an 8-bit step": "copy of the bytes of lowbit 8bit",
}
CPU = {
    "bitsandbytes AdamW8bit, bf16 nearest": "bitsandbytes, 8-bit",
    "torchao AdamW8bit compiled, bf16 stochastic": "torchao, 8-bit, compiled",
    "lowbit 4-bit, bf16 stochastic": "lowbit 4bit",
    "lowbit 8-bit, bf16 stochastic": "lowbit 8bit",
    "torch fused, bf16 nearest": "torch fused, bfloat16",
    "torch fused, float32": "torch fused, float32",
    "copy of the bytes of an 8-bit step": "copy of the bytes of lowbit 8bit",
}


def speed_gpu() -> None:
    (step,) = json.loads((RESULTS / "gpu-h100-2.json").read_text())["step"]
    found = {row["name"]: row for row in step["rows"]}
    with picture("speed-gpu", "Time of a step on an H100 beside a copy", 4.35) as figure:
        heading(
            figure,
            "A step of AdamW on an H100",
            "one tensor of 2^28 values; dark: its bytes at a copy's speed",
        )
        axes = panel(figure, 0.05, 3.8)
        for at, (name, told) in enumerate(GPU.items()):
            row = found[name]
            ms, ours = 1e3 * statistics.median(row["seconds"]), name.startswith("lowbit")
            copied = ms * row["of_copy_speed"]
            dark, soft = (INK.ours, INK.ours_soft) if ours else (INK.other, INK.plainer)
            axes.barh(-at, ms, height=0.44, color=soft)
            axes.barh(-at, copied, height=0.44, color=dark)
            above(axes, 0, -at + 0.28, told, ours)
            behind(axes, ms, -at, f"{ms:.2f} ms", ours)
        axes.set_xlim(0, 9.3)
        axes.set_ylim(-len(GPU) + 0.6, 0.75)
        without_scale(axes)


def speed_cpu() -> None:
    step = json.loads((RESULTS / "cpu.json").read_text())["step"][0]
    found = {row["name"]: row for row in step["rows"]}
    with picture("speed-cpu", "Time of a step on one thread of a CPU", 3.75) as figure:
        heading(
            figure,
            "A step of AdamW on a CPU with AVX-512",
            "one thread, ns per parameter; every mark to the right is tenfold",
        )
        axes = panel(figure, 0.3, 2.95)
        for at, (name, told) in enumerate(CPU.items()):
            time, ours = found[name]["ns_per_parameter"], name.startswith("lowbit")
            axes.hlines(-at, 0.1, time, color=color_of(ours), lw=2)
            axes.plot(time, -at, "o", ms=6, color=color_of(ours))
            above(axes, 0.1, -at + 0.2, told, ours)
            behind(axes, time, -at, f"{time:.3g}", ours, 6)
        log_x(axes, 0.1, 200, {0.1: "0.1", 1: "1", 10: "10", 100: "100"})
        axes.set_ylim(-len(CPU) + 0.4, 0.8)
        axes.grid(axis="x", lw=0.6)


# Rules and formats on a CPU

RULE_ROW = re.compile(r"^\| ([\w, ]+?) \| [\d.]+ \| [\d.]+ \(([\d.]+)\) \|", re.M)


def rules() -> None:
    text = (ROOT / "docs" / "speed" / "bench-rules.md").read_text()
    sections = re.split(r"^## (.*)$", text, flags=re.M)
    parts = dict(zip(sections[1::2], sections[2::2], strict=True))
    times = {
        title: sorted((float(x), name) for name, x in RULE_ROW.findall(rows))
        for title, rows in parts.items()
    }
    times = {title: rows for title, rows in times.items() if len(rows) > 1}
    with picture("rules", "Steps of every rule and format beside 8-bit AdamW", 2.9) as figure:
        heading(
            figure,
            "Time of a step for the bytes that it moves",
            "each mark is a row of the tables; 8-bit AdamW is 1",
        )
        axes = panel(figure, 0.42, 2.0)
        for at, (title, rows) in enumerate(times.items()):
            axes.text(0.3, -at + 0.22, title, size=9, va="bottom")
            axes.plot(
                [x for x, _ in rows],
                [-at] * len(rows),
                "o",
                ms=6,
                mfc="none",
                mec=INK.ours,
                clip_on=False,
            )
            slowest, name = rows[-1]
            axes.annotate(
                name,
                (slowest, -at),
                (0, 7),
                textcoords="offset points",
                ha="right" if slowest > 2 else "left",
                size=8.8,
                color=INK.muted,
            )
        axes.axvline(1, color=INK.muted, lw=1, ls=(0, (3, 3)))
        axes.set_xlim(0.3, 3.5)
        axes.set_ylim(-len(times) + 0.5, 0.8)
        axes.set_xticks([0.5, 1, 1.5, 2, 2.5, 3], ["0.5", "1", "1.5", "2", "2.5", "3"])
        axes.set_xlabel("AVX-512, one thread, in the second-level cache", size=9)
        axes.grid(axis="x", lw=0.6)


# Exact means

MEANS = {  # rows of exact.md by what a reader is told
    "torch, reduced in bfloat16": "torch, reduced in bfloat16",
    "torch, reduced in float32": "torch, reduced in float32",
    "exact, one micro-batch a rank": 'lowbit, rounding="exact"',
}
MEAN_ROW = re.compile(r"^\| ((?:torch|exact)[^|]*?) \| ([\d.]+) \([^|]* \| ([\d.]+) \(", re.M)


def exact() -> None:
    text = (ROOT / "docs" / "bits" / "exact.md").read_text()
    found = {name: (float(two), float(four)) for name, two, four in MEAN_ROW.findall(text)}
    with picture("exact", "Time of an exact mean beside torch's reductions", 2.9) as figure:
        heading(
            figure,
            "Time to reduce gradients over 4 ranks",
            "torch's reduction in bfloat16 is 1",
        )
        axes = panel(figure, 0.1, 2.25)
        for at, (name, told) in enumerate(MEANS.items()):
            ours = name.startswith("exact")
            axes.barh(-at, found[name][1], height=0.44, color=color_of(ours))
            above(axes, 0, -at + 0.28, told, ours)
            behind(axes, found[name][1], -at, f"{found[name][1]:.2f}", ours)
        axes.set_xlim(0, 2.3)
        axes.set_ylim(-len(MEANS) + 0.6, 0.75)
        without_scale(axes)


PICTURES: dict[str, Callable[[], None]] = {
    "storage": storage,
    "scaling": scaling,
    "speed-gpu": speed_gpu,
    "speed-cpu": speed_cpu,
    "rules": rules,
    "exact": exact,
}
