"""The pictures of what happens: a step, and the way of a checkpoint. Each is rows of boxes, from
the top down; an arrow leads from each box to each of the next row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from pictures import INK, heading, picture


@dataclass(frozen=True)
class Box:
    """A title, and smaller lines below it."""

    title: str
    lines: tuple[str, ...] = ()
    strong: bool = False


@dataclass(frozen=True)
class Flow:
    title: str
    below: str
    rows: tuple[tuple[Box, ...], ...]


FLOWS = {
    "step": Flow(
        "A step of 8-bit AdamW",
        "10 bytes move for each parameter; float32 AdamW moves 28",
        (
            (
                Box("weights", ("bfloat16", "2 bytes")),
                Box("gradient", ("bfloat16", "2 bytes")),
                Box("state", ("codes, scales", "2.03 bytes")),
            ),
            (Box("a tile of values", ("read once, held in registers",)),),
            (
                Box(
                    "float32 arithmetic",
                    (
                        "1. codes become moments",
                        "2. AdamW: new moments, new weight",
                        "3. a scale for each block of 256 moments",
                        "4. moments become codes",
                        "5. the weight is rounded once, at random",
                    ),
                    strong=True,
                ),
            ),
            (
                Box("weights", ("bfloat16", "2 bytes")),
                Box("state", ("codes, scales", "2.03 bytes")),
            ),
        ),
    ),
    "checkpoint": Flow(
        "The way of a checkpoint",
        "nothing is gathered, nothing is executed, nothing is half there",
        (
            (
                Box("rank 0", ("its rows of", "weights, state")),
                Box("rank 1", ("its rows of", "weights, state")),
            ),
            (
                Box(
                    ".step-1000.partial-saving",
                    ("each rank writes a file of its own, with checksums",),
                ),
            ),
            (
                Box(
                    "step-1000",
                    ("synced, then renamed in one step:", "the old save or the new one, always"),
                    strong=True,
                ),
            ),
            (
                Box("3 ranks, or 64", ("each reads", "its rows only")),
                Box("lowbit-ckpt", ("inspect, verify", "convert, reshard")),
                Box("torch", ("dcp.load, as of", "any checkpoint")),
            ),
        ),
    ),
}
TITLE, LINE, GAP = 0.3, 0.17, 0.3  # inches


def tall(row: tuple[Box, ...]) -> float:
    return TITLE + LINE * max(len(box.lines) for box in row) + 0.08


def draw(name: str) -> None:
    flow = FLOWS[name]
    high = sum(map(tall, flow.rows)) + GAP * (len(flow.rows) - 1)
    with picture(name, flow.title, high + 0.75) as figure:
        heading(figure, flow.title, flow.below)
        whole = figure.get_figheight()
        axes = figure.add_axes((0.04, 0.1 / whole, 0.92, high / whole))
        axes.axis("off")
        width = 0.92 * figure.get_figwidth()
        axes.set_xlim(0, width)
        axes.set_ylim(0, high)
        top, above = high, []
        for row in flow.rows:
            bottom = top - tall(row)
            each = (width - 0.12 * (len(row) - 1)) / len(row)
            middles = []
            for at, box in enumerate(row):
                left = at * (each + 0.12)
                middles.append(left + each / 2)
                axes.add_patch(
                    FancyBboxPatch(
                        (left + 0.04, bottom + 0.04),
                        each - 0.08,
                        tall(row) - 0.08,
                        boxstyle="round,pad=0.04",
                        facecolor=INK.ours_soft if box.strong else "none",
                        edgecolor=INK.ours if box.strong else INK.plain,
                        lw=1.2,
                    )
                )
                axes.text(
                    middles[-1], top - 0.16, box.title, ha="center", va="center", weight="bold"
                )
                for i, line in enumerate(box.lines):
                    y = top - TITLE - LINE * (i + 0.35)
                    axes.text(
                        middles[-1], y, line, ha="center", va="center", size=8.8, color=INK.ink
                    )
            for a in above:
                for b in middles:
                    arrow = FancyArrowPatch(
                        (a, top + GAP),
                        (b, top),
                        arrowstyle="-|>",
                        mutation_scale=9,
                        color=INK.muted,
                        lw=1,
                        shrinkA=1,
                        shrinkB=1,
                    )
                    axes.add_patch(arrow)
            top, above = bottom - GAP, middles


PICTURES: dict[str, Callable[[], None]] = {name: functools.partial(draw, name) for name in FLOWS}
