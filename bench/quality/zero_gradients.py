"""Zero gradients: whether weights that get none stand still, in blocks whose other weights are
trained (docs/quality.md).

    python -m bench.quality.zero_gradients  every preset, a minute; writes
                                            bench/results/zero_gradients.json; then `python -m
                                            bench.quality --page`

AdamW without weight decay steps one float32 tensor of 16 rows of 1,024. Of four neighbours one
never has a gradient, one has gradients for the first 200 steps, and two always do. Gradients are
normal, times a magnitude of each element's own, whose logarithm has a deviation of 1.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

import lowbit
from bench import ROOT
from bench.measuring import machine
from bench.pages.page import filled, table

RESULTS = ROOT / "bench" / "results" / "zero_gradients.json"
SHAPE, STOP, STEPS, LR = (16, 1024), 200, 2000, 1e-3


def moves(state_format: str, steps: int = STEPS, stop: int = STOP) -> dict[str, torch.Tensor]:
    """How far each weight has moved: those without gradients,
    those without since `stop` from there on, and the others.
    """
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(SHAPE))
    size = torch.randn(SHAPE, generator=generator).exp() * 1e-3
    size[:, 0::4] = 0
    opt = lowbit.AdamW([p], lr=LR, weight_decay=0.0, state_format=state_format)
    there = torch.zeros(SHAPE)
    for step in range(steps):
        if step == stop:
            size[:, 1::4] = 0
            there = p.detach().clone()
        p.grad = torch.randn(SHAPE, generator=generator) * size
        opt.step()
    p = p.detach()
    return {"never": p[:, 0::4], "stopped": (p - there)[:, 1::4], "trained": p[:, 2::4]}


def rms(t: torch.Tensor) -> float:
    return float(t.double().square().mean().sqrt())


def measure(
    steps: int = STEPS, stop: int = STOP, presets: list[str] | None = None
) -> dict[str, dict[str, float]]:
    """By preset, in learning rates: what weights moved that never had a gradient, and how far those
    that had one moved after it, apart from float32's.
    """
    exact, found = moves("float32", steps, stop), {}
    for preset in presets or [p["name"] for p in lowbit.catalog()["presets"]]:
        made = moves(preset, steps, stop)
        found[preset] = {
            "never": rms(made["never"]) / LR,
            "stopped": rms(made["stopped"] - exact["stopped"]) / LR,
            "float32 stopped": rms(exact["stopped"]) / LR,
            "trained": rms(made["trained"]) / LR,
        }
    return found


def section(result: dict[str, Any]) -> list[str]:
    """The part of docs/quality.md."""
    found = result["presets"]
    rows = [
        [f"`{name}`", f"{x['never']:.3f}", f"{x['stopped']:.3f}", f"{x['trained']:.1f}"]
        for name, x in found.items()
    ]
    moving = [f"`{name}`" for name, x in found.items() if x["never"] > 0]
    stands = (
        "Weights that never had a gradient stand still with every preset"
        if not moving
        else (
            f"Weights that never had a gradient move with {', '.join(moving)}, and stand still "
            "with the other presets"
        )
    )
    m = result["machine"]
    further = next(iter(found.values()))["float32 stopped"]
    text = filled(
        f"{stands}. The table has how far weights moved in {result['steps']:,} steps, as root mean "
        "squares in learning rates. Where gradients stop after step "
        f"{result['stop']}, weights still move by {further:.2f} with float32 state, as the average "
        "of gradients runs out; the second column is how far others end from there. `python -m "
        f"bench.quality.zero_gradients` has the details. {m['cpu']}, {m['isa']}, torch "
        f"{m['versions']['torch']}, {result['date']}."
    )
    head = [
        "preset",
        "never a gradient",
        f"none after step {result['stop']}, from float32's",
        "always one",
    ]
    return [text, table(head, rows)]


def main() -> None:
    facts = machine.describe("cpu")
    result = {
        "presets": measure(),
        "steps": STEPS,
        "stop": STOP,
        "machine": {k: facts[k] for k in ("cpu", "isa", "versions")},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print("\n\n".join(section(result)))


if __name__ == "__main__":
    main()
