"""Warnings about training that would suffer: each once for an optimizer, and never in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit import ops
from lowbit.config.hints import warn_once
from lowbit.config.overrides import effective
from lowbit.config.presets import is_named, known
from lowbit.optim.report import Stats, percent
from lowbit.state.slot import Slot
from lowbit.state.stateful import StatefulOptimizer

if TYPE_CHECKING:
    from lowbit.optim.stepping import SteppingOptimizer

# Rules whose updates are about as large as the learning rate, or smaller.
UPDATES_OF_LR = frozenset(
    (
        "adam",
        "adamw",
        "adam_amsgrad",
        "adamw_amsgrad",
        "adam_factored",
        "adamw_factored",
        "adagrad",
        "lion",
    )
)
SLOW = 0.995  # a mean with this decay or more is lost in codes
LOST = 0.1  # warn if parameters rounded to nearest lose this share of their updates,
OUT_OF_REACH = 0.5  # or if updates as large as the learning rate cannot change this share of them


def loses_updates(param_format: str) -> bool:
    """Whether a parameter format rounds 16-bit weights to nearest and keeps nothing of what that
    loses.
    """
    info = ops.param_format(param_format)
    return info["dtype"] != "float32" and not info["compensation"] and not info["random"]


def unreachable(lr: float, dtype: torch.dtype) -> float:
    """The magnitude above which a weight, rounded to nearest,
    cannot be changed by an update as large as `lr`.

    Half the spacing of the values around a weight w is more than |w| * eps / 4.
    """
    return 4 * abs(lr) / torch.finfo(dtype).eps


def warn_of_nearest(opt: StatefulOptimizer) -> None:
    """Warns, after state was created,
    of 16-bit weights that are rounded to nearest without compensation.
    """
    if "nearest" in opt.warned:
        return
    found = [
        (group, name, index, lay)
        for (group, p, lay), (_, _, name, index) in zip(opt.laid_out(), opt.members(), strict=True)
        if loses_updates(lay.param_format) and getattr(p, "requires_grad", True)
    ]
    if not found:
        return
    group, name, index, lay = found[0]
    dtype, lr, above = str(lay.dtype).removeprefix("torch."), group["lr"], ""
    if lay.rule in UPDATES_OF_LR and not isinstance(lr, Tensor) and lr:
        above = (
            f"; with lr={lr:g} that is most updates of weights above "
            f"{unreachable(lr, lay.dtype):.3g}"
        )
    warn_once(
        opt.warned,
        "nearest",
        f"{len(found)} {dtype} parameters, such as {index if name is None else repr(name)}, are "
        "rounded to nearest without compensation: an update of less than half the distance to "
        f"the next {dtype} value is lost{above}. Omit param_format to get stochastic rounding, or "
        f"use '{dtype}_kahan' or '{dtype}_split16'",
    )


def warn_of_signed_maps(opt: StatefulOptimizer) -> None:
    """Warns, after state was created, of a state without negative values in a format with signs
    that `state_format` names for all states: half of its codes are never used.
    """
    if "signed" in opt.warned:
        return
    for number, p, name, index in opt.members():
        lay, options = opt.layouts.get(p), effective(opt.param_groups[number], name, index)
        if lay is None:  # on the meta device
            continue
        never = {slot["name"] for slot in ops.rule(lay.rule)["slots"] if not slot["signed"]}
        for slot in lay.slots:
            twin = f"{slot.format}_unsigned"
            chosen = options["state_format"]
            if slot.name not in never or twin not in ops.names("state"):
                continue
            if is_named(chosen, slot.name):  # a choice, as torchao's and bitsandbytes' tables are
                continue
            preset = next(
                (
                    f", as the preset {entry['name']!r} does"
                    for entry in known().values()
                    if entry["signed"]["format"] == slot.format
                    and entry["unsigned"]["format"] == twin
                ),
                "",
            )
            others = {kept.name: kept.format for kept in lay.slots if kept.name not in never}
            warn_once(
                opt.warned,
                "signed",
                f"{slot.name} is never negative and is kept in {slot.format}, which spends one "
                f"bit of each code on signs. To use it, say "
                f"state_format={others | {slot.name: twin}}{preset}",
            )
            return


def loses_slow_mean(slot: Slot, beta: float) -> bool:
    """Whether a mean with this decay is lost in a slot: whether codes, or bfloat16 to the nearest,
    swallow its steps.

    A step moves the mean by 1 - beta of its distance from the gradient.
    docs/loss/drift.md has the errors.
    """
    if slot.format == "float32" or (not slot.coded and slot.stochastic):
        return False
    return beta >= SLOW


def warn_of_slow_means(opt: StatefulOptimizer) -> None:
    """Warns, after state was created, of a mean over thousands of steps in a format that
    `state_format` names for it.
    """
    if "slow" in opt.warned:
        return
    for group, p, lay in opt.laid_out():
        slow = {slot["name"] for slot in ops.rule(lay.rule)["slots"] if slot["slow"]}
        if not slow or not getattr(p, "requires_grad", True):
            continue
        for slot in lay.slots:
            beta = float(group["betas"][2])
            if slot.name in slow and loses_slow_mean(slot, beta):
                warn_once(
                    opt.warned,
                    "slow",
                    f"{slot.name} in {slot.format} loses a mean with a decay of {beta:g}: a step "
                    f"moves it by {1 - beta:.2g} of the gradient, which is less than the format "
                    "tells apart. Leave it out of state_format to keep it in "
                    f"{ops.policy('slow_mean')}, or name 'float32'",
                )
                return


def warn_of_loss(opt: SteppingOptimizer, stats: Stats) -> None:
    """Warns of updates that `stats()` found to be lost to rounding to nearest."""
    found = {
        name: entry
        for name, entry in stats["parameters"].items()
        if loses_updates(entry["param_format"])
    }
    if "lost" in opt.warned or not found:
        return
    dtype = next(iter(found.values()))["param_format"].partition("_")[0]
    advice = f"stochastic rounding (param_format='auto') and compensation ('{dtype}_kahan') do not"
    updates = sum(entry.get("updates", 0.0) * entry["values"] for entry in found.values())
    lost = sum(entry.get("lost", 0.0) * entry["values"] for entry in found.values())
    if updates and lost / updates >= LOST:
        worst = max(found, key=lambda name: found[name].get("lost_updates", 0.0))
        text = (
            f"rounding to nearest loses {percent(lost / updates)} of the updates of {len(found)} "
            f"parameters, and of {worst!r} {percent(found[worst]['lost_updates'])}; {advice}"
        )
    elif stats["total"].get("out_of_reach", 0.0) >= OUT_OF_REACH:
        text = (
            "an update as large as the learning rate is lost to rounding to nearest in "
            f"{percent(stats['total']['out_of_reach'])} of the weights that are rounded so; raise "
            f"the learning rate, or change the format: {advice}"
        )
    else:
        return
    warn_once(opt.warned, "lost", text)
