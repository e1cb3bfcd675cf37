"""The state of a parameter before its first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit import sharding
from lowbit.state import memory
from lowbit.state.layout import Layout
from lowbit.state.quantize import fresh_slot


def fresh_state(
    p: Any, lay: Layout, initial: Callable[[str], float], state_memory: str
) -> dict[str, Tensor]:
    """All tensors of a layout, the step count, and the parameter's stream and shape.

    Args:
        p: a parameter, or a flat shard.
        lay: its layout.
        initial: the initial value of the state of a name.
        state_memory: one of `memory.MEMORIES`.
    """
    device = sharding.local(p).device
    counted_on = device if device.type == "cuda" else "cpu"
    state = {
        "step": torch.zeros((), dtype=torch.float32, device=counted_on),
        **lay.identity(lay.stream),
    }
    for entry in lay.entries():
        tensor = memory.empty(lay, entry, device, state_memory).zero_()
        state[entry.key] = sharding.like(lay.placed(p, entry), tensor, entry.shape, entry.follows)
    for slot in lay.slots:  # the code of zero is not 0 in every format
        value = initial(slot.name)
        if slot.coded or value:
            tensors = fresh_slot(value, lay, slot, device)
            for entry, tensor in zip(lay.of_slots[slot.name], tensors, strict=True):
                sharding.local(state[entry.key]).copy_(tensor)
    return state
