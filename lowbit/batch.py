"""The parameters of a step as the operator takes them, and the phases of steps that must measure something first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lowbit import layout, ops, shard

if TYPE_CHECKING:
    from lowbit.holders import Holders


class Reductions(NamedTuple):
    """Process groups over which a step's sums and maxima are reduced."""

    all: tuple[Any, ...] = ()
    rows: tuple[Any, ...] = ()
    cols: tuple[Any, ...] = ()
    row_most: tuple[Any, ...] = ()
    col_most: tuple[Any, ...] = ()
    blocks: tuple[Any, ...] = ()


class Batch:
    """The parameters of one group on one device that take the same rule and reductions, as the operator takes them."""

    def __init__(self, group: dict[str, Any], lay: layout.Layout) -> None:
        self.group, self.rule, self.phases = group, lay.rule, lay.phases
        self.rounds = lay.rounds
        self.reductions = reductions(lay)
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.state: list[Tensor] = []
        self.steps: list[Tensor] = []
        self.rows: list[tuple[layout.Layout, Tensor]] = []
        self.pieces: list[shard.Piece] = []  # as many, or none
        self.strided = False  # whether a gradient had to be copied
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.owners: list[Any] = []  # as groups have them
        self.table: Tensor  # the operator's plan
        self.call: Callable[..., None]

    def add(self, p: Any, value: Tensor, lay: layout.Layout, state: dict[str, Tensor]) -> None:
        grad = shard.dense_gradient(p)
        refuse_overlap(value)
        if value.is_contiguous():
            self.params.append(value)
        else:  # such as channels_last: stepped in a copy
            self.copies.append((value, value.contiguous()))
            self.params.append(self.copies[-1][1])
        self.owners.append(p)
        self.strided |= not grad.is_contiguous()
        self.grads.append(grad.contiguous())
        for key in lay.keys:
            self.state.append(shard.local(state[key]))
        self.steps.append(state["step"])
        self.rows.append((lay, state["stream"]))
        if isinstance(p, shard.Piece):
            self.pieces.append(p)

    def plan(self) -> Tensor:
        return layout.plan_tensor([lay.plan_row(int(stream)) for lay, stream in self.rows])

    def bind(self, table: Tensor, hyper: list[float], **options: Any) -> None:
        """Gives it its operator call: `table` is its plan, `options` are `ops.step`'s keywords."""
        self.table = table
        self.call = functools.partial(
            ops.step, self.rule, self.params, self.grads, self.state, self.steps, table, hyper, **options
        )  # fmt: skip

    def prepare(self) -> int:
        """Hands over all but parameters and gradients, for calls of `bind_prepared`; the number that the operator gave it."""
        self.grads.clear()
        return ops.step_prepare(self.rule, self.params, self.state, self.steps, self.table)

    def bind_prepared(self, number: int, hyper: list[float], **options: Any) -> None:
        """As `bind`, for the gradients that `ops.step_take` took."""
        self.call = functools.partial(ops.step_prepared, number, hyper, self.phases, **options)

    def write_back(self) -> None:
        for value, copy in self.copies:
            value.copy_(copy)

    def measured(self, phase: int, scratch: list[Tensor]) -> list[tuple[Tensor, Any, str]]:
        """What a phase has measured that shards must agree on: (tensor, process group, operation)."""
        totals, rows, cols, row_most, col_most, blocks, _ = scratch
        if phase < self.rounds:
            of_round = totals.view(len(self.params), self.rounds, -1)[:, phase]
            parts = [(of_round, "all", "sum")]
            if ops.rule(self.rule)["grids"][phase] >= 0:
                parts += [(rows, "rows", "sum"), (cols, "cols", "sum")]
        else:
            parts = [
                (row_most, "row_most", "max"), (col_most, "col_most", "max"), (blocks, "blocks", "max")
            ]  # fmt: skip
        return [
            (tensor, group, operation)
            for tensor, which, operation in parts
            for group in getattr(self.reductions, which)
        ]


def refuse_overlap(value: Tensor) -> None:
    """RuntimeError for an expanded view, before anything is written."""
    if any(n > 1 and step == 0 for n, step in zip(value.shape, value.stride(), strict=True)):
        raise RuntimeError(
            f"a parameter of shape {tuple(value.shape)} is an expanded view, several of whose elements are one place in memory; step the tensor that it "
            "was expanded from"
        )


def run_phases(batches: Sequence[Batch], holders: Holders | None = None) -> None:
    """Measures, reduces and updates, all batches phase by phase, so that one phase takes one collective for each kind of number.

    Args:
        holders: of the pieces of flattened parameters, which agree even where nothing is here.
    """
    scratch: dict[int, list[Tensor]] = {}
    phases = max((batch.phases for batch in batches), default=0)
    for phase in range(1 + max(phases, holders.phases if holders else 0)):
        shared = holders.begin(phase) if holders else None
        wanted: list[tuple[Tensor, Any, str]] = []
        for i, batch in enumerate(batches):
            if phase > batch.phases:
                continue
            if batch.phases == 0:
                batch.call()
            else:
                if phase == 0:
                    scratch[i] = ops.scratch(batch.rule, batch.table, batch.params[0].device)
                batch.call(phase=phase, scratch=scratch[i])
            if phase >= batch.phases:
                batch.write_back()
            elif batch.pieces:  # what one rank has alone nobody adds to
                if shared:
                    shared.put(batch, scratch[i])
            else:
                wanted += batch.measured(phase, scratch[i])
        if shared:
            wanted += shared.wanted()
        if wanted:
            shard.reduce_over(wanted)
        if shared:
            shared.get()


def reductions(lay: layout.Layout) -> Reductions:
    """Over which process groups a parameter's sums and maxima are reduced; empty where it is updated without."""
    cuts, last = lay.part.cuts, len(lay.part.shape) - 1
    if not lay.phases or not cuts:
        return Reductions()
    scales = {slot.scale for slot in lay.slots if slot.measured}
    if "tensor" in scales and len(scales) > 1:
        raise ValueError(
            "scale='tensor' for one state of a sharded parameter and another measured scale for the next is not supported"
        )
    return Reductions(
        all=tuple(group for _, group in cuts),
        rows=tuple(group for dim, group in cuts if dim == last),
        cols=tuple(group for dim, group in cuts if dim == last - 1),
        row_most=tuple(group for dim, group in cuts if dim > 0 or "tensor" in scales),
        col_most=tuple(group for dim, group in cuts if dim == 0),
        blocks=tuple(group for dim, group in cuts if dim > 0),
    )
