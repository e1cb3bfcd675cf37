"""The pictures of measurements: memory, loss, quality, speed."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text
from pictures import INK, heading, log_x, panel, picture, without_scale

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
GIB = 1 << 30
GROUND = {"facecolor": INK.ground, "edgecolor": "none", "pad": 0.8}  # of a text over a line

# Memory

PARTS = {"weights": INK.plain, "gradients": INK.plainer}
ROWS = {  # rows of memory.json by what a reader is told
    "torch AdamW, float32": "torch, float32",
    "torch AdamW, bfloat16": "torch, bfloat16",
    "bitsandbytes AdamW8bit": "bitsandbytes or torchao, 8-bit",
    "bitsandbytes AdamW8bit, under Trainer": "bitsandbytes in transformers' Trainer",
    "lowbit AdamW, 8bit": "lowbit 8bit",
    "lowbit AdamW, 4bit": "lowbit 4bit",
}
FIRST = [name for name in ROWS if "bfloat16" not in name]


def memory_of(axes: Axes, model: str, rows: Sequence[str]) -> None:
    """Stacked bars: weights, gradients, state; the sum behind each."""
    counted = json.loads((RESULTS / "memory.json").read_text())[model]["rows"]
    most = max(sum(counted[name].values()) for name in rows) / GIB
    for at, name in enumerate(rows):
        ours = name.startswith("lowbit")
        begin = 0.0
        for part, size in counted[name].items():
            color = PARTS.get(part, color_of(ours))
            axes.barh(-at, size / GIB, left=begin, height=0.46, color=color)
            begin += size / GIB
        above(axes, 0, -at + 0.3, ROWS[name], ours)
        gib = f"{begin:.1f} GiB" if most < 100 else f"{begin:,.0f} GiB"
        behind(axes, begin, -at, gib, ours)
    axes.set_xlim(0, most * 1.22)
    axes.set_ylim(-len(rows) + 0.55, 0.75)
    without_scale(axes)


def color_of(ours: bool) -> str:
    return INK.ours if ours else INK.other


def weight_of(ours: bool) -> str:
    return "bold" if ours else "normal"


def above(axes: Axes, x: float, y: float, text: str, ours: bool) -> Text:
    """What a bar is, above it."""
    return axes.text(x, y, text, size=9, weight=weight_of(ours), va="bottom")


def behind(axes: Axes, x: float, y: float, text: str, ours: bool, points: float = 4) -> Annotation:
    """A number behind the end of its bar."""
    return axes.annotate(
        text,
        (x, y),
        (points, 0),
        textcoords="offset points",
        va="center",
        size=9,
        weight=weight_of(ours),
    )


def before(axes: Axes, y: float, text: str, color: str) -> None:
    """What a row of marks is, left of the axes."""
    axes.text(
        -0.04,
        y,
        text,
        size=8.6,
        ha="right",
        va="center",
        transform=axes.get_yaxis_transform(),
        color=color,
    )


def key_of_memory(axes: Axes) -> None:
    axes.axis("off")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    for x, color, name in (
        (0.0, INK.plain, "weights"),
        (0.24, INK.plainer, "gradients"),
        (0.52, INK.other, ""),
        (0.56, INK.ours, "optimizer state"),
    ):
        axes.barh(0.5, 0.035, left=x, height=0.7, color=color)
        axes.text(x + 0.05, 0.5, name, size=9, va="center", color=INK.muted)


def memory_8b() -> None:
    with picture("memory-8b", "Memory of an 8-billion-parameter Llama under AdamW", 3.3) as figure:
        heading(figure, "Llama 3.1 8 B under AdamW", "in memory between two steps, on one GPU")
        key_of_memory(panel(figure, 2.57, 0.2))
        memory_of(panel(figure, 0.02, 2.5), "Llama 3.1, 8 B", FIRST)


def memory_models() -> None:
    counted = json.loads((RESULTS / "memory.json").read_text())
    each, gap, rows = 2.8, 0.3, list(ROWS)
    height = len(counted) * (each + gap) + 0.85
    with picture("memory-models", "Memory of whole models under AdamW", height) as figure:
        heading(figure, "Whole models under AdamW", "in memory between two steps")
        key_of_memory(panel(figure, height - 0.73, 0.2))
        for at, model in enumerate(counted):
            bottom = height - 0.8 - (at + 1) * (each + gap)
            axes = panel(figure, bottom, each)
            memory_of(axes, model, rows)
            figure.text(
                0.04, (bottom + each + 0.08) / height, model, weight="bold", color=INK.muted
            )


# Loss


@functools.cache
def runs(name: str) -> tuple[tuple[float, ...], ...]:
    """The training losses of a contestant in the study of the small model, a row a seed."""
    lines = map(json.loads, (RESULTS / "quality.jsonl").read_text().splitlines())
    return tuple(
        tuple(line["losses"])
        for line in lines
        if (line["study"], line["run"], line["steps"]) == ("0.5 M", name, 1500)
    )


def loss() -> None:
    drawn = (
        (
            "AdamW, 8bit, bfloat16 weights stochastic",
            "lowbit 8bit, bfloat16 weights",
            INK.ours,
            "-",
        ),
        ("torch AdamW", "torch AdamW, float32", INK.other, (0, (3, 3))),
    )
    with picture("loss", "Training loss under float32 AdamW and under lowbit", 3.3) as figure:
        heading(
            figure,
            "Training loss of a small GPT",
            "five seeds: their mean, and a band from lowest to highest",
        )
        axes = panel(figure, 0.42, 2.28, left=0.1)
        axes.spines["left"].set_visible(True)
        for name, label, color, dashes in drawn:
            seeds = runs(name)
            steps = [min(1500, 1500 * (i + 1) // len(seeds[0])) for i in range(len(seeds[0]))]
            means = [statistics.fmean(x) for x in zip(*seeds, strict=True)]
            low, high = ([f(x) for x in zip(*seeds, strict=True)] for f in (min, max))
            axes.fill_between(steps, low, high, color=color, alpha=0.3, lw=0)
            axes.plot(steps, means, color=color, lw=2, ls=dashes, label=label)
        axes.set_ylim(1.75, 2.95)
        axes.set_xlim(0, 1500)
        axes.set_yticks([2, 2.5])
        axes.set_xticks([0, 500, 1000, 1500])
        axes.set_xlabel("step; loss in nats per byte", size=9)
        axes.grid(axis="y", lw=0.6)
        axes.legend(frameon=False, fontsize=9, handlelength=2.4)


# Quality

STUDY = re.compile(r"^## Small model\n(.*?)^## ", re.M | re.S)
DIFFERENCE = re.compile(r"\*{0,2}([+-]\d\.\d+) ± (\d\.\d+)\*{0,2}")
FOREST = (  # a heading, what its contestants begin with in docs/quality.md, and what they are not
    ("AdamW's state", "AdamW, ", ("float32", "8bit, ")),
    ("bfloat16 weights, 8-bit state", "AdamW, 8bit, bfloat16 weights ", ()),
    ("changes in the middle of a run", "", ()),
    ("other optimizers' state", "", ()),
)
CHANGES = {
    "AdamW, 8bit, then 4bit": "8bit, then 4bit",
    "torch AdamW, then 8bit by lowbit-ckpt": "float32, then 8bit",
}


def differences() -> dict[str, list[tuple[str, float, float]]]:
    """Differences from float32 state of the same rule, and half of their intervals, by group."""
    found = STUDY.search((ROOT / "docs" / "quality.md").read_text())
    assert found is not None
    groups: dict[str, list[tuple[str, float, float]]] = {title: [] for title, *_ in FOREST}
    for line in found[1].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        shown = DIFFERENCE.fullmatch(cells[4]) if len(cells) == 7 else None
        if shown is None:
            continue
        name, off = cells[0], (float(shown[1]), float(shown[2]))
        if name in ("torch AdamW, start rounded", "AdamW, float32"):
            continue
        if name in CHANGES:
            group, short = FOREST[2][0], CHANGES[name]
        elif name.startswith(FOREST[1][1]):
            group, short = FOREST[1][0], name.removeprefix(FOREST[1][1])
        elif name.startswith("AdamW, "):
            group, short = FOREST[0][0], name.removeprefix("AdamW, ")
        else:
            group, short = FOREST[3][0], name.replace("Adafactor with momentum", "Adafactor")
        groups[group].append((short, *off))
    return groups


def quality() -> None:
    groups = differences()
    count = sum(map(len, groups.values())) + 1.4 * len(groups)
    height = 0.185 * count + 1.2
    with picture("quality", "Loss of each format beside float32 state", height) as figure:
        heading(
            figure,
            "Held-out loss, less that of float32 state",
            "small GPT, pairs of five seeds, 95 % interval",
        )
        axes = panel(figure, 0.45, height - 1.1, left=0.43)
        axes.axvline(0, color=INK.muted, lw=1)
        at, inside = 0.0, axes.get_yaxis_transform()
        for title, rows in groups.items():
            at -= 1.4
            axes.text(-0.82, at + 0.1, title, weight="bold", size=9, transform=inside)
            for name, mean, half in rows:
                at -= 1
                worse = mean - half > 0
                color = INK.bad if worse else INK.ours
                axes.errorbar(mean, at, xerr=half, fmt="o", ms=4, color=color, capsize=2, lw=1.4)
                before(axes, at, name, color if worse else INK.ink)
        axes.set_ylim(at - 0.8, 0)
        axes.set_xlim(-0.065, 0.075)
        axes.set_xticks([-0.05, 0, 0.05], ["-0.05", "0", "+0.05"])
        axes.grid(axis="x", lw=0.6)
        axes.text(0, -0.36, "lower loss", size=8.8, color=INK.muted, transform=below(axes, 0.0))
        axes.text(
            0, -0.36, "higher", size=8.8, color=INK.muted, ha="right", transform=below(axes, 1.0)
        )


def below(axes: Axes, x: float):
    """Coordinates in inches below a point of the lower edge."""
    from matplotlib.transforms import ScaledTranslation

    scale = axes.figure.dpi_scale_trans
    return scale + ScaledTranslation(x, 0, axes.transAxes)


# Drift

DRIFT_ROW = re.compile(
    r"^\| `(\w+)` \| ([\d.,]+) % \| ([\d.,]+) % \| ([\d.,]+) % \| ([a-z ]+) \|$", re.M
)
OFF = ("second moment, like magnitudes", "second moment, unlike", "first moment")
MARKERS = ("o", "D", "s")
LEAST, LIMIT = 0.1, 15  # percent: what is less is drawn here, and what is recommended stays below


def drift() -> None:
    rows = DRIFT_ROW.findall((ROOT / "docs" / "loss" / "drift.md").read_text())
    verdicts = {"recommended": INK.ours, "tolerated": INK.other, "warned about": INK.bad}
    height = 0.185 * (len(rows) + 1.4 * len(verdicts)) + 1.55
    with picture("drift", "How far state drifts from float32's", height) as figure:
        heading(
            figure,
            "State beside float32's, off by at most",
            "in 100,000 simulated steps of AdamW; dashed: 15 %",
        )
        axes = panel(figure, 0.32, height - 1.35, left=0.36)
        axes.axvline(LIMIT, color=INK.muted, lw=1, ls=(0, (3, 3)))
        at, inside = 0.0, axes.get_yaxis_transform()
        for verdict, color in verdicts.items():
            at -= 1.4
            axes.text(-0.53, at + 0.1, verdict, weight="bold", size=9, transform=inside)
            for name, *found, said in rows:
                if said != verdict:
                    continue
                at -= 1
                off = [max(LEAST, float(x.replace(",", ""))) for x in found]
                axes.hlines(at, min(off), max(off), color=color, lw=0.8)
                for x, marker in zip(off, MARKERS, strict=True):
                    axes.plot(x, at, marker, ms=5, mfc="none", color=color, mew=1.3)
                before(axes, at, name, color)
        ticks = {0.1: "0.1 %", 1: "1", 10: "10", 100: "100", 1000: "1000 %"}
        log_x(axes, LEAST * 0.8, 5000, ticks)
        axes.set_ylim(at - 0.8, 0)
        axes.grid(axis="x", lw=0.6)
        axes.legend(
            handles=[
                Line2D([], [], ls="", marker=m, ms=5, mfc="none", color=INK.muted, label=said)
                for m, said in zip(MARKERS, OFF, strict=True)
            ],
            frameon=False,
            fontsize=8.6,
            ncols=2,
            loc="lower left",
            bbox_to_anchor=(-0.56, 1.0),
            handletextpad=0.1,
            columnspacing=1.0,
        )


# Muon

MUON_ROW = re.compile(r"^\| `(\w+)`, blocks of \d+ \| (\d) \|(?: [\d.]+ \|){3} ([\d.]+) \|", re.M)
SMALL_BLOCKS = re.compile(r"^\| blocks of 32 \|.*?, .*?, ([\d.]+) \|", re.M)  # of linear4: muon4


def muon_formats() -> None:
    text = (ROOT / "docs" / "loss" / "muon-formats.md").read_text()
    rows = [(name, int(bits), 100 - 100 * float(x)) for name, bits, x in MUON_ROW.findall(text)]
    small = SMALL_BLOCKS.search(text)
    assert small is not None
    presets = {"dynamic8": "8bit", "dynamic4": "4bit", "linear4 in blocks of 32": "muon4"}
    rows.append(("linear4 in blocks of 32", 4, 100 - 100 * float(small[1])))
    with picture("muon-formats", "Progress that Muon loses to each format", 2.75) as figure:
        heading(
            figure,
            "Progress lost by storing Muon's momentum",
            "each mark is a format; tenfold from line to line",
        )
        axes = panel(figure, 0.35, 1.95, left=0.14)
        for name, bits, lost in rows:
            ours = name in presets
            axes.plot(lost, bits, "o", ms=6, mfc=INK.ours if ours else "none", mec=INK.ours)
            if ours:
                points = 5 if name != "dynamic4" else -13
                axes.annotate(
                    presets[name],
                    (lost, bits),
                    (0, points),
                    textcoords="offset points",
                    ha="center",
                    size=9,
                    weight="bold",
                )
        log_x(axes, 0.08, 120, {0.1: "0.1 %", 1: "1 %", 10: "10 %", 100: "100 %"})
        axes.set_ylim(1.4, 8.8)
        axes.set_yticks(range(2, 9), [f"{bits} bits" for bits in range(2, 9)])
        axes.grid(axis="x", lw=0.6)


# Averages of weights

EMA_ROW = re.compile(r"^\| (`[^|]*?) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.M)
DECAYS = ("0.99", "0.999", "0.9999")
AVERAGES = {  # rows of ema.md by what a reader is told
    "`EMA`, `bfloat16_stochastic`": "lowbit.EMA, bfloat16_stochastic",
    "`AveragedModel`, bfloat16": "torch's AveragedModel, bfloat16",
}


def ema() -> None:
    text = (ROOT / "docs" / "loss" / "ema.md").read_text()
    found = {name: [*map(float, rest)] for name, *rest in EMA_ROW.findall(text)}
    with picture("ema", "Errors of averages of bfloat16 weights", 2.9) as figure:
        heading(
            figure,
            "Error of an average of bfloat16 weights",
            "at 1 the average is no better than the weights",
        )
        axes = panel(figure, 0.1, 2.25)
        y = 0.0
        for name, told in AVERAGES.items():
            ours = "EMA`" in name
            above(axes, 0, y + 0.45, told, ours).set_bbox(GROUND)
            for decay, error in zip(DECAYS, found[name], strict=True):
                axes.barh(y, error, height=0.7, color=color_of(ours))
                said = behind(axes, error, y, f"{error:.2f} at decay {decay}", ours)
                said.set_bbox(GROUND)
                y -= 0.9
            y -= 1.0
        axes.axvline(1, color=INK.muted, lw=1, ls=(0, (3, 3)), zorder=0)
        axes.set_xlim(0, 7.6)
        axes.set_ylim(y + 1.2, 1.4)
        without_scale(axes)


PICTURES: dict[str, Callable[[], None]] = {
    "memory-8b": memory_8b,
    "memory-models": memory_models,
    "loss": loss,
    "quality": quality,
    "drift": drift,
    "muon-formats": muon_formats,
    "ema": ema,
}
