"""Values to codes and back, parameters with their compensation, and memory outside of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.ops.library import number, operators, state_format


@functools.cache
def has_zero(name: str) -> bool:
    """Whether a zero in a block with other values stays zero in a state format."""
    entry = state_format(name)
    if not entry["scaled"]:
        return True
    x = torch.zeros(1, entry["block"], dtype=torch.float32, device="cpu")
    x[0, 0] = 1.0
    codes, scales = quantize(x, name, entry["block"])
    return bool(dequantize(codes, scales, name, entry["block"], entry["block"])[0, 1] == 0)


def allocate(size: Sequence[int], dtype: torch.dtype, device: torch.device, memory: str) -> Tensor:
    """An uninitialized, nonempty tensor for a GPU, in "pinned" or "managed" memory.

    Args:
        size: its shape.
        dtype: of the tensor.
        device: the CUDA device.
        memory: "pinned" (host memory) or "managed".

    Raises:
        RuntimeError: the memory cannot be allocated, or lowbit was built without CUDA.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return operators.allocate(size, str(dtype).removeprefix("torch."), index, memory)


def quantize(x: Tensor, format: str, block: int) -> tuple[Tensor, Tensor]:
    """Quantizes float32 values in blocks of a row.

    Args:
        x: float32 [rows, cols], contiguous.
        format: a state format.
        block: the block's length in values.

    Returns:
        Codes [rows, ceil(cols * bits / 8)] and scales [rows, ceil(cols / block) * scale_numbers],
        in the dtypes of `state_format(format)`.
    """
    return operators.quantize(x, number("state", format), block)


def dequantize(codes: Tensor, scales: Tensor, format: str, block: int, cols: int) -> Tensor:
    """The inverse of `quantize`: float32 [rows, cols]."""
    return operators.dequantize(codes, scales, number("state", format), block, cols)


def quantize_given(x: Tensor, absmax: Tensor, format: str) -> Tensor:
    """Quantizes by given scales, on the CPU.

    Args:
        x: float32 [rows, cols].
        absmax: float32 [rows, cols], the absmax that each value's scale covers.
        format: a state format.

    Returns:
        Codes [rows, ceil(cols * bits / 8)].
    """
    return operators.quantize_given(x, absmax, number("state", format))


def dequantize_given(codes: Tensor, absmax: Tensor, format: str) -> Tensor:
    """The inverse of `quantize_given`."""
    return operators.dequantize_given(codes, absmax, number("state", format))


def join(stored: Tensor, compensation: Tensor | None, format: str) -> Tensor:
    """The float32 values of a contiguous parameter and its compensation (None if its format has
    none). On the CPU.
    """
    return operators.join(stored, compensation, number("param", format))


def split(x: Tensor, format: str, *, seed: int = 0, stream: int = 0) -> tuple[Tensor, Tensor]:
    """Stores contiguous float32 values in a parameter format, on the CPU.

    Returns:
        The parameter and its compensation, which is empty if the format has none.
    """
    return operators.split(x, number("param", format), seed, stream)
