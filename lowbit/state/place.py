"""Where parameters lie: devices that operators support, and memory that a step can write."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda", "meta")  # where operators run, and where weights have no values yet
EXPANDED = (
    "of shape {} is an expanded view, in which several elements share memory; step the tensor that "
    "it was expanded from"
)


def check_place(p: Tensor, value: Tensor, what: str) -> None:
    """Raises ValueError if no step could write a parameter that is to be trained.

    Args:
        value: its local part.
    """
    if not p.requires_grad:
        return
    if value.device.type not in DEVICES:
        raise ValueError(
            f"{what} is on {value.device}, which lowbit does not support: move the model to "
            "the CPU or to a CUDA GPU before the optimizer is built"
        )
    if overlaps(value):
        raise ValueError(f"{what} {EXPANDED.format(tuple(value.shape))}")


def overlaps(value: Tensor) -> bool:
    """Whether elements share memory, as in an expanded view."""
    if value.layout != torch.strided:
        return False
    return any(n > 1 and step == 0 for n, step in zip(value.shape, value.stride(), strict=True))
