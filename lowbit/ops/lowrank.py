"""The passes of a step in a subspace (docs/definitions/lowrank.md)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowbit.ops.library import number, operators

# The passes of a low-rank step over the local part of one matrix, on the CPU, for
# lowbit/step/lowrank.py: docs/definitions/lowrank.md.
projection = operators.projection
singular_vectors = operators.singular_vectors
project_rows = operators.project_rows
column_absmax = operators.column_absmax
project_columns = operators.project_columns
column_values = operators.column_values
channel_scales = operators.channel_scales
squares = operators.squares
tensor_scale = operators.tensor_scale
apollo_norm = operators.apollo_norm
fira_norm = operators.fira_norm
exact_norm = operators.exact_norm
limit = operators.limit


def apollo_step(
    grad: Tensor,
    g_scale: float,
    scales: Tensor,
    tall: bool,
    hyper: Sequence[float],
    divisor: float,
    param: Tensor,
    compensation: Tensor | None,
    format: str,
    *where: int,
) -> None:
    """Updates the local part of a parameter by APOLLO.

    Args:
        where: the first element's global index, the seed, the stream and the step.
    """
    at = number("param", format)
    operators.apollo_step(
        grad, g_scale, scales, tall, hyper, divisor, param, compensation, at, *where
    )


def fira_step(
    grad: Tensor,
    n: Tensor,
    p: Tensor,
    residual: Tensor,
    tall: bool,
    hyper: Sequence[float],
    divisor: float,
    param: Tensor,
    compensation: Tensor | None,
    format: str,
    *where: int,
) -> None:
    """Updates the local part of a parameter by Fira; `where` is as in `apollo_step`."""
    at = number("param", format)
    operators.fira_step(grad, n, p, residual, tall, hyper, divisor, param, compensation, at, *where)


# The passes of a low-rank step over many matrices on a GPU, for lowbit/step/lowrank_cuda.py.
# (pass, read, written, plan, hyper, table, grad_scale, found_inf)
lowrank_pass = operators.lowrank_pass
lowrank_room = operators.lowrank_room  # () -> bytes of the table for each matrix
