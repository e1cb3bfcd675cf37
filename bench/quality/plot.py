"""The pictures of docs/quality.md: the training loss of each rule, how far its formats are from it
in pairs, and the held-out differences with their intervals.
"""

from __future__ import annotations

import math
import pathlib
import statistics

from bench.quality.pairs import ENOUGH, difference, reference, runs_of
from bench.quality.runs import Lines
from bench.quality.studies import Study

CURVES = 8  # at most, in a panel


def draw(lines: Lines, study: Study, path: pathlib.Path) -> None:
    """Writes the picture of a study, unless nothing of it has run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    there = [name for name in study.contestants if runs_of(lines, study, name)]
    if not there:
        return
    firsts = [name for name in there if name in study.rules().values()]
    compared = [
        n for n in there if n not in firsts and difference(lines, study, n, reference(study, n))
    ]
    height = max(4.0, 1.2 + 0.24 * len(compared))
    figure, (losses, apart, dots) = pyplot.subplots(1, 3, figsize=(15, height))
    for name in firsts:
        steps, means = curve(
            [line["losses"] for line in runs_of(lines, study, name).values()], study
        )
        losses.plot(
            steps[1:], means[1:], lw=1.6, label=f"{name} ({len(runs_of(lines, study, name))})"
        )
    losses.set_title("training loss, nats per byte\nin brackets the seeds", fontsize=10)
    enough = [n for n in compared if pairs(lines, study, n) >= min(ENOUGH, len(study.seeds))]
    for name in sorted(enough, key=lambda n: -pairs(lines, study, n))[:CURVES]:
        steps, means = curve(gaps(lines, study, name), study)
        apart.plot(steps, means, lw=1.4, label=name)
    apart.axhline(0, color="gray", lw=1)
    apart.set_title(
        "training loss less that of the first\nof the same rule, mean of pairs", fontsize=10
    )
    for axis in (losses, apart):
        axis.set_xlabel("step")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
    for at, name in enumerate(reversed(compared)):
        off = difference(lines, study, name, reference(study, name))
        assert off is not None
        half = off.half if math.isfinite(off.half) else 0.0
        shown = off.shown if name in enough else ""
        color = "tab:red" if shown == "more" else "tab:green" if shown else "tab:blue"
        dots.errorbar(off.mean, at, xerr=half, fmt="o", ms=5, color=color, capsize=3)
    dots.axvline(0, color="gray", lw=1)
    dots.set_yticks(
        range(len(compared)),
        [f"{n} ({pairs(lines, study, n)})" for n in reversed(compared)],
        fontsize=8,
    )
    dots.set_ylim(-0.8, max(len(compared), 1) - 0.2)
    dots.set_title(
        "held-out loss less that of the first\nof the same rule, 95 % interval (pairs)", fontsize=10
    )
    dots.locator_params(axis="x", nbins=5)
    for axis in (losses, apart, dots):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def curve(several: list[list[float]], study: Study) -> tuple[list[int], list[float]]:
    """The mean of some runs' losses, at the last of the steps over which each was taken."""
    means = [statistics.fmean(x) for x in zip(*several, strict=False)]
    return [min(study.every * (i + 1), study.steps) for i in range(len(means))], means


def gaps(lines: Lines, study: Study, name: str) -> list[list[float]]:
    """The training losses less those of the first of the rule, by seed: pairs saw the same batches,
    so this has little of their noise.
    """
    own, first = runs_of(lines, study, name), runs_of(lines, study, reference(study, name))
    return [
        [a - b for a, b in zip(own[seed]["losses"], first[seed]["losses"], strict=False)]
        for seed in own
        if seed in first
    ]


def pairs(lines: Lines, study: Study, name: str) -> int:
    return len(gaps(lines, study, name))
