"""Gradients: accumulation, and exact sums of their powers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowbit.ops.library import number, operators


def accumulate(
    buffers: Sequence[Tensor],
    compensation: Sequence[Tensor],
    grads: Sequence[Tensor],
    plan: Tensor,
    format: str,
    *,
    scale: float = 1.0,
    seed: int = 0,
) -> None:
    """buffers += scale * grads, in place: added in float32, then stored in a parameter format.

    All tensors are local, contiguous and on one device.

    Args:
        buffers: the running sums.
        compensation: the compensation of each buffer; empty if the format has none.
        grads: the gradients, in float32, bfloat16 or float16.
        plan: int64 CPU [n, 6]: rows, columns, columns of the whole gradient, the first element's
            global index, the stream of random bits, and the number of earlier additions.
        format: a parameter format.
        scale: the factor of the gradients; 1 by default.
        seed: of the random bits; 0 by default.

    Raises:
        RuntimeError: an unknown format, or a tensor of a wrong dtype, shape or device.
    """
    operators.accumulate(buffers, compensation, grads, plan, number("param", format), scale, seed)


def exact_powers(grads: Sequence[Tensor], power: int) -> Tensor:
    """The exact sum of |g| (power 1) or g * g (power 2), each term rounded to float32.
    Ranks add the words.

    Args:
        grads: contiguous CPU tensors.
        power: 1 or 2.

    Returns:
        int64 [power_words()].
    """
    return operators.exact_powers(grads, power)
