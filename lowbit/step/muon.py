"""Steps of Muon: momentum, the orthogonalization of its updates, and the step by them (docs/muon.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.config import muon
from lowbit.state.layout import Layout
from lowbit.state.muon_layout import UPDATE, MuonLayout
from lowbit.state.reduce_groups import reduce_groups
from lowbit.step.group import StepGroup, refuse_overlap
from lowbit.step.phases import run_phases

TOGETHER = 1 << 24  # local elements whose updates are held at once; a larger parameter goes alone

# Binds a step group to its operator call: (step group, where its plan is kept, ratio or None for the momentum).
Bind = Callable[[StepGroup, Any, "float | None"], None]


class Matrix:
    """One parameter in one step."""

    def __init__(self, number: int, group: dict[str, Any], p: Any, lay: MuonLayout, state: dict[str, Tensor], owners: tuple[int, ...]) -> None:  # fmt: skip
        refuse_overlap(sharding.local(p))
        self.number, self.group, self.lay, self.state, self.owners = number, group, lay, state, owners
        self.value = sharding.local(p)
        self.grad = sharding.dense_gradient(p).contiguous()

    def begin(self) -> None:
        dtype = getattr(torch, UPDATE)
        self.update = torch.empty(self.value.shape, dtype=dtype, device=self.value.device)
        self.written = self.value.contiguous()  # a copy only if it is transposed

    def end(self) -> None:
        if self.written is not self.value:
            self.value.copy_(self.written)
        del self.update, self.written

    def add_momentum(self, step_group: StepGroup) -> None:
        """Adds the momentum's step, which writes the update in place of the parameter and counts no step."""
        step_group.params.append(self.update)
        step_group.grads.append(self.grad)
        for key in self.lay.keys:
            step_group.state.append(sharding.local(self.state[key]))
        step_group.steps.append(self.state["step"].clone())
        step_group.rows.append((self.lay, self.state["stream"]))

    def orthogonalize(self, whole: Tensor) -> None:
        """Orthogonalizes whole updates in place: a matrix, or a batch of them."""
        group, device = self.group, whole.device
        how = muon.schedule(group["ns_coefficients"], group["ns_steps"])
        exact = way(group["orthogonalize"], device) == "exact"
        for piece in whole.split(self.lay.pieces, -2):
            straight = piece.contiguous()
            (ops.newton_schulz if exact else by_torch)(straight, *how, group["eps"])
            if straight is not piece:
                piece.copy_(straight)

    @property
    def parts(self) -> sharding.Matrices:
        """What travels to the owners and back, for matrices that several ranks have."""
        assert self.lay.spread
        rows, cols = self.lay.part.shape[-2:]
        here = self.update if self.update.dim() == 3 else self.update[None]
        return sharding.Matrices(here, self.lay.spread, (rows, cols), self.owners)

    def runs(self) -> Iterator[tuple[int, int, float]]:
        """Local rows [begin, end) of dimension 0 that have one ratio: (begin, end, ratio). At least one run, maybe empty."""
        adjust, cols, pieces = self.group["adjust_lr_fn"], self.lay.part.shape[-1], self.lay.pieces
        here = self.value.shape[0]
        if self.value.dim() == 3 or len(set(pieces)) == 1 or not here:
            yield 0, here, muon.ratio(adjust, pieces[0], cols)
            return
        at = -self.lay.part.row_offset
        for rows in pieces:
            begin, end = max(at, 0), min(at + rows, here)
            if begin < end:
                yield begin, end, muon.ratio(adjust, rows, cols)
            at += rows

    def add_step(self, step_group: StepGroup, lay: Layout, begin: int, end: int) -> None:
        """Adds the step of these rows. The first ones count it."""
        step_group.params.append(self.written[begin:end])
        step_group.grads.append(self.update[begin:end])
        for key in lay.keys:
            step_group.state.append(sharding.local(self.state[key])[begin:end])
        step = self.state["step"]
        step_group.steps.append(step if begin == 0 else step.clone())
        step_group.rows.append((lay, self.state["stream"]))


def way(orthogonalize: str, device: torch.device) -> str:
    """ "exact" or "torch".

    Raises:
        ValueError: "exact" on a device that has no own product.
    """
    if orthogonalize == "auto":
        return "exact" if device.type == "cpu" else "torch"
    if orthogonalize == "exact" and device.type != "cpu":
        raise ValueError(
            f"orthogonalize='exact' runs on the CPU, but a parameter is on {device}; use 'torch' there, whose bits are the same on any number of "
            "GPUs of one kind"
        )
    return orthogonalize


def by_torch(x: Tensor, coefficients: Sequence[float], factor: float, eps: float) -> None:
    """Orthogonalizes a bfloat16 matrix, or each of a batch, in place by torch's products, as torch.optim.Muon does."""
    if x.dim() == 3:
        for one in x:
            by_torch(one, coefficients, factor, eps)
        return
    o = x.mT if x.size(0) > x.size(1) else x
    norm = o.norm()
    o = o / (norm if factor == 1.0 else norm * factor).clamp(min=eps)
    for i in range(0, len(coefficients), 3):
        a, b, c = coefficients[i : i + 3]
        gram = o @ o.mT
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        o = torch.addmm(o, update, o, beta=a)
    x.copy_(o.mT if x.size(0) > x.size(1) else o)


def run(matrices: Sequence[Matrix], bind: Bind, skipped: bool) -> None:
    """Steps the parameters of one device.

    Args:
        matrices: of the same parameters in the same order on all ranks of a process group that has some of them.
        skipped: gradients overflowed and operators change nothing; what ranks exchange is exchanged all the same.
    """
    alone = [one for one in matrices if not one.lay.spread]
    for bucket in () if skipped else _buckets(alone):
        _run(bucket, bind, {})
    together: dict[Any, list[Matrix]] = {}
    for one in matrices:
        if one.lay.spread:
            together.setdefault(one.lay.group, []).append(one)
    if together:
        _run([one for several in together.values() for one in several], bind, together)


def _run(bucket: Sequence[Matrix], bind: Bind, together: Mapping[Any, Sequence[Matrix]]) -> None:
    for one in bucket:
        one.begin()
    run_phases(_momentum(bucket, bind))
    if not together:
        for one in bucket:
            one.orthogonalize(one.update)
    for group, several in together.items():
        parts = [one.parts for one in several]
        whole = sharding.to_owners(group, parts)
        for i, updates in whole.items():
            several[i].orthogonalize(updates)
        sharding.from_owners(group, parts, whole)
    run_phases(_steps(bucket, bind))
    for one in bucket:
        one.end()


def _buckets(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    bucket: list[Matrix] = []
    held = 0
    for one in matrices:
        ranks = math.prod(group.size() for _, group in one.lay.part.cuts)
        size = math.prod(one.lay.part.shape) // ranks  # the same on every rank: buckets may reduce
        if bucket and held + size > TOGETHER:
            yield bucket
            bucket, held = [], 0
        bucket.append(one)
        held += size
    if bucket:
        yield bucket


def _momentum(bucket: Sequence[Matrix], bind: Bind) -> list[StepGroup]:
    made: dict[Any, StepGroup] = {}
    for one in bucket:
        where = (one.number, one.value.device, one.lay.phases, reduce_groups(one.lay))
        if where not in made:
            made[where] = StepGroup(one.group, one.lay)
        one.add_momentum(made[where])
    for where, step_group in made.items():
        bind(step_group, where, None)
    return list(made.values())


def _steps(bucket: Sequence[Matrix], bind: Bind) -> list[StepGroup]:
    made: dict[Any, StepGroup] = {}
    for one in bucket:
        whole = one.lay.step
        for begin, end, ratio in one.runs():
            some = (begin, end) != (0, one.value.shape[0])
            lay = whole.at_rows(begin, end) if some else whole
            where = (one.number, one.value.device, ratio)
            if where not in made:
                made[where] = StepGroup(one.group, lay)
            one.add_step(made[where], lay, begin, end)
    for where, step_group in made.items():
        bind(step_group, where, where[-1])
    return list(made.values())
