"""Whole training steps of the recipe's model (recipes/train_gpt.py): time, tokens per second and
peak memory. Each optimizer has a process of its own, and the processes take their steps in turn.

    python -m bench.speed.training NAME ...  the command of such a process
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from bench.measuring import clock
from bench.measuring.child import Child, answer, peak_rss, rss
from bench.measuring.recipe import load_recipe
from bench.measuring.settings import Settings
from bench.speed.step import Say

CONTEXT = 128
IN_BACKWARD = "lowbit 8-bit, step in backward"
# By name: the dtype of the weights, and the optimizer.
TRAINED: dict[str, tuple[torch.dtype, Any]] = {
    "no optimizer, float32": (torch.float32, None),
    "no optimizer, bf16": (torch.bfloat16, None),
    "torch fused, float32": (
        torch.float32,
        lambda lowbit, named: torch.optim.AdamW([p for _, p in named], fused=True),
    ),
    "torch fused, bf16 nearest": (
        torch.bfloat16,
        lambda lowbit, named: torch.optim.AdamW([p for _, p in named], fused=True),
    ),
    "lowbit 8-bit, bf16 stochastic": (torch.bfloat16, lambda lowbit, named: lowbit.AdamW(named)),
    "lowbit 4-bit, bf16 stochastic": (
        torch.bfloat16,
        lambda lowbit, named: lowbit.AdamW(named, state_format="4bit"),
    ),
    IN_BACKWARD: (torch.bfloat16, lambda lowbit, named: lowbit.AdamW(named)),
    "lowbit Adafactor, bf16 stochastic": (
        torch.bfloat16,
        lambda lowbit, named: lowbit.Adafactor(named),
    ),
}


def run(settings: Settings, say: Say) -> Iterator[dict]:
    width, depth, batch, steps = settings.model
    missing: dict[str, str] = {}
    numbers = [str(n) for n in (max(settings.threads), width, depth, batch)]
    children = {
        name: Child("bench.speed.training", name, settings.device, *numbers)
        for name in settings.trained
    }
    parameters = 0
    try:
        for name in settings.trained:
            say(f"training: {name}")
            try:
                parameters = children[name].hello()["parameters"]
            except RuntimeError as error:
                missing[name] = str(error)
                children.pop(name).close()
        turns = [
            (name, lambda child=child: child.ask("step")["seconds"])
            for name, child in children.items()
        ]
        times = clock.rounds(turns, steps, 1e9)
        memory = {name: child.ask("memory") for name, child in children.items()}
    finally:
        for child in children.values():
            child.close()
    reference = times.get("torch fused, float32")
    yield {
        "width": width,
        "depth": depth,
        "batch": batch,
        "context": CONTEXT,
        "threads": max(settings.threads),
        "missing": missing,
        "parameters": parameters,
        "rows": [
            {
                "name": name,
                "seconds": t,
                "ms_per_step": clock.median(t) * 1e3,
                "tokens_per_second": batch * CONTEXT / clock.median(t),
                "to_torch": clock.ratio(t, reference) if reference else None,
                **memory[name],
            }
            for name, t in times.items()
        ],
    }


def start(
    name: str, device: str, threads: int, width: int, depth: int, batch: int
) -> tuple[dict, dict]:
    """In the child: builds the model and its optimizer.
    Returns the greeting and the functions that answer requests.
    """
    import lowbit

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    recipe = load_recipe()
    dtype, make = TRAINED[name]
    torch.ones(1, device=device)  # creates the GPU's context, which is not memory of the model
    before = rss()
    model = recipe.GPT(width, depth, max(1, width // 64), CONTEXT).to(device, dtype)
    ids = torch.randint(256, (batch, CONTEXT + 1), generator=torch.Generator().manual_seed(1)).to(
        device
    )
    named = list(model.named_parameters())
    opt = make(lowbit, named) if make else None
    if name == IN_BACKWARD:
        lowbit.step_in_backward(model, opt)  # opt.step() does nothing from here on

    def step() -> None:
        recipe.loss_of(model, ids).backward()
        if opt is not None:
            opt.step()
        model.zero_grad()

    for _ in range(2):
        step()

    def memory() -> dict[str, int]:
        peak = (
            torch.cuda.max_memory_allocated() if device == "cuda" else max(0, peak_rss() - before)
        )
        return {"peak_bytes": peak}

    greeting = {"parameters": sum(p.numel() for _, p in named)}
    return greeting, {"step": lambda: {"seconds": clock.seconds(step, device)}, "memory": memory}


if __name__ == "__main__":
    given = sys.argv[1:]
    answer(lambda: start(given[0], given[1], *(int(n) for n in given[2:])))
