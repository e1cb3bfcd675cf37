"""The runs of docs/quality.md: what is planned, what is missing, and the lines of finished ones.

Each finished run is a line of bench/results/quality.jsonl. A run that is cut off continues from
out/quality, where it was at most two minutes before. All runs of a seed begin with the same weights
and see the same batches. Learning rates are tuned first, with another seed.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from bench import ROOT
from bench.measuring import machine
from bench.measuring.recipe import load_recipe
from bench.quality.studies import CONTESTANTS, STUDIES, Run, Study, order
from bench.quality.train import Progress, train

RESULTS = ROOT / "bench" / "results" / "quality.jsonl"
PARTS = ROOT / "out" / "quality"
Lines = list[dict[str, Any]]


def read(path: pathlib.Path = RESULTS) -> Lines:
    """The finished runs. A last line without an end is of a writer that was killed,
    and does not count.
    """
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def append(path: pathlib.Path, line: dict[str, Any]) -> None:
    """Adds a line, whole or not at all for readers;
    behind a line that a killed writer left without an end.
    """
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
            if torn:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write((json.dumps(line) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


class Keyed(Protocol):
    """A run of this module or of `embeddings`."""

    @property
    def lr(self) -> float: ...

    def key(self) -> dict[str, Any]: ...


def found(lines: Lines, run: Keyed) -> dict[str, Any] | None:
    return next((x for x in lines if all(x[k] == v for k, v in run.key().items())), None)


def loss(line: dict[str, Any] | None) -> float:
    """The held-out loss of a run, infinite if it diverged."""
    return float("inf") if line is None or line["held_out_loss"] is None else line["held_out_loss"]


def best_of(lines: Lines, tuning: Iterable[Keyed]) -> float | None:
    """The rate with the least held-out loss of a tuning, None unless all have run."""
    losses = {run.lr: found(lines, run) for run in tuning}
    if not all(losses.values()):
        return None
    return min(losses, key=lambda lr: loss(losses[lr]))


def best_rate(lines: Lines, study: Study, rule: str) -> float | None:
    """The best rate of its rule's tuning."""
    return best_of(lines, study.tuning(rule))


def compared(lines: Lines, study: Study, name: str) -> list[Run]:
    """The runs of a contestant that are compared with others, one for each seed;
    none before its rule is tuned.
    """
    lr = best_rate(lines, study, CONTESTANTS[name].rule)
    return (
        [] if lr is None else [Run(study.name, name, lr, seed, study.steps) for seed in study.seeds]
    )


def planned(lines: Lines) -> Iterator[Run]:
    """All runs in order. What follows a tuning is known when that is done."""
    for study, names, seeds in order():
        for rule in dict.fromkeys(CONTESTANTS[name].rule for name in names):
            yield from study.tuning(rule)
        several = [compared(lines, study, name) for name in names]
        for seed in seeds:
            yield from (run for runs in several for run in runs if run.seed == seed)


def missing(
    lines: Lines, studies: list[str] | None = None, only: list[str] | None = None
) -> list[Run]:
    """What is to be run, in order: of some studies and contestants,
    with the tuning that they need.
    """
    rules = {CONTESTANTS[name].rule for name in only or CONTESTANTS}
    made = [run for run in dict.fromkeys(planned(lines)) if found(lines, run) is None]
    if studies:
        wanted = {s for name in studies for s in (name, STUDIES[name].tuned_in)}
        made = [run for run in made if run.study in wanted and (run.study in studies or tunes(run))]
    if only:
        made = [
            run
            for run in made
            if run.name in only or (tunes(run) and CONTESTANTS[run.name].rule in rules)
        ]
    return made


def tunes(run: Run) -> bool:
    return run.seed not in STUDIES[run.study].seeds


def comparable(lines: Lines) -> Lines:
    """The lines with the settings of their study,
    of the text and the dtype that most of its lines have.
    """
    several: dict[tuple[str, Any, Any], Lines] = {}
    for line in lines:
        study, settings = STUDIES.get(line["study"]), dict(line["settings"])
        text, compute = settings.pop("text_crc32"), settings.pop("compute")
        if study is not None and settings == study.settings():
            several.setdefault((line["study"], text, compute), []).append(line)
    best: dict[str, Lines] = {}
    for (name, *_), some in several.items():
        if len(some) > len(best.get(name, [])):
            best[name] = some
    return [line for line in lines if any(line is x for x in best.get(line["study"], []))]


class Runner:
    """The texts and the machine of new runs."""

    def __init__(self) -> None:
        self.recipe = load_recipe()
        self.texts: dict[int, Any] = {}
        facts = machine.describe("cpu")
        versions: Any = facts["versions"]
        self.machine = {
            "cpu": facts["cpu"],
            "cores": facts["cores"],
            "threads": torch.get_num_threads(),
            "isa": facts["isa"],
            "python": facts["python"],
            "versions": {p: v for p, v in versions.items() if p in ("torch", "lowbit")},
        }

    def of(self, study: Study) -> tuple[Any, torch.dtype, dict[str, Any]]:
        """The text, the dtype of products, and the settings of lines."""
        context = study.model["context"]
        text = self.texts.setdefault(context, self.recipe.Text([], context))
        compute = (
            self.recipe.compute_dtype(torch.bfloat16, "cpu")
            if study.compute == "auto"
            else getattr(torch, study.compute)
        )
        return (
            text,
            compute,
            {
                **study.settings(),
                "compute": str(compute).removeprefix("torch."),
                "text_crc32": zlib.crc32(text.train.numpy()),
            },
        )

    def lines(self) -> Lines:
        """The lines that runs made here can be compared with."""
        return [
            line
            for line in read()
            if line["study"] in STUDIES and line["settings"] == self.of(STUDIES[line["study"]])[2]
        ]

    def run(self, run: Run) -> dict[str, Any]:
        text, compute, settings = self.of(STUDIES[run.study])
        progress = Progress(PARTS, run, settings)
        made = train(run, self.recipe, text, compute, progress)
        date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        line = {**run.key(), **made, "settings": settings, "machine": self.machine, "date": date}
        append(RESULTS, line)
        progress.remove()
        return line
