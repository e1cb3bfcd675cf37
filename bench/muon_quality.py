"""The effect of Muon's low-bit momentum on quality: a GPT of 10 M parameters on real text, several seeds of each kind of state.

    python -m bench.muon_quality              # runs what is missing, a line of bench/results/muon_quality.jsonl for each
    python -m bench.muon_quality --list       # what is there and what is missing
    python -m bench.muon_quality --page       # docs/quality.md alone, from what is there

All contestants of a seed begin with the same weights and see the same batches. A run that is cut off begins again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import lowbit
from bench import machine, quality
from bench.training import load_recipe

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "muon_quality.jsonl"
MODEL = {"width": 320, "depth": 8, "heads": 5, "context": 128}
BATCH, WARM_UP, WEIGHT_DECAY = 8, 20, 0.1  # sequences a step, steps, and of every optimizer
STEPS, TUNING_STEPS = 160, 64
SEEDS, TUNING_SEED = (0, 1, 2), 100
HELD_OUT = (16, 16)  # batches, sequences of each
EVERY = 10  # steps of which a loss is the mean
# Learning rates that are tried, the same number for each rule. State formats take that of their rule in float32.
RATES = {"AdamW": (5e-4, 1e-3, 2e-3, 4e-3), "Muon": (1e-3, 2e-3, 4e-3, 8e-3)}


@dataclass(frozen=True)
class Contestant:
    rule: str
    state_format: Any

    def optimizer(self, model: torch.nn.Module, lr: float, seed: int) -> torch.optim.Optimizer:
        options = {"lr": lr, "weight_decay": WEIGHT_DECAY, "seed": seed, "state_format": self.state_format}  # fmt: skip
        if self.rule == "AdamW":
            return lowbit.AdamW(lowbit.param_groups(model), betas=(0.9, 0.95), **options)
        return lowbit.MuonWithAdamW(
            lowbit.muon_param_groups(model), split={"*.qkv.weight": 3}, adjust_lr_fn="match_rms_adamw", **options
        )  # fmt: skip


# The first of each rule tunes its learning rate. Runs are made in this order, seed by seed.
CONTESTANTS = {
    "Muon, float32": Contestant("Muon", "float32"),
    "Muon, 8bit": Contestant("Muon", "8bit"),
    "AdamW, float32": Contestant("AdamW", "float32"),
    "AdamW, 8bit": Contestant("AdamW", "8bit"),
    "Muon, muon4": Contestant("Muon", "muon4"),
    "Muon, 4bit": Contestant("Muon", "4bit"),
}
LAST = ("Muon, muon4", "Muon, 4bit")  # after all seeds of the others


@dataclass(frozen=True)
class Run:
    name: str
    lr: float
    seed: int
    steps: int

    def key(self) -> dict[str, Any]:
        return {"run": self.name, "lr": self.lr, "seed": self.seed, "steps": self.steps}


def described(name: str) -> dict[str, Any]:
    """The state format of a contestant, as a line of the results has it."""
    contestant = CONTESTANTS[name]
    return {"rule": contestant.rule, "state_format": contestant.state_format}


def settings(text: Any, compute: torch.dtype) -> dict[str, Any]:
    """What two lines must have in common to be compared."""
    return {
        **MODEL, "batch": BATCH, "warm_up": WARM_UP, "weight_decay": WEIGHT_DECAY, "held_out": list(HELD_OUT),
        "compute": str(compute).removeprefix("torch."), "text_crc32": zlib.crc32(text.train.numpy()),
    }  # fmt: skip


def read(path: pathlib.Path = RESULTS) -> list[dict[str, Any]]:
    """The finished runs. A last line without an end is of a writer that was killed, and does not count."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def found(lines: list[dict[str, Any]], run: Run) -> dict[str, Any] | None:
    return next((x for x in lines if all(x[k] == v for k, v in run.key().items())), None)


def tuning(rule: str) -> list[Run]:
    first = next(name for name, c in CONTESTANTS.items() if c.rule == rule)
    return [Run(first, lr, TUNING_SEED, TUNING_STEPS) for lr in RATES[rule]]


def best_rate(lines: list[dict[str, Any]], rule: str) -> float | None:
    """The rate with the least held-out loss of its rule's tuning, None unless all have run."""
    losses = {run.lr: found(lines, run) for run in tuning(rule)}
    if not all(losses.values()):
        return None
    return min(losses, key=lambda lr: losses[lr]["held_out_loss"])  # type: ignore[index]


def compared(lines: list[dict[str, Any]], name: str) -> list[Run]:
    """The runs of a contestant that are compared with others, one for each seed; none before its rule is tuned."""
    lr = best_rate(lines, CONTESTANTS[name].rule)
    return [] if lr is None else [Run(name, lr, seed, STEPS) for seed in SEEDS]


def missing(lines: list[dict[str, Any]]) -> Iterator[Run]:
    """What is to be run, in order. What follows the tuning is known when that is done."""
    runs = [run for rule in RATES for run in tuning(rule)]
    for late in (False, True):
        names = [name for name in CONTESTANTS if (name in LAST) == late]
        several = [compared(lines, name) for name in names]
        runs += [run for seed in zip(*several, strict=False) for run in seed]
    return (run for run in runs if found(lines, run) is None)


def train(run: Run, recipe: Any, text: Any, compute: torch.dtype) -> dict[str, Any]:
    """Trains the recipe's model and returns its losses: means of EVERY steps, and of held-out text at the end."""
    torch.manual_seed(run.seed)
    model = recipe.GPT(**MODEL, compute=compute)
    opt = CONTESTANTS[run.name].optimizer(model, run.lr, run.seed)
    losses = []
    begin = time.perf_counter()
    for step in range(run.steps):
        warm = min(1.0, (step + 1) / WARM_UP)
        rate = run.lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / run.steps)))
        for group in opt.param_groups:
            group["lr"] = rate
        loss = recipe.loss_of(model, text.batch(run.seed, step, BATCH, 0, 1))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - begin
    batches, rows = HELD_OUT
    with torch.no_grad():
        held_out = [
            recipe.loss_of(model, text.batch(1, i, rows, 0, 1, held_out=True)).item()
            for i in range(batches)
        ]
    means = [statistics.fmean(losses[i : i + EVERY]) for i in range(0, run.steps, EVERY)]
    return {
        "held_out_loss": round(statistics.fmean(held_out), 5),
        "losses": [round(mean, 4) for mean in means],
        "state_bytes_per_parameter": round(recipe.footprint(model, opt)["state"], 4),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(seconds, 1),
    }


def append(path: pathlib.Path, line: dict[str, Any]) -> None:
    """Adds a line, whole or not at all for readers; behind a line that a killed writer left without an end."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", action="store_true", help="show what is there and what is missing"
    )
    parser.add_argument("--page", action="store_true", help="write docs/quality.md, run nothing")
    args = parser.parse_args()
    recipe = load_recipe()
    text = recipe.Text([], MODEL["context"])
    compute = recipe.compute_dtype(torch.bfloat16, "cpu")
    here = settings(text, compute)

    def lines() -> list[dict[str, Any]]:
        return [line for line in read() if line["settings"] == here]

    if args.list:
        for line in lines():
            print({k: line[k] for k in ("run", "lr", "seed", "steps", "held_out_loss", "seconds")})
        for run in missing(lines()):
            print("missing:", run)
        return
    facts = machine.describe("cpu")
    about = {"cpu": facts["cpu"], "cores": facts["cores"], "threads": torch.get_num_threads(), "isa": facts["isa"], "python": facts["python"], "versions": {p: v for p, v in facts["versions"].items() if p in ("torch", "lowbit")}}  # fmt: skip
    while not args.page and (run := next(missing(lines()), None)):
        made = train(run, recipe, text, compute)
        date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        append(
            RESULTS,
            {
                **run.key(),
                **described(run.name),
                **made,
                "settings": here,
                "machine": about,
                "date": date,
            },
        )
        print(f"{run.name}, rate {run.lr:g}, seed {run.seed}, {run.steps} steps: {made['held_out_loss']:.4f}, {made['seconds']} s", flush=True)  # fmt: skip
    quality.write_page()


if __name__ == "__main__":
    main()
