"""Warnings about training that would suffer: each once for an optimizer, and never in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit import ops
from lowbit.config.hints import warn_once
from lowbit.optim.report import Stats, percent
from lowbit.state.stateful import StatefulOptimizer

if TYPE_CHECKING:
    from lowbit.optim.stepping import SteppingOptimizer

# Rules whose updates are about as large as the learning rate, or smaller.
UPDATES_OF_LR = frozenset(
    ("adam", "adamw", "adam_amsgrad", "adamw_amsgrad", "adam_factored", "adamw_factored", "adagrad", "lion")
)  # fmt: skip
LOST = 0.1  # warn if parameters rounded to nearest lose this share of their updates,
OUT_OF_REACH = 0.5  # or if updates as large as the learning rate cannot change this share of them


def loses_updates(param_format: str) -> bool:
    """Whether a parameter format rounds 16-bit weights to nearest and keeps nothing of what that loses."""
    info = ops.param_format(param_format)
    return info["dtype"] != "float32" and not info["compensation"] and not info["random"]


def unreachable(lr: float, dtype: torch.dtype) -> float:
    """The magnitude above which a weight, rounded to nearest, cannot be changed by an update as large as `lr`.

    Half the spacing of the values around a weight w is more than |w| * eps / 4.
    """
    return 4 * abs(lr) / torch.finfo(dtype).eps


def warn_of_nearest(opt: StatefulOptimizer) -> None:
    """Warns, after state was created, of 16-bit weights that are rounded to nearest without compensation."""
    if "nearest" in opt._warned:
        return
    found = [
        (group, name, index, lay)
        for (group, p, lay), (_, _, name, index) in zip(
            opt._laid_out(), opt._members(), strict=True
        )
        if loses_updates(lay.param_format) and getattr(p, "requires_grad", True)
    ]
    if not found:
        return
    group, name, index, lay = found[0]
    dtype, lr, above = str(lay.dtype).removeprefix("torch."), group["lr"], ""
    if lay.rule in UPDATES_OF_LR and not isinstance(lr, Tensor) and lr:
        above = f"; with lr={lr:g} that is most updates of weights above {unreachable(lr, lay.dtype):.3g}"
    warn_once(
        opt._warned,
        "nearest",
        f"{len(found)} {dtype} parameters, such as {index if name is None else repr(name)}, are rounded to nearest without compensation: an update "
        f"of less than half the distance to the next {dtype} value is lost{above}. Omit param_format to get stochastic rounding, or use "
        f"'{dtype}_kahan' or '{dtype}_split16'",
    )


def warn_of_loss(opt: SteppingOptimizer, stats: Stats) -> None:
    """Warns of updates that `stats()` found to be lost to rounding to nearest."""
    found = {
        name: entry
        for name, entry in stats["parameters"].items()
        if loses_updates(entry["param_format"])
    }
    if "lost" in opt._warned or not found:
        return
    dtype = next(iter(found.values()))["param_format"].partition("_")[0]
    advice = f"stochastic rounding (param_format='auto') and compensation ('{dtype}_kahan') do not"
    updates = sum(entry.get("updates", 0.0) * entry["values"] for entry in found.values())
    lost = sum(entry.get("lost", 0.0) * entry["values"] for entry in found.values())
    if updates and lost / updates >= LOST:
        worst = max(found, key=lambda name: found[name].get("lost_updates", 0.0))
        text = (
            f"rounding to nearest loses {percent(lost / updates)} of the updates of {len(found)} parameters, and of {worst!r} "
            f"{percent(found[worst]['lost_updates'])}; {advice}"
        )
    elif stats["total"].get("out_of_reach", 0.0) >= OUT_OF_REACH:
        text = (
            f"an update as large as the learning rate is lost to rounding to nearest in {percent(stats['total']['out_of_reach'])} of the weights that "
            f"are rounded so; raise the learning rate, or change the format: {advice}"
        )
    else:
        return
    warn_once(opt._warned, "lost", text)
