"""In which memory state lies: the device's own, or for a GPU's parameters memory outside of it that its kernels step in place (docs/cuda.md)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit import ops
from lowbit.layout import Entry, Layout

MEMORIES = ("device", "pinned", "managed")
LEAST = (
    1 << 16
)  # bytes; what is smaller is taken from the device, as a page of its own would not pay
_DEVICES = ("cuda",)  # that have memory of their own; what is on the CPU is in the host's already


def checked(memory: Any) -> str:
    """ValueError unless it is one of MEMORIES."""
    if memory not in MEMORIES:
        raise ValueError(
            f"state_memory should be 'device', 'pinned' or 'managed' but is: {memory!r}"
        )
    return memory


def is_outside(lay: Layout, entry: Entry, device: torch.device, memory: str) -> bool:
    """Whether a tensor of state lies outside of the device's own memory. Scales, means and numbers never do: they are a small part of the whole, and
    kernels read them one by one, which a bus is slow at."""
    size = math.prod(entry.local) * entry.dtype.itemsize
    outside = memory != "device" and device.type in _DEVICES
    return outside and entry.key in lay.large and size >= LEAST


def empty(lay: Layout, entry: Entry, device: torch.device, memory: str) -> Tensor:
    """A tensor for one entry of a layout, not filled.

    Raises:
        RuntimeError: there is no such memory, with the reason and the bytes.
    """
    if is_outside(lay, entry, device, memory):
        return ops.allocate(entry.local, entry.dtype, device, memory)
    return torch.empty(entry.local, dtype=entry.dtype, device=device)
