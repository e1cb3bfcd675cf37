"""Steps of Muon: momentum, the orthogonalization of its updates,
and the step by them (docs/definitions/muon-design.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.config import muon
from lowbit.state.layout import Layout
from lowbit.state.muon_layout import ROW_MOMENTS, UPDATE, MuonLayout
from lowbit.state.reduce_groups import reduce_groups
from lowbit.step.buckets import buckets, numel_of_rank
from lowbit.step.group import StepGroup, refuse_overlap
from lowbit.step.phases import run_phases

MAX_ROUNDS = 4  # exchanges each way of a process group's matrices
MIN_ROUND_NUMEL = 1 << 24  # elements that are worth one

# Binds a step group to its operator call: (step group, where its plan is kept, ratio or None for
# the momentum).
Bind = Callable[[StepGroup, Any, "float | None"], None]


class Matrix:
    """One parameter in one step."""

    def __init__(
        self,
        number: int,
        group: dict[str, Any],
        p: Any,
        lay: MuonLayout,
        state: dict[str, Tensor],
        owners: tuple[int, ...],
    ) -> None:
        refuse_overlap(sharding.local(p))
        self.number, self.group, self.lay = number, group, lay
        self.state, self.owners = state, owners
        self.value = sharding.local(p)
        self.row_moments = sharding.local(state[ROW_MOMENTS]) if lay.row_moments else None
        self.skip: Tensor | None = None  # on a GPU: not 0 if gradients overflowed
        self.grad = sharding.dense_gradient(p).contiguous()

    def begin(self) -> None:
        dtype = getattr(torch, UPDATE)
        self.update = torch.empty(self.lay.part.local, dtype=dtype, device=self.value.device)
        self.written = self.value.contiguous()  # a copy only if it is transposed

    def end(self) -> None:
        if self.written is not self.value:
            self.value.copy_(self.written)
        del self.update, self.written

    def add_momentum(self, step_group: StepGroup) -> None:
        """Adds the momentum's step, which writes the update in place of the parameter and counts no
        step.
        """
        step_group.params.append(self.update)
        step_group.grads.append(self.grad)
        for key in self.lay.momentum_keys:
            step_group.state.append(sharding.local(self.state[key]))
        step_group.steps.append(self.state["step"].clone())
        step_group.rows.append((self.lay, self.state["stream"]))

    def orthogonalize(self, whole: Tensor, row_moments: Tensor | None) -> None:
        """Orthogonalizes whole updates in place, a matrix or a batch of them,
        and makes NorMuon's next row moments.
        """
        group, device = self.group, whole.device
        how = muon.schedule(group["ns_coefficients"], group["ns_steps"])
        by_default = "exact" if device.type == "cpu" else "torch"
        exact = {"auto": by_default}.get(group["orthogonalize"], group["orthogonalize"]) == "exact"
        pieces = self.lay.pieces
        moments = [None] * len(pieces) if row_moments is None else row_moments.split(pieces, -1)
        for piece, moment in zip(whole.split(pieces, -2), moments, strict=True):
            straight = piece.contiguous()
            (ops.newton_schulz if exact else by_torch)(straight, *how, group["eps"])
            if moment is not None:
                after = moment.contiguous().clone()
                beta2 = float(group["normuon_beta2"])
                ops.normalize_rows(straight, after, beta2)
                moment.copy_(
                    after if self.skip is None else torch.where(self.skip != 0, moment, after)
                )
            if straight is not piece:
                piece.copy_(straight)

    @property
    def traveling(self) -> sharding.Matrices:
        """What travels to the owners and back, for matrices that several ranks have."""
        assert self.lay.spread
        rows, cols = self.lay.part.shape[-2:]
        here, moments = self.update, self.row_moments
        if here.dim() == 2:
            here, moments = here[None], None if moments is None else moments[None]
        return sharding.Matrices(here, self.lay.spread, (rows, cols), self.owners, moments)

    def sent(self, here: Tensor) -> sharding.Sent:
        """What a batch whose state lies on other ranks sends: gradients to the ranks with the
        state, and results back.
        """
        assert self.lay.home
        return sharding.Sent(self.lay.home, here)

    def runs(self) -> Iterator[tuple[int, int, float]]:
        """Local rows [begin, end) of dimension 0 that have one ratio: (begin, end, ratio). At least
        one run, maybe empty.
        """
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


def by_torch(x: Tensor, coefficients: Sequence[float], factor: float, eps: float) -> None:
    """Orthogonalizes a bfloat16 matrix, or each of a batch, in place by torch's products,
    as torch.optim.Muon does.
    """
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
        matrices: of the same parameters in the same order on all ranks of a process group that has
            some of them.
        skipped: gradients overflowed and operators change nothing;
            what ranks exchange is exchanged all the same.
    """
    alone = [one for one in matrices if not one.lay.spread]
    for bucket in () if skipped else buckets(alone, lambda one: numel_of_rank(one.lay)):
        _run(bucket, bind, {}, False)
    together: dict[Any, list[Matrix]] = {}
    at_home: dict[Any, list[Matrix]] = {}
    for one in matrices:
        if one.lay.spread:
            (at_home if one.lay.home else together).setdefault(one.lay.group, []).append(one)
    for several in at_home.values():
        _run_at_home(several, bind, skipped)
    if together:
        spread = [one for several in together.values() for one in several]
        _run(spread, bind, together, skipped)


def _run(
    bucket: Sequence[Matrix], bind: Bind, together: Mapping[Any, Sequence[Matrix]], skipped: bool
) -> None:
    for one in bucket:
        one.begin()
    run_phases(_momentum(bucket, bind))
    if not together:
        for one in bucket:
            one.orthogonalize(one.update, one.row_moments)
    for group, several in together.items():  # one at a time: NCCL may hang where groups overlap
        _exchange(group, _rounds(several), skipped)
    run_phases(_steps(bucket, bind))
    for one in bucket:
        one.end()


def _exchange(group: Any, rounds: Sequence[Sequence[Matrix]], skipped: bool) -> None:
    """Orthogonalizes a process group's matrices by their owners.

    While those of a round are orthogonalized, the next ones arrive and the ones before return. All
    have returned at the end.
    """
    coming: list[Any] = []
    returning = []
    for i in range(len(rounds)):
        for several in rounds[len(coming) : i + 2]:
            sent = [one.traveling for one in several]
            coming.append((sent, sharding.to_owners(group, sent)))
        several, (sent, arrived) = rounds[i], coming[i]
        coming[i], whole = None, arrived()
        del arrived  # it has what was sent and received
        for k, owned in () if skipped else whole.items():
            several[k].orthogonalize(*owned)
        returning.append(sharding.from_owners(group, sent, whole))
    for returned in returning:
        returned()


def _rounds(several: Sequence[Matrix]) -> list[list[Matrix]]:
    """The matrices of a process group in rounds, the same on all of its ranks.

    The work of each owner is spread over them: one that has no matrix of a round would wait for the
    others.
    """
    size = sum(math.prod(one.lay.part.shape[-2:]) * len(one.owners) for one in several)
    count = max(1, min(MAX_ROUNDS, size // MIN_ROUND_NUMEL))
    total: dict[int, float] = defaultdict(float)
    before: dict[int, float] = defaultdict(float)
    for one in several:
        for owner in one.owners:
            total[owner] += one.lay.cost
    rounds: list[list[Matrix]] = [[] for _ in range(count)]
    for one in several:
        at = 0.0  # how far its owners are with their own work
        for owner in one.owners:
            at = max(at, (before[owner] + one.lay.cost / 2) / (total[owner] or 1.0))
            before[owner] += one.lay.cost
        rounds[min(count - 1, int(count * at))].append(one)
    return [one for one in rounds if one]


def _run_at_home(several: Sequence[Matrix], bind: Bind, skipped: bool) -> None:
    """Batches whose state lies elsewhere: the ranks that have the state of a matrix get its whole
    gradient.
    """
    whole = sharding.to_homes([one.sent(one.grad) for one in several])
    for one, grad in zip(several, whole, strict=True):
        one.begin()
        one.grad = grad
    run_phases(_momentum(several, bind))
    for one in several:
        if one.update.numel() and not skipped:
            one.orthogonalize(one.update, one.row_moments)
    back = [one.sent(one.update.new_empty(one.value.shape)) for one in several]
    sharding.from_homes(back, [one.update for one in several])
    for one, (_, here) in zip(several, back, strict=True):
        one.update = here
    run_phases(_steps(several, bind))
    for one in several:
        one.end()


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
