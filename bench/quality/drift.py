"""How far state drifts from float32's under the same stationary gradients: every format and preset,
1,000 to 100,000 steps.

    python -m bench.quality.drift                 # what is missing, and docs/loss/drift.md; 15
                                                    minutes on an idle core
    python -m bench.quality.drift --quick         # 100,000 steps of presets' formats only: 4
                                                    minutes
    python -m bench.quality.drift --only exp_avg  # one state; --again repeats what is saved
    python -m bench.quality.drift --page          # the page alone

The state of one tensor goes through the optimizers' own CPU step with lr = 0, so that nothing else
changes: 512 elements, or 256 rows of 256 where scales are of rows and columns. Element i's gradient
is s_i (MEAN sign_i + z): z is normal, and new in each step; s_i is log-normal, so that a block's
magnitudes differ as layers' do. All formats see the same gradients. After each of STEPS, averaged
over the last tenth of the steps,

    bias   of a mean: sum(sign q / s) / sum(sign f / s) - 1; of a second moment: sum(sqrt(q) / s) /
           sum(sqrt(f) / s) - 1
    error  of a mean: the root mean square of (q - f) / s by that of f / s
    signs  of Lion: the share of updates whose sign is another

where q is the stored state and f float32's.
Results are kept in bench/results/drift.json after each of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import lowbit
from bench import ROOT
from bench.quality import drift_page
from bench.quality.drift_page import STEPS, label
from lowbit.state.quantize import dequantize_slot

RESULTS = ROOT / "bench" / "results" / "drift.json"
SHAPE = (2, 256)
# where scales are of rows and columns: those of two rows fit each element too well
SQUARE = (256, 256)
MEAN, SPREAD = 0.3, 1.0  # of gradients, in their standard deviations; and of log s
WINDOW = 20  # snapshots in the last tenth before each of STEPS
LION = (0.9, 0.99)


class State(NamedTuple):
    """What is simulated: a state of an optimizer,
    and how far the magnitudes in its blocks differ.
    """

    slot: str
    make: Callable[..., Any]
    signed: bool = True
    spread: float = SPREAD  # of log s


def adamw(params: Any, **options: Any) -> Any:
    return lowbit.AdamW(params, lr=0.0, betas=(0.9, 0.999), **options)


STATES = {
    "exp_avg_sq_alike": State("exp_avg_sq", adamw, False, 0.0),
    "exp_avg_sq": State("exp_avg_sq", adamw, False),
    "exp_avg_slow": State(
        "exp_avg_slow", functools.partial(lowbit.AdEMAMix, lr=0.0, betas=(0.9, 0.999, 0.9999))
    ),
    "lion": State("exp_avg", functools.partial(lowbit.Lion, lr=0.0, betas=LION)),
    "exp_avg": State("exp_avg", adamw),
}


def specs(signed: bool) -> dict[str, dict[str, Any]]:
    """Every `lowbit.scaled(...)` of a state with or without negative values,
    by the name that the results have for it.
    """
    made = {}
    catalog = lowbit.catalog()
    for entry in catalog["state"]:
        name = entry["name"]
        if name == "float32" or (entry["scaled"] and entry["signed"] != signed):
            continue
        for rounding in ("nearest", "stochastic"):
            made[f"{name} {rounding}"] = lowbit.scaled(name, rounding=rounding)
    for preset in catalog["presets"]:  # other scales
        spec = preset["signed" if signed else "unsigned"]
        if spec.get("scale") not in (None, "none", "block"):
            made[label(spec)] = lowbit.scaled(**spec)
    return made


def of_presets(signed: bool) -> list[str]:
    """The formats that presets have for such a state, by their names in the results."""
    said = [preset["signed" if signed else "unsigned"] for preset in lowbit.catalog()["presets"]]
    return [name for name in specs(signed) if name in {label(spec) for spec in said}]


def shape_of(name: str) -> tuple[int, int]:
    """Of the tensor on which a format is simulated."""
    return SHAPE if name.count(" ") == 1 else SQUARE


class Beside:
    """A state in several formats, each of a parameter of its own. All parameters have the same
    gradient; float32's is the first.
    """

    def __init__(self, state: str, formats: Sequence[str]) -> None:
        self.slot, make, signed, _ = STATES[state]
        every = {"float32": lowbit.scaled("float32"), **specs(signed)}
        chosen = {name: every[name] for name in ("float32", *formats)}
        (self.shape,) = {shape_of(name) for name in formats}
        # A format's random bits come from its name.
        named = [(name, torch.nn.Parameter(torch.zeros(self.shape))) for name in chosen]
        overrides = {name: {"state_format": {self.slot: spec}} for name, spec in chosen.items()}
        with warnings.catch_warnings():
            # Formats that lose a mean have a warning; what they lose is measured here.
            warnings.simplefilter("ignore")
            self.opt = make(named, min_numel=0, overrides=overrides)
        self.grad = torch.empty(self.shape)
        for _, p in named:
            p.grad = self.grad
        self.layouts = [(p, self.opt.layouts[p]) for _, p in named]

    def values(self) -> torch.Tensor:
        """[formats, rows, columns], in double."""
        read = []
        for p, lay in self.layouts:
            slot = next(x for x in lay.slots if x.name == self.slot)
            kept = [self.opt.state[p][e.key] for e in lay.of_slots[self.slot]]
            read.append(dequantize_slot(kept, lay, slot))
        return torch.stack(read).double()


def numbers(
    state: str, q: torch.Tensor, s: torch.Tensor, sign: torch.Tensor, grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Bias, error and signs of each format's values `q`, of which float32's are the first."""
    f = q[0]
    if STATES[state].slot == "exp_avg_sq":
        root = q.clamp_min(0).sqrt() / s
        return {"bias": root.sum((1, 2)) / root[0].sum() - 1}
    along = (sign * q / s).sum((1, 2))
    error = (((q - f) / s) ** 2).sum((1, 2)) / ((f / s) ** 2).sum()
    made = {"bias": along / along[0] - 1, "error": error}
    if state == "lion":
        update = torch.sign(LION[0] * q + (1 - LION[0]) * grad)
        made["signs"] = (update != update[0]).double().mean((1, 2))
    return made


def simulate(
    state: str, steps: tuple[int, ...], formats: Sequence[str], seed: int = 0
) -> Iterator[tuple[int, dict[str, dict[str, float]]]]:
    """The numbers of formats of a state with tensors of one shape after each of `steps`. They do
    not depend on which others there are.
    """
    beside = Beside(state, formats)
    draw = torch.Generator().manual_seed(seed)
    s = (STATES[state].spread * torch.randn(beside.shape, generator=draw)).exp() * 1e-3
    sign = torch.randn(beside.shape, generator=draw).sign()
    looks = {n - n // 10 * k // WINDOW for n in steps for k in range(WINDOW)}
    kept: dict[str, list[torch.Tensor]] = {}
    for step in range(1, max(steps) + 1):
        torch.randn(beside.shape, generator=draw, out=beside.grad)
        beside.grad.add_(sign, alpha=MEAN).mul_(s)
        before = beside.values() if state == "lion" and step in looks else None
        beside.opt.step()
        if step in looks:
            now = beside.values() if before is None else before
            for what, each in numbers(state, now, s, sign, beside.grad.double()).items():
                kept.setdefault(what, []).append(each)
        if step in steps:
            mean = {what: torch.stack(each[-WINDOW:]).mean(0) for what, each in kept.items()}
            if "error" in mean:
                mean["error"] = mean["error"].sqrt()
            yield (
                step,
                {
                    name: {what: float(f"{float(each[i]):.4g}") for what, each in mean.items()}
                    for i, name in enumerate(formats, 1)
                },
            )


def missing(
    results: dict[str, Any], state: str, quick: bool
) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Formats and steps that results lack: first presets' formats,
    then the others up to 10,000 steps, then to the end.
    """
    signed, done = STATES[state].signed, results.get(state, {})
    large = [name for name in specs(signed) if shape_of(name) == SQUARE]
    some = [name for name in of_presets(signed) if name not in large]
    rest = [name for name in specs(signed) if name not in (*some, *large)]
    passes = [(some, STEPS), (rest, STEPS[:-1]), (large, STEPS[:-1])]
    if not quick:
        passes += [(rest, STEPS[-1:]), (large, STEPS[-1:])]
    for formats, steps in passes:
        lacks = {n: [name for name in formats if name not in done.get(str(n), {})] for n in steps}
        lacking = [name for name in formats if any(name in each for each in lacks.values())]
        if lacking:
            yield lacking, tuple(n for n in steps if lacks[n])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(STATES), default=list(STATES))
    parser.add_argument(
        "--quick", action="store_true", help="to the end with presets' formats only"
    )
    parser.add_argument("--again", action="store_true", help="repeat what is saved")
    parser.add_argument("--page", action="store_true", help="write the page from what is saved")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known = {} if args.again else results
    work = [
        (i, state, formats, steps)
        for state in (() if args.page else args.only)
        for i, (formats, steps) in enumerate(missing(known, state, args.quick))
    ]
    for _, state, formats, steps in sorted(work, key=lambda entry: entry[0]):
        begun = time.monotonic()
        for step, numbers in simulate(state, steps, formats):
            results.setdefault(state, {}).setdefault(str(step), {}).update(numbers)
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(
                f"{state}, {len(formats)} formats, {step:,} steps: "
                f"{time.monotonic() - begun:.0f} s",
                flush=True,
            )
    (ROOT / "docs" / "loss" / "drift.md").write_text(drift_page.page(results))


if __name__ == "__main__":
    main()
