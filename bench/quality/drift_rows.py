"""How far rows of an embedding drift that seldom get a gradient: a row whose token comes in every
10th, 100th or 1,000th step, or not for long (docs/quality.md).

    python -m bench.quality.drift_rows two minutes of a core; writes bench/results/drift_rows.json;
                                    then `python -m bench.quality --page`

AdamW without weight decay steps float32 rows, beside the same rule in float64. Element i's gradient
is s_i (0.3 sign_i + z) in the steps in which its row has one, and 0 in others: z is normal, and new
in each step; s_i is log-normal. Of each kind of row,

    moved   the root mean square of its weights' moves by that of float64's
    error   the root mean square of the difference from float64's moves by that of the moves
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

import lowbit
from bench import ROOT
from bench.measuring import machine
from bench.pages.page import bullets, filled, table

RESULTS = ROOT / "bench" / "results" / "drift_rows.json"
FORMATS = ("float32", "8bit", "4bit", "bfloat16_stochastic", "bfloat16")
STEPS, ROWS, MEAN, LR = 10_000, 8, 0.3, 1e-3
PERIODS = (1, 10, 100, 1000)
PAUSE = (200, 9800)  # a row of this kind has no gradient in these steps
KINDS = ("every step", "every 10th", "every 100th", "every 1,000th", "paused")
# A block of 8-bit state has 256 elements and one of 4-bit state 128; none crosses rows.
SHAPES = {
    "a row is one block": 128,
    "a row is many blocks": 2048,
    "rows of 64 share blocks": 64,  # not lowbit's layout, but that of a flat grid of blocks
}
BETAS = {"0.999": (0.9, 0.999), "0.95": (0.9, 0.95)}


def kinds_of_rows(shared: bool) -> torch.Tensor:
    """The index in KINDS of each row; where blocks are shared,
    a block has a row of every step, and rarer ones.
    """
    return torch.tensor([0, 3, 1, 2] * ROWS) if shared else torch.arange(len(KINDS)).repeat(ROWS)


def active(kinds: torch.Tensor, offset: torch.Tensor, step: int) -> torch.Tensor:
    """Which rows have a gradient in a step."""
    period = torch.tensor([*PERIODS, 1])[kinds]
    paused = (kinds == len(PERIODS)) & (PAUSE[0] <= step < PAUSE[1])
    return ((step + offset) % period == 0) & ~paused


def simulate(shape: str, betas: tuple[float, float], steps: int = STEPS) -> dict[str, Any]:
    """By format and kind of row, `moved` and `error`."""
    draw = torch.Generator().manual_seed(0)
    cols, shared = SHAPES[shape], "share" in shape
    kinds = kinds_of_rows(shared)
    offset = torch.randint(1000, kinds.shape, generator=draw)
    s = torch.randn((len(kinds), cols), generator=draw).exp() * 1e-3
    sign = torch.randn(s.shape, generator=draw).sign()
    as_stepped = (len(kinds) // 4, 4 * cols) if shared else tuple(s.shape)
    params = {name: torch.nn.Parameter(torch.zeros(as_stepped)) for name in FORMATS}
    opts = [
        lowbit.AdamW([p], lr=LR, betas=betas, weight_decay=0.0, state_format=f, min_numel=0)
        for f, p in params.items()
    ]
    w, m, v = (torch.zeros(s.shape, dtype=torch.float64) for _ in range(3))
    for step in range(steps):
        grad = s * (MEAN * sign + torch.randn(s.shape, generator=draw))
        grad *= active(kinds, offset, step)[:, None]
        for p in params.values():
            p.grad = grad.view(as_stepped)
        for opt in opts:
            opt.step()
        g = grad.double()
        m.lerp_(g, 1 - betas[0])
        v.lerp_(g * g, 1 - betas[1])
        root = (v / (1 - betas[1] ** (step + 1))).sqrt_().add_(1e-8)
        w.sub_(m / root, alpha=LR / (1 - betas[0] ** (step + 1)))
    found: dict[str, Any] = {}
    for name, p in params.items():
        got = p.detach().double().view(s.shape)
        found[name] = {}
        for number in kinds.unique().tolist():
            own, exact = got[kinds == number], w[kinds == number]
            found[name][KINDS[number]] = {
                "moved": rms(own) / rms(exact),
                "error": rms(own - exact) / rms(exact),
            }
    return found


def rms(t: torch.Tensor) -> float:
    return float(t.double().square().mean().sqrt())


def main() -> None:
    facts = machine.describe("cpu")
    result = {
        "rows": {
            b: {shape: simulate(shape, pair) for shape in SHAPES} for b, pair in BETAS.items()
        },
        "steps": STEPS,
        "machine": {k: facts[k] for k in ("cpu", "isa", "versions")},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print("\n\n".join(section(result)))


def section(result: dict[str, Any]) -> list[str]:
    """The part of docs/quality.md."""
    m = result["machine"]
    said = bullets(
        "**8-bit rows move as far as float64's**, however seldom a gradient comes. A long pause "
        "costs nothing: all values of a block decay alike, so codes stay and the scale shrinks.",
        "**Rows that share blocks fall behind if they are rare**, as in a flat grid with short "
        "rows.",
        "**4-bit rows move less than half as far**, rare and frequent ones alike.",
        "**Plain bfloat16 cannot decay** by a thousandth.",
    )
    method = filled(
        "A cell is how far the rows moved, as a share of float64's way, and in brackets the error, "
        f"after {result['steps']:,} steps of AdamW with betas 0.9 and 0.999. A paused row has no "
        f"gradient in steps {PAUSE[0]:,} to {PAUSE[1]:,}. `python -m bench.quality.drift_rows`; "
        f"{m['cpu']}, {m['isa']}, torch {m['versions']['torch']}, {result['date']}."
    )
    rows = [
        [
            f"`{name}`, {shape}",
            *(
                f"{kinds[k]['moved']:.2f} ({kinds[k]['error']:.2f})" if k in kinds else ""
                for k in KINDS
            ),
        ]
        for shape, found in result["rows"]["0.999"].items()
        for name, kinds in found.items()
        if name != "float32"
    ]
    return [said, table(["state", *KINDS], rows), method]


if __name__ == "__main__":
    main()
