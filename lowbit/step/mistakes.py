"""What a step says about parameters that it cannot train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowbit import sharding
from lowbit.config.hints import warn_once
from lowbit.state.layout import Layout


def warn_idle(params: Sequence[Any], warned: set[str]) -> None:
    """Warns, once for each `warned`, that no parameter has a gradient.

    Silent if there is nothing to train: every parameter is frozen,
    or none has an element on this rank.
    """
    waiting = [p for p in params if p.requires_grad]
    if any(sharding.local(p).numel() for p in waiting):
        warn_once(
            warned,
            "no gradient",
            f"step() found no gradient on any of the {len(waiting)} parameters, so this step "
            "trains nothing. If backward() ran, the model has other parameters than the "
            "optimizer: fully_shard, parallelize_module, to_empty and "
            "load_state_dict(assign=True) replace them; call these first, then build the "
            "optimizer from the model. Otherwise call backward() before "
            "step(), and zero_grad() after it",
        )


def changed(what: str, value: Tensor, lay: Layout) -> RuntimeError:
    """The error for a parameter whose dtype or shape changed after its state was laid out."""
    here, before = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, lay.dtype))
    return RuntimeError(
        f"parameter {what} is {here} {tuple(value.shape)} now, but its state was laid out for "
        f"{before} {lay.param_part.local}: convert the model first, then build the optimizer, and "
        "load this one's state dict into that"
    )


def no_values(what: str) -> RuntimeError:
    """The error for a parameter on the meta device that has a gradient."""
    return RuntimeError(
        f"parameter {what} is on the meta device and has no values to step: give the model values "
        "first (model.to_empty(device=...), then its initialization or a checkpoint), and build "
        "the optimizer from what it has then"
    )
