"""The part of docs/quality.md about Muon, and its picture, from the lines of bench/results/muon_quality.jsonl."""

from __future__ import annotations

import pathlib
import statistics
import textwrap
from typing import Any

from bench.muon_quality import (
    BATCH,
    CONTESTANTS,
    HELD_OUT,
    MODEL,
    RATES,
    STEPS,
    TUNING_STEPS,
    WARM_UP,
    WEIGHT_DECAY,
    best_rate,
    compared,
    found,
    missing,
    tuning,
)

Lines = list[dict[str, Any]]
FULL = {c.rule: name for name, c in CONTESTANTS.items() if c.state_format == "float32"}


def losses(lines: Lines, name: str) -> dict[int, float]:
    """The held-out loss of each seed that has run."""
    runs = [found(lines, run) for run in compared(lines, name)]
    return {line["seed"]: line["held_out_loss"] for line in runs if line}


def differences(lines: Lines, name: str) -> list[float]:
    """The loss less that of the same rule in float32, for each seed that has both."""
    own, full = losses(lines, name), losses(lines, FULL[CONTESTANTS[name].rule])
    return [own[seed] - full[seed] for seed in own if seed in full]


def spread(values: Any) -> float:
    return max(values) - min(values)


def section(lines: Lines) -> str:
    """Markdown. What has not been run is said so, and no number stands in for it."""
    count = lines[0]["parameters"] / 1e6
    about = lines[0]["machine"]
    model = (
        f"A byte-level GPT of {count:.1f} M parameters (width {MODEL['width']}, depth {MODEL['depth']}, context {MODEL['context']}), nearly all of "
        f"them in hidden matrices, on the same text: {STEPS} steps of {BATCH} sequences, then the loss of {HELD_OUT[0] * HELD_OUT[1] * MODEL['context']:,} "
        f"held-out bytes. Weights are float32, products {lines[0]['settings']['compute']}. All runs of a seed begin with the same weights and see the "
        "same batches. `python -m bench.muon_quality` makes the runs and this section."
    )
    tuned = (
        f"**Tuned**: the learning rate alone, among {len(RATES['Muon'])} for each rule, with float32 state, by {TUNING_STEPS} steps of another seed. State "
        "formats take the rate of their rule. In Muon's runs AdamW steps embeddings, head, norms and biases with the same rate, and `adjust_lr_fn` is "
        f"`match_rms_adamw`. **Not tuned**: weight decay {WEIGHT_DECAY}, {WARM_UP} steps of warm-up, a cosine to a tenth, momentum 0.95, betas (0.9, 0.95)."
    )
    machine = f"{about['cpu']}, one thread, {about['isa']}, torch {about['versions']['torch']}, {lines[-1]['date'][:10]}."
    parts = [
        "## Muon", "", textwrap.fill(model, 120), "", machine, "", textwrap.fill(tuned, 120), "",
        f"| rule | held-out loss after {TUNING_STEPS} steps, by learning rate |",
        "|---|---|",
    ]  # fmt: skip
    for rule in RATES:
        runs = [(run.lr, found(lines, run)) for run in tuning(rule)]
        shown = [f"{lr:g}: {line['held_out_loss']:.3f}" for lr, line in runs if line]
        parts.append(f"| {rule} | {', '.join(shown)} |")
    parts += [
        "",
        "| run | rate | mean | spread | seeds | less float32 of the same rule, by seed | state, bytes per parameter |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, contestant in CONTESTANTS.items():
        several = losses(lines, name)
        if not several:
            continue
        line = next(x for x in lines if x["run"] == name)
        rate = best_rate(lines, contestant.rule)
        each = ", ".join(f"{x:.3f}" for x in several.values())
        off = "" if name in FULL.values() else ", ".join(f"{x:+.3f}" for x in differences(lines, name))  # fmt: skip
        wide = f"{spread(several.values()):.3f}" if len(several) > 1 else ""
        parts.append(
            f"| {name} | {rate:g} | {statistics.fmean(several.values()):.3f} | {wide} | {each} | {off} | {line['state_bytes_per_parameter']:.2f} |"
        )
    if said := verdicts(lines):
        parts += ["", *said]
    absent: dict[str, list[str]] = {}
    for run in missing(lines):
        absent.setdefault(run.name, []).append(str(run.seed))
    if absent:
        several = [f"{name} (seed {', '.join(seeds)})" for name, seeds in absent.items()]
        parts += ["", textwrap.fill(f"**Not run yet**: {'; '.join(several)}.", 120)]
    return "\n".join([*parts, "", "![Muon and AdamW by state format](quality-muon.png)", ""])


def verdicts(lines: Lines) -> list[str]:
    """What each low-bit state did to the loss, beside the spread of the seeds of the same rule in float32."""
    made = []
    for name, contestant in CONTESTANTS.items():
        off, full = differences(lines, name), losses(lines, FULL[contestant.rule])
        if name in FULL.values() or len(off) < 2:
            continue
        wide, mean = spread(full.values()), statistics.fmean(off)
        inside = "within" if abs(mean) <= wide else "beyond"
        made.append(
            f"* **{name}**: {mean:+.3f} on the mean of {len(off)} seeds, {inside} the spread of float32's seeds, {wide:.3f}."
        )
    return made


def plot(lines: Lines, path: pathlib.Path) -> None:
    """Losses while training, and the held-out loss of each seed beside that of float32."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in CONTESTANTS if losses(lines, name)]
    colors = dict(zip(CONTESTANTS, pyplot.cm.tab10.colors, strict=False))  # type: ignore[attr-defined]
    figure, (curves, dots) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for name in names:
        runs = [line for run in compared(lines, name) if (line := found(lines, run))]
        every = STEPS // len(runs[0]["losses"])
        means = [statistics.fmean(x) for x in zip(*(r["losses"] for r in runs), strict=True)]
        steps = [every * (i + 1) for i in range(len(means))]
        style = "-" if name in FULL.values() else "--"
        curves.plot(steps[1:], means[1:], style, lw=1.8, color=colors[name], label=name)
    curves.set_xlabel("step")
    curves.set_ylabel("training loss, nats per byte, mean over seeds")
    curves.legend(frameon=False, fontsize=8)
    shown = [name for name in names if name not in FULL.values() and differences(lines, name)]
    for row, name in enumerate(reversed(shown)):
        off = differences(lines, name)
        dots.plot(off, [row] * len(off), "o", ms=7, mfc="none", color=colors[name])
        dots.plot(statistics.fmean(off), row, "|", ms=18, mew=2.5, color=colors[name])
    full = losses(lines, FULL["Muon"])
    if len(full) > 1:
        half = spread(full.values()) / 2
        dots.axvspan(-half, half, color="#ddd", label="spread of the seeds of Muon, float32")
        dots.legend(loc="lower right", frameon=False, fontsize=8)
    dots.axvline(0, color="gray", lw=1)
    dots.set_yticks(range(len(shown)), list(reversed(shown)))
    dots.set_ylim(-0.8, len(shown) - 0.4)
    dots.set_xlabel("held-out loss less that of float32 state\na circle for each seed, a bar for their mean; less is better")  # fmt: skip
    for axis in (curves, dots):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
