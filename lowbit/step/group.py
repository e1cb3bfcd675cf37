"""The parameters of a step as the operator takes them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.state.layout import Layout
from lowbit.state.place import EXPANDED, overlaps
from lowbit.state.plan import plan_tensor
from lowbit.state.reduce_groups import reduce_groups
from lowbit.step.numbers import capturing

# A prepared step keeps a workspace up to this size. Beside a larger one,
# writing the table of jobs again takes no time.
KEPT_WORKSPACE = 128 << 20  # bytes


class StepGroup:
    """The operator's arguments for parameters of one group and device that have the same rule and
    reductions.
    """

    def __init__(self, group: dict[str, Any], lay: Layout) -> None:
        self.group, self.rule, self.phases = group, lay.rule, lay.phases
        self.rounds = lay.rounds
        self.reduce_groups = reduce_groups(lay)
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.state: list[Tensor] = []
        self.steps: list[Tensor] = []
        self.rows: list[tuple[Layout, Tensor]] = []
        self.flat_shards: list[sharding.FlatShard] = []  # one per parameter, or none
        self.strided = False  # whether a gradient had to be copied
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.members: list[Any] = []  # as groups have them
        self.table: Tensor  # the operator's plan
        self.call: functools.partial[None]
        self.prepared = False
        self._workspace: tuple[int, dict[str, Tensor]] | None = None  # with its stream

    def add(self, p: Any, value: Tensor, lay: Layout, state: dict[str, Tensor]) -> None:
        grad = sharding.dense_gradient(p)
        refuse_overlap(value)
        if value.is_contiguous():
            self.params.append(value)
        else:  # such as channels_last: step a copy
            self.copies.append((value, value.contiguous()))
            self.params.append(self.copies[-1][1])
        self.members.append(p)
        self.strided |= not grad.is_contiguous()
        self.grads.append(grad.contiguous())
        for key in lay.keys:
            self.state.append(sharding.local(state[key]))
        self.steps.append(state["step"])
        self.rows.append((lay, state["stream"]))
        if isinstance(p, sharding.FlatShard):
            self.flat_shards.append(p)

    def plan(self) -> Tensor:
        return plan_tensor([lay.plan_row(int(stream)) for lay, stream in self.rows])

    def bind(self, table: Tensor, hyper: list[float], **options: Any) -> None:
        """Sets the operator call: `table` is the plan, `options` are keywords of `ops.step`."""
        self.table = table
        self.call = functools.partial(
            ops.step,
            self.rule,
            self.params,
            self.grads,
            self.state,
            self.steps,
            table,
            hyper,
            **options,
        )

    def prepare(self, streams: list[Tensor]) -> int:
        """Passes everything to the operator, for `bind_prepared`, and releases the gradients.

        Args:
            streams: those of its parameters whose values the operator is to watch.

        Returns:
            The number of the prepared step.
        """
        number = ops.step_prepare(
            self.rule, self.params, self.grads, self.state, self.steps, streams, self.table
        )
        self.grads.clear()
        self.prepared = True
        return number

    def bind_prepared(self, number: int, hyper: list[float], **options: Any) -> None:
        """Like `bind`, for a prepared step with the gradients that `ops.step_take` got."""
        self.call = functools.partial(ops.step_prepared, number, hyper, self.phases, **options)

    def workspace(self) -> dict[str, Tensor]:
        """The zeroed workspace of a step. A prepared step keeps it, so that the table of jobs,
        which points to it, stays as it is.

        A step in a CUDA graph has one of its own, because its replays may come when the optimizer
        has released this one; so has a step on another stream, because memory belongs to the
        stream that it was allocated on.
        """
        device = self.params[0].device
        if not self.prepared or capturing(device):
            return ops.workspace(self.rule, self.table, device)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if self._workspace is not None and self._workspace[0] == stream:
            for tensor in self._workspace[1].values():
                tensor.zero_()
            return self._workspace[1]
        made = ops.workspace(self.rule, self.table, device)
        if sum(tensor.nbytes for tensor in made.values()) <= KEPT_WORKSPACE:
            self._workspace = stream, made
        return made

    def write_back(self) -> None:
        for value, copy in self.copies:
            value.copy_(copy)

    def measured(self, phase: int, workspace: dict[str, Tensor]) -> list[tuple[Tensor, Any, str]]:
        """What a phase has measured and shards must reduce: (tensor, process group, operation)."""
        if phase < self.rounds:
            of_round = workspace["totals"].view(len(self.params), self.rounds, -1)[:, phase]
            parts, operation = {"totals": of_round}, "sum"
            if ops.rule(self.rule)["grids"][phase] >= 0:
                parts |= {name: workspace[name] for name in ("rows", "cols")}
        else:
            operation = "max"
            parts = {name: workspace[name] for name in ("row_absmax", "col_absmax", "blocks")}
        return [
            (tensor, group, operation)
            for name, tensor in parts.items()
            for group in getattr(self.reduce_groups, name)
        ]


def refuse_overlap(value: Tensor) -> None:
    """Raises RuntimeError for an expanded view,
    before anything is written: one that was not to be trained at construction.
    """
    if overlaps(value):
        raise RuntimeError(f"a parameter {EXPANDED.format(tuple(value.shape))}")
