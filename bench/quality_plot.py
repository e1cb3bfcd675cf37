"""The pictures of docs/quality.md: curves of the training loss, and differences with their confidence intervals."""

from __future__ import annotations

import math
import pathlib
import statistics

from bench.quality import Lines
from bench.quality_page import difference, reference, runs_of
from bench.studies import Study

CURVES = 8  # at most


def draw(lines: Lines, study: Study, path: pathlib.Path) -> None:
    """Writes the picture of a study, unless nothing of it has run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    there = [name for name in study.contestants if runs_of(lines, study, name)]
    if not there:
        return
    firsts = set(study.rules().values())
    compared = [n for n in there if n not in firsts and difference(lines, study, n, reference(study, n))]  # fmt: skip
    height = max(4.0, 1.2 + 0.24 * len(compared))
    figure, (curves, dots) = pyplot.subplots(1, 2, figsize=(12, height))
    shown = sorted(there, key=lambda n: (n not in firsts, there.index(n)))[:CURVES]
    for name in shown:
        several = [line["losses"] for line in runs_of(lines, study, name).values()]
        means = [statistics.fmean(x) for x in zip(*several, strict=False)]
        steps = [study.every * (i + 1) for i in range(len(means))]
        curves.plot(steps[1:], means[1:], "-" if name in firsts else "--", lw=1.6, label=name)
    curves.set_xlabel("step")
    curves.set_ylabel("training loss, nats per byte, mean over seeds")
    curves.legend(frameon=False, fontsize=8)
    for at, name in enumerate(reversed(compared)):
        off = difference(lines, study, name, reference(study, name))
        assert off is not None
        half = off.half if math.isfinite(off.half) else 0.0
        color = "tab:red" if off.shown == "more" else "tab:green" if off.shown else "tab:blue"
        dots.errorbar(off.mean, at, xerr=half, fmt="o", ms=5, color=color, capsize=3)
    dots.axvline(0, color="gray", lw=1)
    dots.set_yticks(range(len(compared)), [f"{n} ({len(runs_of(lines, study, n))})" for n in reversed(compared)], fontsize=8)  # fmt: skip
    dots.set_ylim(-0.8, max(len(compared), 1) - 0.2)
    dots.set_xlabel("held-out loss less that of the first of the same rule\nmean and 95 % interval of pairs; in brackets the seeds")  # fmt: skip
    for axis in (curves, dots):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
