"""What docs/quality.md is to compare, how much of it is recorded, and what the rest costs: the
first table of that page.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from bench.pages.page import filled, table
from bench.quality.runs import Lines, best_rate, found
from bench.quality.studies import CODES, CONTESTANTS, MUONS, STUDIES, Run, Study


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        what: is asked.
        study: in which it runs.
        names: its contestants.
        tunes: whether it is the tuning of their rules, and not their runs.
    """

    what: str
    study: Study
    names: tuple[str, ...]
    tunes: bool = False


def parts() -> list[Part]:
    """All runs of all studies, each in one part."""
    small, long, large, short = STUDIES.values()
    first = ("AdamW, 8bit", "AdamW, 4bit")
    formats = tuple(f"AdamW, {code}" for code in CODES if f"AdamW, {code}" not in first)
    weights = tuple(name for name in small.contestants if CONTESTANTS[name].weights)
    float32 = ("torch AdamW", "torch AdamW, start rounded", "AdamW, float32")
    other = tuple(name for name in small.contestants if CONTESTANTS[name].rule != "AdamW")
    rules = tuple(small.rules().values())
    return [
        Part(f"small model: rates of {len(rules)} rules, each among as many", small, rules, True),
        Part("float32: torch's, with a rounded start, lowbit's", small, float32),
        Part("AdamW with `8bit` and `4bit`", small, first),
        Part(f"AdamW with {len(formats)} other presets", small, formats),
        Part(
            "bfloat16 weights: stochastic, nearest, Kahan, split by 8 and 16 bits", small, weights
        ),
        Part("8 bits, then 4, in the middle of a run", small, ("AdamW, 8bit, then 4bit",)),
        Part(
            "float32, then 8 bits by `lowbit-ckpt`, in the middle of a run",
            small,
            ("torch AdamW, then 8bit by lowbit-ckpt",),
        ),
        Part("other rules: factored, Adafactor, APOLLO, Muon, with their presets", small, other),
        Part(f"{long.steps:,} steps: float32, `8bit`, `4bit`", long, long.contestants),
        Part("10 M parameters: rates of AdamW", large, tuple(large.rules().values()), True),
        Part(
            f"10 M parameters, {large.steps:,} steps: float32, `8bit`, `4bit`, bfloat16 weights",
            large,
            large.contestants,
        ),
        Part(
            "10 M parameters, Muon's study: rates of AdamW and Muon",
            short,
            tuple(short.rules().values()),
            True,
        ),
        Part(f"10 M parameters, {short.steps:,} steps: Muon and AdamW", short, MUONS),
    ]


def runs(lines: Lines, part: Part) -> Iterator[tuple[str, Run | None]]:
    """The runs of a part, by contestant;
    None for one whose rate is not known before its rule is tuned.
    """
    for name in part.names:
        rule = CONTESTANTS[name].rule
        if part.tunes:
            yield from ((name, run) for run in part.study.tuning(rule))
            continue
        lr = best_rate(lines, part.study, rule)
        for seed in part.study.seeds:
            yield (
                name,
                None if lr is None else Run(part.study.name, name, lr, seed, part.study.steps),
            )


def steps(part: Part) -> int:
    return part.study.tuning_steps if part.tunes else part.study.steps


def seconds_per_step(lines: Lines, study: Study, rule: str | None = None) -> float | None:
    """Of an idle core, by the finished runs of a study's model and batch, of one rule or of all:
    the median of the processor's seconds, or the least of the clock's.
    """
    alike = {
        name
        for name, other in STUDIES.items()
        if (other.model, other.batch, other.compute) == (study.model, study.batch, study.compute)
    }
    own = [
        line
        for line in lines
        if line["study"] in alike and rule in (None, CONTESTANTS[line["run"]].rule)
    ]
    counted = [
        line["processor_seconds"] / line["steps"] for line in own if "processor_seconds" in line
    ]
    if counted:
        return statistics.median(counted)
    return min((line["seconds"] / line["steps"] for line in own), default=None)


@dataclass(frozen=True)
class Account:
    """
    Attributes:
        planned, recorded: runs.
        took: seconds of the recorded ones, in order.
        left: seconds of an idle core of each missing run; None where nothing of its model has run.
        guessed: whether the rule of a missing one has not run with that model,
            so that other rules' runs count.
    """

    planned: int
    recorded: int
    took: list[float]
    left: list[float | None]
    guessed: bool

    def hours(self) -> float | None:
        known = [cost for cost in self.left if cost is not None]
        return sum(known) / 3600 if len(known) == len(self.left) else None

    def cells(self) -> list[str]:
        known = [cost for cost in self.left if cost is not None]
        hours = self.hours()
        each = (
            span(min(known), max(known), 0) + "*" * self.guessed
            if hours is not None and known
            else "unknown"
        )
        return [
            str(self.planned),
            str(self.recorded),
            "all" if not self.left else "none" if not self.recorded else "in part",
            span(self.took[0], self.took[-1], 0) if self.took else "",
            each if self.left else "",
            ("unknown" if hours is None else f"{hours:.2f}") if self.left else "",
        ]


def account(lines: Lines, part: Part) -> Account:
    took: list[float] = []
    left: list[float | None] = []
    planned, guessed = 0, False
    for name, run in runs(lines, part):
        planned += 1
        line = None if run is None else found(lines, run)
        if line is not None:
            took.append(line["seconds"])
            continue
        own = seconds_per_step(lines, part.study, CONTESTANTS[name].rule)
        each = own or seconds_per_step(lines, part.study)
        guessed = guessed or own is None
        left.append(each * steps(part) if each else None)
    return Account(planned, len(took), sorted(took), left, guessed)


def span(least: float, most: float, digits: int) -> str:
    low, high = (f"{x:,.{digits}f}" for x in (least, most))
    return low if low == high else f"{low} to {high}"


def section(lines: Lines) -> list[str]:
    """The paragraphs and the table."""
    accounts = [(part, account(lines, part)) for part in parts()]
    planned = sum(a.planned for _, a in accounts)
    recorded = sum(a.recorded for _, a in accounts)
    said = f"{recorded} of {planned} runs are recorded."
    if recorded < planned:
        known = [hours for _, a in accounts if (hours := a.hours()) is not None]
        more = ", and more where nothing of a model has run" if len(known) < len(accounts) else ""
        said += f" The rest takes an idle core {sum(known):.1f} hours{more}."
    head = [
        "what",
        "steps",
        "runs",
        "recorded",
        "",
        "seconds of a recorded run",
        "seconds of a missing run",
        "hours of the missing",
    ]
    cells = [[part.what, f"{steps(part):,}", *a.cells()] for part, a in accounts]
    return [
        filled(said),
        filled(
            "Planned are five seeds of every contestant, three with 10 M parameters over 160 "
            "steps, and one over 20,000 steps. `python -m bench.quality` runs what is missing, the "
            "most useful first, and resumes where it was stopped. `--list` names what is missing, "
            "and `--page` writes this page from `bench/results/quality.jsonl`."
        ),
        filled(
            "Recorded runs took these seconds, least to most; other work shared the cores with "
            "most of them. A missing run costs its steps times the processor's seconds of a step "
            "of the same model and rule: the median of its runs, or the least seconds by the clock "
            "where no run has counted the processor's. With a * the rule has not run with that "
            "model yet. Other rules' steps count there, which may be cheaper."
        ),
        table(head, cells),
    ]
