"""docs/quality.md, its pictures and the table of docs/presets.md, from the lines of
bench/results/quality.jsonl.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import statistics
from collections.abc import Iterable
from typing import Any

from bench.measuring.intervals import Interval
from bench.pages.page import bullets, filled, folded, quoted, table
from bench.quality import embeddings_page, zero_gradients
from bench.quality import plot as quality_plot
from bench.quality import schedule as quality_schedule
from bench.quality.pairs import ENOUGH, difference, reference, runs_of
from bench.quality.runs import ROOT, Lines, best_rate, found
from bench.quality.studies import CONTESTANTS, STUDIES, Study

HEADINGS = {
    "0.5 M": "Small model",
    "0.5 M, 20,000 steps": "Long run",
    "10 M": "10 M parameters",
    "10 M, 160 steps": "Muon",
}
MARKS = ("<!-- python -m bench.quality --page -->", "<!-- end -->")
PRESETS = (
    "torch AdamW",
    "AdamW, 8bit",
    "AdamW, 4bit",
    "AdamW, fp8",
    "AdamW, log8",
    "AdamW, bfloat16",
    "AdamW, bfloat16_stochastic",
)
WORDS = {"more": "higher", "less": "lower", "": "no difference shown"}
VERDICTS = (*WORDS.values(), f"fewer than {ENOUGH} seeds", "not run yet")
FEW, WAITING = VERDICTS[3:]
NUMBERS = re.compile(r" \([+-][^()]*\)")  # behind a name: its difference and interval


METHOD = (
    filled(
        "**Models.** All are byte-level GPTs (`recipes/train_gpt.py`) on the text of Python's "
        "standard library. Losses are in nats per byte of held-out text."
    ),
    filled(
        "**Pairs.** All runs of a seed begin with the same weights and see the same batches. A "
        "difference is a run's loss less that of its pair. ± is half of the 95 % confidence "
        "interval of the mean of these differences, by Student's t. An interval without 0 is "
        "**bold**. Of 20 contestants that differ in nothing, one is bold by chance."
    ),
    filled(
        "The loss is the mean of the seeds that have run: where their number differs, compare "
        "differences only. Compare a format with `torch AdamW, start rounded` too. Its first "
        "weights are rounded to bfloat16, which is neither better nor worse."
    ),
    filled(
        "**Tuning.** The learning rate is tuned for each rule, with full-precision state, by "
        "shorter runs of another seed. Every rule chooses among as many rates. Every format "
        "takes the rate of its rule, as somebody who changes the format alone would. Nothing "
        "else is tuned."
    ),
    filled(
        "**A lower loss does not mean a more exact format.** The error of a format acts as "
        "another learning rate does, or as noise. With few bits the second moment comes out "
        "too high ([drift.md](loss/drift.md)), so steps are shorter. A loss below float32's "
        "says that the format did no harm here."
    ),
    filled(
        "**State.** Embeddings, head and small parameters keep float32 state, the former two "
        'by `lowbit.param_groups(model, embeddings="float32", heads="float32")`. '
        "[Embeddings and heads](#embeddings-and-heads) has the study without it. So a format "
        "takes more bytes per parameter here than in [presets.md](presets.md#all-presets)."
    ),
)


def page(lines: Lines) -> str:
    parts = [
        "# Quality",
        "![Held-out loss of each format, less that of float32 state](pictures/quality.svg)",
        bullets(*conclusions(lines)),
        filled(
            "Each line of the picture is a format. It shows how far the held-out loss is from that "
            "of float32 state under the same optimizer. Red formats raised it. What the points say "
            "of formats holds under AdamW; the tables below have [Muon](#muon) and other rules."
        ),
        "## The differences",
        filled(
            "Which of these raised or lowered the held-out loss, beside what is named. The tables "
            "below have the differences with their intervals. An empty cell has no contestant."
        ),
        without_empty(
            ["compared", *VERDICTS],
            [[NUMBERS.sub("", cell) for cell in cells] for cells in evidence(lines)],
        ),
        filled(over_long(lines, STUDIES["0.5 M, 20,000 steps"])),
        "## Method",
        *METHOD,
    ]
    for name, heading in HEADINGS.items():
        parts += [f"## {heading}", *section(lines, STUDIES[name])]
    parts += embeddings_page.section()
    if zero_gradients.RESULTS.exists():
        found = json.loads(zero_gradients.RESULTS.read_text())
        parts += ["## Zero gradients", *zero_gradients.section(found)]
    parts += ["## What is recorded", *quality_schedule.section(lines)]
    return "\n\n".join(parts) + "\n"


def without_empty(head: list[str], rows: list[list[str]]) -> str:
    """A table without the columns that have no cell."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def section(lines: Lines, study: Study) -> list[str]:
    own = [line for line in lines if line["study"] == study.name]
    head = [
        "contestant",
        "rate",
        "seeds",
        "loss of its seeds",
        "less the first of its rule",
        "less float32 AdamW",
        "state, bytes per parameter",
    ]
    parts: list[str] = []
    if any(runs_of(lines, study, name) for name in study.contestants):
        parts += [
            f"![{HEADINGS[study.name]}: losses](pictures/{picture(study)})",
            filled(
                "From the left: the training loss of the first contestant of each rule; that of "
                "others less the first's, in pairs (those with most seeds); and the held-out "
                "differences of the table."
            ),
        ]
    rows = [row(lines, study, name) for name in study.contestants]
    tuned = [] if study.tuned_in else tuning(lines, study)
    ran = folded("How it was run", about(own, study), flattening(lines, study), *tuned)
    return [*parts, table(head, rows), ran]


def about(own: Lines, study: Study) -> str:
    m = study.model
    model = (
        f"Width {m['width']}, depth {m['depth']}, context {m['context']}; {study.steps:,} steps of "
        f"{study.batch} sequences, {study.warm_up} of warm-up, then a cosine to a tenth; weight "
        f"decay {study.weight_decay}; AdamW's betas {study.betas[0]} and {study.betas[1]}. The "
        f"loss is that of {study.held_out[0] * study.held_out[1] * m['context']:,} held-out bytes."
    )
    if not own:
        return filled(model, "No run yet.")
    settings, machines = own[0]["settings"], [line["machine"] for line in own]
    dates = sorted(line["date"][:10] for line in own)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    where = "; ".join(
        dict.fromkeys(
            (
                f"{x['cpu']}, {x['threads']} thread{'s' * (x['threads'] > 1)}, {x['isa']}, Python "
                f"{x['python']}, torch {x['versions']['torch']}"
            )
            for x in machines
        )
    )
    return filled(
        f"{own[0]['parameters'] / 1e6:.2f} M parameters.",
        model,
        f"Products are {settings['compute']}. {where}; {len(own)} runs, {when}.",
    )


def flattening(lines: Lines, study: Study) -> str:
    """Whether float32 AdamW still improved fast at the end: how far its training loss fell between
    tenths of its steps.
    """
    name = study.rules()["AdamW"]
    several = [
        line["losses"]
        for line in runs_of(lines, study, name).values()
        if line["held_out_loss"] is not None
    ]
    means = [statistics.fmean(x) for x in zip(*several, strict=True)]
    if len(means) < 10:
        return ""
    ends = [i * len(means) // 10 for i in range(11)]
    tenths = [statistics.fmean(means[a:b]) for a, b in itertools.pairwise(ends)]
    return filled(
        f"The training loss of `{name}` fell by {tenths[0] - tenths[1]:.3f} from the first to the "
        f"second tenth of its steps, and by {tenths[8] - tenths[9]:.3f} from the ninth to the last."
    )


def tuning(lines: Lines, study: Study) -> list[str]:
    """The table of the tuning: losses by rule and rate, the best one bold."""
    rates = sorted({run.lr for rule in study.rules() for run in study.tuning(rule)})
    rows = []
    for rule, name in study.rules().items():
        losses = {run.lr: found(lines, run) for run in study.tuning(rule)}
        best = best_rate(lines, study, rule)
        shown = [cell(losses.get(lr), lr == best) for lr in rates]
        rows.append([rule if rule != name else name, *shown])
    said = (
        f"Tuning, {study.tuning_steps} steps of another seed: loss by "
        "rule and learning rate, the least bold."
    )
    edges = [rule for rule in study.rules() if at_edge(lines, study, rule)]
    if edges:
        said += (
            f" At the end of the grid, so that a rate beyond it may be better: {', '.join(edges)}."
        )
    return [filled(said), table(["rule", *(f"{lr:g}" for lr in rates)], rows)]


def at_edge(lines: Lines, study: Study, rule: str) -> bool:
    rates = [run.lr for run in study.tuning(rule)]
    return best_rate(lines, study, rule) in (rates[0], rates[-1])


def cell(line: dict[str, Any] | None, best: bool) -> str:
    if line is None:
        return ""
    text = "diverged" if line["held_out_loss"] is None else f"{line['held_out_loss']:.3f}"
    return f"**{text}**" if best else text


def row(lines: Lines, study: Study, name: str) -> list[str]:
    runs = runs_of(lines, study, name)
    if not runs:
        return [name, *[""] * 6]
    ended = [line["held_out_loss"] for line in runs.values() if line["held_out_loss"] is not None]
    mean = f"{statistics.fmean(ended):.4f}" if ended else ""
    if lost := len(runs) - len(ended):
        mean += f" ({lost} diverged)"
    first, adamw = reference(study, name), study.rules().get("AdamW")

    def judged(other: str) -> bool:
        return min(len(runs), len(runs_of(lines, study, other))) >= ENOUGH

    of_rule = "" if name == first else marked(difference(lines, study, name, first), judged(first))
    of_adamw = (
        ""
        if adamw is None or adamw in (name, first)
        else marked(difference(lines, study, name, adamw), judged(adamw))
    )
    line = next(iter(runs.values()))
    return [
        name,
        f"{line['lr']:g}",
        str(len(runs)),
        mean,
        of_rule,
        of_adamw,
        f"{line['bytes_per_parameter']['state']:.2f}",
    ]


def marked(found: Interval | None, judged: bool) -> str:
    if found is None:
        return ""
    return f"**{found}**" if found.shown and judged else str(found)


def conclusions(lines: Lines) -> list[str]:
    """What follows for a reader: sentences, each true of these lines.
    Their intervals are in the table of `evidence`.
    """
    small, long = STUDIES["0.5 M"], STUDIES["0.5 M, 20,000 steps"]
    formats, weights, changed, other = groups(small)
    said = [
        default(lines),
        lead(lines, small, formats, "state", "state formats"),
        lead(lines, small, weights, "for bfloat16 weights", "ways to store them"),
        lead(lines, small, changed, "in the middle of a run", "changes of format"),
        apart(lines, small, formats, other),
        without_divergence(lines, long),
    ]
    return [sentence for sentence in said if sentence]


def groups(study: Study) -> tuple[list[str], ...]:
    """Contestants of the small model: AdamW's state formats, its bfloat16 weights,
    changes of format, and other rules.
    """
    names = [
        n
        for n in study.contestants
        if CONTESTANTS[n].rule == "AdamW" and n not in ("torch AdamW", "torch AdamW, start rounded")
    ]
    formats = [n for n in names if CONTESTANTS[n].weights is None and CONTESTANTS[n].half is None]
    weights = [n for n in names if CONTESTANTS[n].weights]
    changed = [n for n in names if CONTESTANTS[n].half]
    return formats, weights, changed, [n for n in study.rules().values() if n != "torch AdamW"]


def evidence(lines: Lines) -> list[list[str]]:
    """Rows of a table: what is compared, and its contestants with their intervals,
    by what these show.
    """
    small, _, large, short = (STUDIES[name] for name in HEADINGS)
    formats, weights, changed, other = groups(small)

    def of(what: str, study: Study, names: Iterable[str], to: str | None = None) -> list[str]:
        said = sorted_by(lines, study, names, to)
        return [what, *(", ".join(said[verdict]) for verdict in VERDICTS)]

    def of_large(study: Study) -> list[str]:
        own = [n for n in study.contestants if n not in study.rules().values()]
        return of(
            f"10 M parameters, {study.steps:,} steps, beside the same rule in full precision",
            study,
            own,
        )

    return [
        of("state formats of AdamW, beside torch's float32 AdamW", small, formats),
        of("bfloat16 weights with 8-bit state, beside torch's float32 AdamW", small, weights),
        of(
            "a change of format in the middle of a run, beside torch's float32 AdamW",
            small,
            changed,
        ),
        of(
            "other rules in full precision, each at its own tuned rate, beside float32 AdamW",
            small,
            other,
            "torch AdamW",
        ),
        of_large(short),
        of_large(large),
    ]


def without_divergence(lines: Lines, study: Study) -> str:
    runs = [runs_of(lines, study, n) for n in study.contestants]
    if not all(runs) or any(x["held_out_loss"] is None for some in runs for x in some.values()):
        return ""
    return f"**Nothing diverged in {study.steps:,} steps**, in float32, 8 bits or 4."


def default(lines: Lines) -> str:
    """Whether the default preset was judged, and never shown to raise the loss."""
    rows = evidence(lines)
    higher, others = (
        "".join(cell for row in rows for cell in row[a:b]) for a, b in ((1, 2), (2, 4))
    )
    if "8bit` (" not in others or "8bit` (" in higher:
        return ""
    return "**Use `8bit`**, the default: no study shows that it raises the loss."


def lead(lines: Lines, study: Study, names: Iterable[str], where: str, what: str) -> str:
    """Which of those that are judged raised the loss, and what to do about it."""
    said = sorted_by(lines, study, names)
    judged = sum(len(said[what]) for what in WORDS.values())
    if not judged:
        return ""
    worse = [one.split("`")[1] for one in said[WORDS["more"]]]
    if not worse:
        safe = f"**{what.capitalize()} {where}** are safe"
        return f"{safe}: none of {judged} was shown to raise the loss."
    listed = " and ".join(f"`{name}`" for name in worse)
    they = "It" if len(worse) == 1 else "They"
    return (
        f"**Avoid {listed} {where}.** {they} raised the loss; none of the other "
        f"{judged - len(worse)} {what} was shown to."
    )


def apart(lines: Lines, study: Study, formats: Iterable[str], rules: Iterable[str]) -> str:
    """How far apart rules lie, beside how far formats do."""

    def widest(names: Iterable[str], to: str | None = None) -> float | None:
        found = [difference(lines, study, n, to or reference(study, n)) for n in names]
        means = [abs(off.mean) for off in found if off is not None]
        return max(means, default=None)

    by_rule, by_format = widest(rules, "torch AdamW"), widest(formats)
    if by_rule is None or by_format is None:
        return ""
    more = "more" if by_rule > by_format else "less"
    return (
        f"**The rule matters {more} than the format**: a rule moves the loss by up to "
        f"{by_rule:.2f}, a format of AdamW's state by up to {by_format:.2f}."
    )


def sorted_by(
    lines: Lines, study: Study, names: Iterable[str], to: str | None = None
) -> dict[str, list[str]]:
    """Contestants with their differences, by what these show."""
    said: dict[str, list[str]] = {what: [] for what in VERDICTS}
    for name in names:
        runs, others = (runs_of(lines, study, n) for n in (name, to or reference(study, name)))
        off = difference(lines, study, name, to or reference(study, name))
        short = name.removeprefix("AdamW, ").replace("8bit, bfloat16 weights ", "")
        if any(line["held_out_loss"] is None for line in runs.values()):
            said["higher"].append(f"`{short}` (diverged)")
        elif not runs:
            said[WAITING].append(f"`{short}`")
        elif off is None or len(runs.keys() & others.keys()) < ENOUGH:
            said[FEW].append(f"`{short}`")
        else:
            count = f", {len(runs)} seeds" if len(runs) < len(study.seeds) else ""
            said[WORDS[off.shown]].append(f"`{short}` ({off}{count})")
    return said


def over_long(lines: Lines, study: Study) -> str:
    said, waiting = [], []
    for name in study.contestants:
        runs = runs_of(lines, study, name)
        if not runs:
            waiting.append(f"`{name}`")
            continue
        lost = [line for line in runs.values() if line["held_out_loss"] is None]
        if lost:
            said.append(f"`{name}` diverged in {len(lost)} of {len(runs)} runs")
        else:
            mean = statistics.fmean(line["held_out_loss"] for line in runs.values())
            said.append(f"`{name}` did not diverge and ended at {mean:.4f}")
    if said and len(study.seeds) == 1:
        said.append("one seed shows no difference between formats, only whether they diverge")
    listed = "; ".join([*said, *([f"not run yet: {', '.join(waiting)}"] if waiting else [])])
    return f"Over {study.steps:,} steps: {listed}."


def of_presets(lines: Lines) -> str:
    """The table of docs/presets.md."""
    study = STUDIES["0.5 M"]
    rows = [
        [cells[0], cells[2], cells[3], cells[4]]
        for name in PRESETS
        for cells in [row(lines, study, name)]
    ]
    return table(["run", "seeds", "loss of its seeds", "less float32 AdamW"], rows)


def picture(study: Study) -> str:
    return f"quality-{HEADINGS[study.name].lower().replace(' ', '-')}.png"


def write(lines: Lines, docs: pathlib.Path = ROOT / "docs") -> None:
    (docs / "quality.md").write_text(page(lines))
    presets = docs / "presets.md"
    presets.write_text(quoted(presets.read_text(), MARKS, of_presets(lines)))
    for study in STUDIES.values():
        quality_plot.draw(lines, study, docs / "pictures" / picture(study))
    embeddings_page.draw(docs / "pictures" / embeddings_page.PICTURE)
