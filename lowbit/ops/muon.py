"""The orthogonalization of Muon, and the product that it is made of, with the same bits on the CPU
and on a GPU (docs/definitions/muon-design.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowbit.ops.library import operators


def newton_schulz(x: Tensor, coefficients: Sequence[float], factor: float, eps: float) -> None:
    """Orthogonalizes a matrix, or each matrix of a batch, in place.

    Args:
        x: bfloat16 [..., rows, columns], contiguous.
        coefficients: a, b, c of each step.
        factor: of the Frobenius norm by which x is divided first.
        eps: the least divisor.
    """
    operators.newton_schulz(x, coefficients, factor, eps)


def normalize_rows(x: Tensor, moments: Tensor, beta2: float) -> None:
    """NorMuon's rows of orthogonalized matrices in place (csrc/core/muon/row_moment.h).

    Args:
        x: bfloat16 [..., rows, columns], contiguous.
        moments: float32 [..., rows], contiguous, where x is; updated.
        beta2: their decay.
    """
    operators.normalize_rows(x, moments, beta2)


bfloat16_product = operators.bfloat16_product  # (a, b) -> a b^T in float32, each output one chain
