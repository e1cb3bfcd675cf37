"""The section of docs/quality.md on embeddings and heads, and its picture."""

from __future__ import annotations

import collections
import json
import math
import pathlib
import statistics
from typing import Any

from bench.measuring.intervals import Interval, interval
from bench.pages.page import bullets, filled, table
from bench.quality import drift_rows
from bench.quality import embeddings as runs
from bench.quality.runs import Lines, found, read

PICTURE = "quality-embeddings.png"
ENOUGH = 3  # pairs that are shown
# The classes of words that are told apart: the loss where such a word is to be said, or was read.
CLASSES = ("every step", "every 100th", "rarer")
HEAD = ["state, by its format", "rate", "pairs", "all words", *CLASSES, "after such a rare word"]


def settings(lines: Lines) -> Lines:
    """The lines with the settings of the last one."""
    return [line for line in lines if line["settings"] == lines[-1]["settings"]]


def differences(lines: Lines, kind: str, name: str, times: float) -> list[tuple[Any, Any]]:
    """The lines of a contestant, each with that of float32 state with its seed."""
    best = runs.best_rate(lines, kind)
    if best is None:
        return []
    pairs = [
        [found(lines, runs.Run(kind, n, best * times, seed)) for n in (name, runs.SAME)]
        for seed in runs.seeds_of(kind, times)
    ]
    return [(own, other) for own, other in pairs if own and other]


def marked(pairs: list[tuple[Any, Any]], *keys: str) -> str:
    """The mean difference of a loss, bold where its interval excludes 0."""

    def value(line: Any) -> float:
        for key in keys:
            line = line[key]
        return math.inf if line is None else line

    made = interval([value(own) - value(other) for own, other in pairs])
    return f"**{made}**" if made.shown and len(pairs) >= ENOUGH else str(made)


def rows(lines: Lines) -> dict[tuple[str, str, float], list[str]]:
    """The table: by kind, contestant and multiple of the best rate."""
    made = {}
    for kind in runs.KINDS:
        for times in (1.0, 0.5, 2.0):
            for name in runs.contestants(runs.KINDS[kind]):
                pairs = differences(lines, kind, name, times)
                if name == runs.SAME or len(pairs) < ENOUGH:
                    continue
                made[kind, name, times] = [
                    f"{kind}: {name}",
                    f"{pairs[0][0]['lr']:g}",
                    str(len(pairs)),
                    marked(pairs, "held_out_loss"),
                    *(marked(pairs, "said", name) for name in CLASSES),
                    marked(pairs, "read", CLASSES[-1]),
                ]
    return made


FINDINGS = bullets(
    "**8-bit state is enough for an embedding, for a head, and for a matrix that is "
    "both.** From scratch, no class of words was shown to lose at the best rate. In "
    "fine-tuning, 8 bits for both cost less than 0.002. Other random bits alone change the "
    "loss by 0.02 from scratch.",
    "**It saves 5.8 GiB on Llama 3 8 B**, so `lowbit.param_groups` gives none of them a "
    "format of its own.",
    "**The rarest words lose a little under an 8-bit head**: 0.01 to 0.03 of a loss of 12. "
    "A learning rate that is 5 % higher raised their loss by 0.02, and doubling it by 0.2 "
    "to 0.7. 8-bit rows that get a gradient in every step do move 2 to 3 % further "
    "([below](#rows-that-seldom-get-a-gradient)).",
    "**Tied weights pay no more than untied ones.** In fine-tuning they pay nothing, where "
    "untied ones pay 0.01 on the rarest words. From scratch, at half the best rate, both "
    "pay 0.03 on them. At their best rate, chance alone moves runs of tied weights so far "
    "apart that they show nothing. `param_groups(model, embeddings='float32')` keeps "
    "float32 for 6 bytes more for each of their parameters.",
    "**`bfloat16_stochastic` lost nothing anywhere**, the rarest words included, and takes "
    "twice the bytes of 8 bits.",
    "**Avoid a 4-bit head if rare words matter.** Their loss was higher, and such runs "
    "end far from float32's.",
)


def section() -> list[str]:
    """The paragraphs, with their headings."""
    lines = settings(read(runs.RESULTS))
    one = lines[0]["settings"]
    machines = collections.Counter(
        ", ".join((x["machine"]["cpu"], x["machine"]["isa"], f"torch {x['machine']['torch']}"))
        for x in lines
    )
    scratch, tuned = runs.KINDS["untied"].steps, runs.KINDS["untied, fine-tuned"]
    dates = sorted(line["date"][:10] for line in lines)
    losses = {
        kind: [a["held_out_loss"] for a, _ in differences(lines, kind, runs.SAME, 1.0)]
        for kind in runs.KINDS
    }
    ended = "; ".join(f"{k}, {statistics.fmean(x):.3f}" for k, x in losses.items() if x)
    return [
        "## Embeddings and heads",
        FINDINGS,
        "The held-out loss less that of float32 state for both, with the 95 % interval:",
        table(HEAD, rows(lines).values()),
        f"![Embeddings and heads: losses](pictures/{PICTURE})",
        filled(
            f"**The model** is a GPT of width {one['width']} with a vocabulary of "
            f"{one['vocabulary']:,} words of Python files. It trains for {scratch} steps of "
            f"{one['batch'] * one['context']} words. The body has 8-bit state, and all weights are "
            "bfloat16 with stochastic rounding. Only the state of the embedding, of the head, or "
            "of the matrix that is both differs."
        ),
        filled(
            "**The columns** have all words, and those that come in every step, in every 10th to "
            "100th, and in fewer. The last column is the loss where such a rare word was read. "
            "Differences are pairs of one seed."
        ),
        filled(
            f"**Fine-tuned** are models of {tuned.base:,} steps, with {tuned.steps} steps on other "
            "files. Rates are the best ones of float32 state, or a multiple. Mean losses with "
            f"float32 state: {ended}."
        ),
        filled(
            f"`python -m bench.quality.embeddings`, {dates[-1]}: "
            f"{'; '.join(f'{count} runs on {m}' for m, count in machines.most_common())}. Four "
            "runs of tied weights were repeated on the other kind: their losses differ by less "
            "than 0.001 (2026-11-29)."
        ),
        "### Rows that seldom get a gradient",
        *drift_rows.section(json.loads(drift_rows.RESULTS.read_text())),
    ]


def draw(path: pathlib.Path) -> None:
    """The differences of all words with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = settings(read(runs.RESULTS))
    there: dict[str, Interval] = {}
    for kind, name, times in rows(lines):
        pairs = differences(lines, kind, name, times)
        label = f"{kind}: {name}" + ("" if times == 1 else f", rate x {times:g}")
        there[label] = interval([a["held_out_loss"] - b["held_out_loss"] for a, b in pairs])
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.26 * len(there)))
    for at, off in enumerate(reversed(there.values())):
        color = "tab:red" if off.shown == "more" else "tab:green" if off.shown else "tab:blue"
        axis.errorbar(off.mean, at, xerr=off.half, fmt="o", ms=5, color=color, capsize=3)
    axis.axvline(0, color="gray", lw=1)
    axis.set_yticks(range(len(there)), list(reversed(there)), fontsize=8)
    axis.set_title("held-out loss less that of float32 state, 95 % interval", fontsize=10)
    axis.set_xlim(-0.25, 0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
