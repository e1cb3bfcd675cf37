"""Gradients: accumulation, and exact sums of their powers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowbit.ops.library import number, operators, policy


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


def most_addends() -> int:
    """The most addends of an exact mean."""
    return int(policy("mean_addends"))


def mean_add(words: Sequence[Tensor], addends: Sequence[Tensor], terms: int) -> None:
    """words += addends, in place, so that the result does not depend on the order of additions.

    The words of a sum are opaque: one for each element, in the format of csrc/core/mean_bins.h.
    Zeros are the empty sum.

    Args:
        words: int64 [n] each, contiguous, on one device.
        addends: [rows, n] each, of float32, bfloat16 or float16, or int64 words of other sums. Each
            row is contiguous.
        terms: the most addends that the sum of an element will have, 1 to most_addends(). All sums
            that are added to each other have the same number.

    Raises:
        RuntimeError: a tensor of a wrong dtype, shape or device, or too many terms.
    """
    operators.mean_add(words, addends, terms)


def mean_of(
    words: Sequence[Tensor],
    addends: Sequence[Tensor],
    means: Sequence[Tensor],
    terms: int,
    divisor: int,
) -> None:
    """means = (words + addends) / divisor, rounded once to the dtype of each mean.

    Args:
        words: as `mean_add` leaves them, or empty: the sums have no other addends.
        addends: as for `mean_add`, or empty: there are no more.
        means: contiguous tensors of n elements each, in float32, bfloat16 or float16.
        terms: as for `mean_add`.
        divisor: 1 to 2^24.

    Raises:
        RuntimeError: a tensor of a wrong dtype, shape or device, or a number out of range.
    """
    operators.mean_of(words, addends, means, terms, divisor)
