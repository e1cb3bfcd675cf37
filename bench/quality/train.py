"""One run of a study: the recipe's GPT trained by a contestant, with a checkpoint every few minutes
from which it continues to the same bits.
"""

from __future__ import annotations

import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

import lowbit
from bench.quality.studies import CONTESTANTS, STUDIES, Run, Study, Variant

SAVE_EVERY = 90.0  # seconds


class Clock:
    """Seconds of a run, with those before it was cut off; of the wall and of the processor, which
    other work on the machine hardly changes.
    """

    def __init__(self) -> None:
        self.before = {"seconds": 0.0, "processor_seconds": 0.0}
        self.start()

    def start(self) -> None:
        self.began = self.now()

    @staticmethod
    def now() -> dict[str, float]:
        return {"seconds": time.perf_counter(), "processor_seconds": time.process_time()}

    def read(self) -> dict[str, float]:
        return {k: self.before[k] + v - self.began[k] for k, v in self.now().items()}


def optimizer(
    contestant: Variant, study: Study, model: torch.nn.Module, run: Run
) -> torch.optim.Optimizer:
    options: dict[str, Any] = {
        "lr": run.lr,
        "weight_decay": study.weight_decay,
        **contestant.options,
    }
    if contestant.make == "torch":
        return torch.optim.AdamW(model.named_parameters(), betas=study.betas, fused=True, **options)
    options |= {
        "seed": run.seed,
        "state_format": contestant.state,
        "param_format": contestant.weights or "auto",
    }
    # Of these small vocabularies; bench/quality/embeddings.py asks what they may keep.
    float32: dict[str, Any] = {"embeddings": "float32", "heads": "float32"}
    if contestant.make == "MuonWithAdamW":
        groups, split = lowbit.muon_param_groups(model, **float32), {"*.qkv.weight": 3}
        return lowbit.MuonWithAdamW(groups, split=split, adjust_lr_fn="match_rms_adamw", **options)
    if contestant.make != "Adafactor":
        options["betas"] = study.betas
    return getattr(lowbit, contestant.make)(lowbit.param_groups(model, **float32), **options)


def converted(
    old: torch.optim.Optimizer, model: torch.nn.Module, study: Study, run: Run
) -> torch.optim.Optimizer:
    """The optimizer that continues in the middle of a run: with the old one's state dict, or a file
    of it that lowbit-ckpt has converted.
    """
    half = CONTESTANTS[run.name].half
    assert half is not None
    name, by_tool = half
    new = optimizer(CONTESTANTS[name], study, model, run)
    if not by_tool:
        new.load_state_dict(old.state_dict())
        return new
    with tempfile.TemporaryDirectory() as folder:
        source, target = (str(pathlib.Path(folder) / f"{n}.pt") for n in ("float32", "8bit"))
        torch.save({"model": model.state_dict(), "optimizer": old.state_dict()}, source)
        beside = pathlib.Path(sys.executable).parent / "lowbit-ckpt"
        tool = str(beside) if beside.exists() else "lowbit-ckpt"
        options = ["--to", "lowbit", "--state-format", CONTESTANTS[name].state, "--quiet"]
        subprocess.run([tool, "convert", source, target, *options], check=True)
        lowbit.load_optimizer(new, target, model=model)
    return new


def rate(study: Study, run: Run, step: int) -> float:
    warm = min(1.0, (step + 1) / study.warm_up)
    return run.lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / run.steps)))


class Progress:
    """A file from which a run that was cut off continues."""

    def __init__(self, folder: pathlib.Path | None, run: Run, settings: dict[str, Any]) -> None:
        name = "-".join(str(x) for x in run.key().values())
        self.path = (
            folder / ("".join(c if c.isalnum() or c in "-." else "_" for c in name) + ".pt")
            if folder
            else None
        )
        self.settings, self.saved = settings, time.perf_counter()

    def load(self) -> dict[str, Any] | None:
        if self.path is None or not self.path.exists():
            return None
        found = torch.load(self.path, weights_only=True)
        return found if found["settings"] == self.settings else None

    def save(self, values: dict[str, Any], always: bool = False) -> None:
        if self.path is None or not (always or time.perf_counter() - self.saved > SAVE_EVERY):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        torch.save({**values, "settings": self.settings}, part)
        os.replace(part, self.path)
        self.saved = time.perf_counter()

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def train(
    run: Run,
    recipe: Any,
    text: Any,
    compute: torch.dtype,
    progress: Progress,
    study: Study | None = None,
    stop: int | None = None,
) -> dict[str, Any]:
    """Trains the recipe's model and returns its losses: means of `every` steps,
    and of held-out text at the end.

    Args:
        stop: ends before this step as if the process were killed after a save, for tests.
    """
    study = study or STUDIES[run.study]
    contestant = CONTESTANTS[run.name]
    half = run.steps // 2 if contestant.half else None
    torch.manual_seed(run.seed)
    model = first_weights(recipe.GPT(**study.model, compute=compute), contestant)
    begin, losses, clock = 0, [], Clock()
    found = progress.load()
    now = contestant
    if found and half is not None and contestant.half and found["step"] > half:
        now = CONTESTANTS[contestant.half[0]]
    opt = optimizer(now, study, model, run)
    if found:
        model.load_state_dict(found["model"])
        opt.load_state_dict(found["optimizer"])
        begin, losses, clock.before = found["step"], found["losses"], found["clock"]
    clock.start()
    diverged = None
    for step in range(begin, run.steps):
        if step == stop:
            progress.save(kept(model, opt, step, losses, clock), always=True)
            raise KeyboardInterrupt
        if step == half:
            opt = converted(opt, model, study, run)
        for group in opt.param_groups:
            group["lr"] = rate(study, run, step)
        loss = recipe.loss_of(model, text.batch(run.seed, step, study.batch, 0, 1))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            diverged = step
            break
        if step % 10 == 9:
            progress.save(kept(model, opt, step + 1, losses, clock))
    took = {k: round(v, 1) for k, v in clock.read().items()}
    means = [
        statistics.fmean(losses[i : i + study.every]) for i in range(0, len(losses), study.every)
    ]
    made = {
        "held_out_loss": None
        if diverged is not None
        else round(held_out(model, recipe, text, study), 5),
        "losses": [round(mean, 4) for mean in means if math.isfinite(mean)],
        "bytes_per_parameter": {k: round(v, 4) for k, v in recipe.footprint(model, opt).items()},
        "parameters": sum(p.numel() for p in model.parameters()),
        **took,
    }
    return made if diverged is None else {**made, "diverged": diverged}


def first_weights(model: torch.nn.Module, contestant: Variant) -> torch.nn.Module:
    """The model with its first weights as the contestant has them."""
    if contestant.nudged:
        model.to(torch.bfloat16).to(torch.float32)
    if contestant.weights is not None:
        model.to(torch.bfloat16)
    return model


def kept(
    model: torch.nn.Module, opt: torch.optim.Optimizer, step: int, losses: list[float], clock: Clock
) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": opt.state_dict(),
        "step": step,
        "losses": losses,
        "clock": clock.read(),
    }


def held_out(model: torch.nn.Module, recipe: Any, text: Any, study: Study) -> float:
    batches, rows = study.held_out
    with torch.no_grad():
        return statistics.fmean(
            recipe.loss_of(model, text.batch(1, i, rows, 0, 1, held_out=True)).item()
            for i in range(batches)
        )
