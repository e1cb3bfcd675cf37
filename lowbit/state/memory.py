"""The memory of state: the device's own,
or for a GPU memory outside it that kernels update in place (docs/kernels/cuda-kernels.md).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit import ops
from lowbit.state.layout import Layout
from lowbit.state.slot import StateTensor

MEMORIES = ("device", "pinned", "managed")
LEAST = 1 << 16  # bytes; smaller tensors stay on the device, since a page of their own does not pay
_DEVICES = ("cuda",)  # with memory of their own; state on the CPU is in host memory anyway


def checked(memory: Any) -> str:
    """The memory's name. Raises ValueError unless it is in MEMORIES."""
    if memory not in MEMORIES:
        raise ValueError(
            f"state_memory should be 'device', 'pinned' or 'managed' but is: {memory!r}"
        )
    return memory


def is_outside(lay: Layout, entry: StateTensor, device: torch.device, memory: str) -> bool:
    """Whether a state tensor lies outside the device's own memory.

    Scales, means and numbers never do: they are small, and kernels read them one by one,
    which is slow over a bus.
    """
    size = math.prod(entry.local) * entry.dtype.itemsize
    outside = memory != "device" and device.type in _DEVICES
    return outside and entry.key in lay.large and size >= LEAST


def empty(lay: Layout, entry: StateTensor, device: torch.device, memory: str) -> Tensor:
    """An uninitialized tensor for one entry of a layout.

    Raises:
        RuntimeError: the memory cannot be allocated; the message has the reason and the bytes.
    """
    if is_outside(lay, entry, device, memory):
        return ops.allocate(entry.local, entry.dtype, device, memory)
    return torch.empty(entry.local, dtype=entry.dtype, device=device)
