"""A step, and a step that is prepared once and repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from lowbit.ops.library import number, operators


def step(
    rule: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: Sequence[Tensor],
    steps: Sequence[Tensor],
    plan: Tensor,
    hyper: Sequence[float],
    *,
    lr: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    maximize: bool = False,
    seed: int = 0,
    phase: int = 0,
    workspace: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Runs one phase of a step of `rule`, in place, on local contiguous tensors of one device.

    Args:
        rule: a name in the catalog.
        params, grads: one local tensor for each parameter.
        state: for each parameter, the tensors of `Layout.entries()`.
        steps: one float32 each, incremented in phase 0; on the CPU for CPU parameters,
            else on their device.
        plan: int64 CPU [n, columns], a row for each parameter as `plan_row` makes it.
        phase: 0 .. `Layout.phases`. Each but the last measures something into `workspace`, which
            the caller reduces over the shards before the next; the last updates.
        workspace: the tensors of `workspace()`; empty for a step of one phase.
        hyper: as the catalog lists them for the rule; `lr`, a tensor of one element,
            takes the place of `hyper[0]`.
        grad_scale: gradients are divided by it.
            found_inf: where it is not 0 nothing happens at all.
    """
    operators.step(
        number("rules", rule),
        params,
        grads,
        state,
        steps,
        list(workspace.values()),
        plan,
        hyper,
        lr=lr,
        grad_scale=grad_scale,
        found_inf=found_inf,
        maximize=maximize,
        seed=seed,
        phase=phase,
    )


# Repeated steps over the same tensors: the plan becomes jobs once, and a step passes parameters and
# gradients (csrc/ops/prepared_step.cpp).
def step_prepare(
    rule: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: Sequence[Tensor],
    steps: Sequence[Tensor],
    streams: Sequence[Tensor],
    plan: Tensor,
) -> int:
    """Makes and keeps the jobs of `step`, but neither parameters nor gradients;
    returns the number of the prepared step.

    Args:
        streams: the streams that the plan was made with, int64 on the CPU,
            so that a change of their values is seen.
    """
    return operators.step_prepare(number("rules", rule), params, grads, state, steps, streams, plan)


step_discard = operators.step_discard  # (number)


# (number, params, grads) -> False, storing nothing, if a tensor has changed
step_take = operators.step_take


# (number, table) -> the same of the addresses in a table of lowbit._tensors.take. A row
# without a valid checksum is refused; the caller must keep the gradients alive.
step_take_table = operators.step_take_table


def step_prepared(
    number: int,
    hyper: Sequence[float],
    phases: int,
    *,
    phase: int = 0,
    workspace: Mapping[str, Tensor] = MappingProxyType({}),
    **options: Any,
) -> None:
    """`step` of a prepared step with the gradients that `step_take` or `step_take_table` got; its
    last phase releases them.
    """
    tensors = list(workspace.values())
    operators.step_prepared(number, tensors, hyper, phase=phase, last=phase >= phases, **options)
