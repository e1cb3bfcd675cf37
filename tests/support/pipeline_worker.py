"""What a rank does in test_pipeline.py: recipes/pipeline.py with any number of stages; what its stages have in the end."""

from __future__ import annotations

import hashlib
import pathlib
import sys

import torch
from paths import RECIPES

import lowbit

sys.path.insert(0, str(RECIPES))
import pipeline
import toy

STEPS, DEPTH = 3, 4


def built(schedule: str, stages: int, seed: int = 0):
    torch.manual_seed(seed)
    model = toy.make_model(depth=DEPTH)
    if seed:
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1)
    part, runs = pipeline.build(model, schedule, stages, "cpu")
    return part, runs, lowbit.AdamW(pipeline.groups_of(part), lr=1e-2, min_numel=64)


def digests(part, opt) -> dict[str, str]:
    """Of the weights and state of each parameter here."""
    found = {}
    for name, p in part.named_parameters():
        h = hashlib.sha256()
        for key, value in sorted({"": p.detach(), **opt.state[p]}.items()):
            h.update(key.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())  # fmt: skip
        found[name] = h.hexdigest()
    return found


def trained(schedule: str, stages: int, folder: str) -> tuple[dict[str, str], dict[str, str]]:
    """What is here after some steps, which is saved, and after as many more."""
    part, runs, opt = built(schedule, stages)
    saved = {}
    for step in range(2 * STEPS):
        if step == STEPS:
            pipeline.save(part, opt, step, pathlib.Path(folder))
            saved = digests(part, opt)
        advance(part, runs, opt, step)
    return saved, digests(part, opt)


def resumed(schedule: str, stages: int, folder: str) -> tuple[dict[str, str], dict[str, str]]:
    """What is here after loading, and after some steps more."""
    part, runs, opt = built(schedule, stages, seed=1)
    begin = pipeline.load(part, opt, pathlib.Path(folder))
    assert begin == STEPS
    loaded = digests(part, opt)
    for step in range(begin, 2 * STEPS):
        advance(part, runs, opt, step)
    return loaded, digests(part, opt)


def advance(part, runs, opt, step: int) -> None:
    loss = pipeline.train_step(runs, part, toy.batch(step))
    assert (loss is not None) == hasattr(part, "head")
    opt.step()
    opt.zero_grad()
