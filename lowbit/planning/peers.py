"""What other libraries keep on one card and in the host's memory, in the way that they recommend
for a model that is too large.

Read in torchao 0.18 (`CPUOffloadOptimizer`), bitsandbytes 0.50 (`Optimizer8bit.get_state_buffer`)
and flashoptim 0.1.4. What their steps allocate for a moment is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowbit.planning.libraries import BLOCK, CODEBOOK, MOMENTS, QUANTIZED_FROM, STEP

PAGED_FROM = 100_000  # values from which bitsandbytes pages a state
FLASH_GROUP = 32  # values that share a scale in FlashOptim
FLASH_SCALE = 2  # bytes, float16
FLASH_STEP = 8  # bytes, int64


@dataclass(frozen=True)
class Peer:
    """AdamW of another library on one card; sizes are for (values, bytes of a weight)."""

    title: str
    card: Callable[[int, int], int]
    host: Callable[[int, int], int] = lambda values, itemsize: 0
    shared: int = 0  # bytes on the card, once
    releases: bool = True  # whether it has a way to free gradients in the backward pass
    note: str = ""


def _offloaded(values: int, itemsize: int) -> int:
    """The weights and the gradient once more, and two moments in the weights' dtype."""
    return (2 + MOMENTS) * values * itemsize + STEP if values >= QUANTIZED_FROM else 0


def _beside_offloaded(values: int, itemsize: int) -> int:
    return MOMENTS * values * itemsize + STEP if values < QUANTIZED_FROM else 0


def _paged(values: int, itemsize: int) -> int:
    return MOMENTS * values if values >= PAGED_FROM else 0


def _beside_paged(values: int, itemsize: int) -> int:
    if values < QUANTIZED_FROM:
        return MOMENTS * values * 4
    scales = -(-values // BLOCK) * 4
    return MOMENTS * (scales + (values if values < PAGED_FROM else 0))


def _flash(values: int, itemsize: int) -> int:
    """Codes and scales, and 8 correction bits for each 16-bit weight."""
    moments = MOMENTS * (values + -(-values // FLASH_GROUP) * FLASH_SCALE)
    return moments + (values if itemsize == 2 else 0) + FLASH_STEP


PEERS = {
    "torchao_offload": Peer(
        "torchao CPUOffloadOptimizer",
        _beside_offloaded,
        _offloaded,
        note="steps on the CPU; released gradients are offload_gradients=True",
    ),
    "bitsandbytes_paged": Peer(
        "bitsandbytes PagedAdamW8bit",
        _beside_paged,
        _paged,
        shared=MOMENTS * CODEBOOK,
        releases=False,
        note="has no release of gradients of its own",
    ),
    "flashoptim": Peer(
        "FlashOptim FlashAdamW",
        _flash,
        note="released gradients are enable_gradient_release; state stays on the card",
    ),
}
