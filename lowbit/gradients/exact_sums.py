"""Where the addends of an exact mean are added up: on parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit import ops, sharding
from lowbit.gradients import hooks as places


class Divided(NamedTuple):
    """What all sums of an accumulator have in common."""

    terms: int  # the most addends of an element
    divisor: int
    dtype: torch.dtype | None  # of the means; None: the parameter's
    ranks_per_node: int | None  # None: addends go to their ranks at once

    def dtype_of(self, p: Tensor) -> torch.dtype:
        return p.dtype if self.dtype is None else self.dtype


@dataclass
class Pass:
    """The forward and backward pass that is running."""

    last: bool  # of the step, on this rank
    passes: int  # how many backward passes it has: several in a pipeline's schedule
    idle: bool  # whether this rank's gradients count as zeros


class Sum:
    """The sum of one parameter's gradients: of its local part, of a chunk, or of a flat shard."""

    def __init__(self, divided: Divided) -> None:
        self.divided = divided
        self.words: Tensor | None = None  # None: the sum is empty
        self.met = False  # whether a micro-batch of this step reached the parameter
        self.reached = 0  # backward passes of the running micro-batch that did

    def clear(self) -> None:
        self.words, self.met, self.reached = None, False, 0

    def add(self, rows: Tensor) -> None:
        """Adds rows of addends, [rows, n]."""
        if self.words is None:
            self.words = torch.zeros(rows.shape[1], dtype=torch.int64, device=rows.device)
        ops.mean_add([self.words], [rows], self.divided.terms)

    def mean(self, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The mean of what was added and of these rows, [n]. The sum is empty then."""
        like = self.words if rows is None else rows
        assert like is not None
        made = torch.empty(like.shape[-1], dtype=dtype, device=like.device)
        words = [] if self.words is None else [self.words]
        addends = [] if rows is None else [rows]
        ops.mean_of(words, addends, [made], self.divided.terms, self.divided.divisor)
        self.words = None
        return made


class Sums:
    """The sums of a model. `groups`: the data-parallel process groups,
    of which the last varies fastest.
    """

    def __init__(self, params: Mapping[Tensor, str], divided: Divided) -> None:
        self.divided, self.groups = divided, list[Any]()
        self.names = params
        self._exchanges: dict[Any, sharding.Exchange] = {}
        self.of: dict[Any, Sum] = {p: Sum(divided) for p in params}
        self._now: Pass | None = None
        self._removers: list[Callable[[], None]] = []

    def begin(self, now: Pass | None) -> None:
        """Tells the sums which pass is running; None: none is."""
        self._now = now
        for one in self.of.values():
            one.reached = 0

    def end(self) -> None:
        """Checks, after a micro-batch's passes, that all of its gradients arrived.

        Raises:
            RuntimeError: they did not.
        """

    def exchange(self, rows: Tensor, group: Any) -> Tensor:
        """Sends row r of [ranks, n] to rank r of the group. Returns the rows that arrive, which are
        words where nodes add first.
        """
        if group not in self._exchanges:
            self._exchanges[group] = sharding.Exchange(
                group, self.divided.ranks_per_node, self._words
            )
        return self._exchanges[group](rows)

    def _words(self, rows: Tensor) -> Tensor:
        """The sums of rows of addends, as words."""
        one = Sum(self.divided)
        one.add(rows)
        assert one.words is not None
        return one.words

    def now(self) -> Pass:
        if self._now is None:
            raise RuntimeError(
                'a backward pass under lowbit.accumulate(rounding="exact") ran outside `with '
                "accumulator.micro(...)`"
            )
        return self._now

    def _count(self, mine: Sum, name: str) -> None:
        mine.reached += 1
        passes = self.now().passes
        if mine.reached > passes:
            raise RuntimeError(
                f"{name!r} got {mine.reached} gradients in one micro-batch, which are "
                f"{mine.reached} addends: run each backward pass in a micro of its own, say "
                "micro(passes=...) for a pipeline, or use checkpoint(use_reentrant=False)"
            )

    def _met_anywhere(self, groups: Sequence[Any]) -> list[int]:
        """Of each parameter, whether micro-batches of any rank reached it. A collective."""
        if not self.of:
            return []
        device = sharding.host_device(groups, sharding.local(next(iter(self.of))).device)
        met = torch.tensor([one.met for one in self.of.values()], device=device).int()
        sharding.reduce_over([(met, group, "max") for group in groups])
        return met.tolist()

    def clear(self) -> None:
        for one in self.of.values():
            one.clear()

    def finish(self) -> None:
        """Hands over what the last micro-batch did not."""

    def remove(self) -> None:
        for remove in self._removers:
            remove()
        self._removers = []

    def _hook_params(self, hook: Callable[[Tensor], None]) -> None:
        for p in self.names:
            self._removers.append(p.register_post_accumulate_grad_hook(hook).remove)
            if self.divided.dtype_of(p) != p.dtype:
                p.grad_dtype = None  # any dtype


class ParamSums(Sums):
    """Sums of local parts, added up by hooks on the parameters: without a wrapper,
    and under FSDP2.
    """

    def __init__(
        self, model: nn.Module, params: Mapping[Tensor, str], divided: Divided, group: Any
    ) -> None:
        super().__init__(params, divided)
        self._copies = None if group is None or group.size() == 1 else group
        self._all = sharding.units(model)
        self._units: dict[Tensor, tuple[sharding.Unit, int]] = {}
        for unit in self._all:
            self.groups = self.groups or unit.groups
            self._units |= {p: (unit, width) for p, width in unit.params if p in self.of}
        if self.groups:
            refuse_left_out(params, self._units, "fully_shard")
        elif self._copies is not None:
            self.groups = [self._copies]
        for unit in self._all:
            unit.begin(self.exchange)
            self._removers.append(unit.remove)
        self._hook_params(self._hook)

    def begin(self, now: Pass | None) -> None:
        exchanged = [unit for unit in self._all if unit.addends is not None]
        if now is not None and now.passes > 1 and exchanged:
            raise NotImplementedError(
                "fully_shard adds up the passes of a pipeline's schedule itself before it reduces "
                'them, and rounds; rounding="exact" needs each backward pass in a micro of its own'
            )
        for unit in exchanged:
            assert unit.addends is not None
            if now is not None:
                unit.check()
            unit.addends.idle = now is not None and now.idle
        super().begin(now)

    def end(self) -> None:
        for unit in self._all:
            unit.check()
            if unit.addends is not None and unit.addends.waiting:
                raise RuntimeError(sharding.NOT_TAKEN)

    def clear(self) -> None:
        super().clear()
        for unit in self._all:
            if unit.addends is not None:
                unit.addends.clear()

    @torch.no_grad()
    def _hook(self, p: Tensor) -> None:
        if p.grad is None:
            return
        places.wait_for_copy(p)
        now, mine = self.now(), self.of[p]
        unit, width = self._units.get(p, (None, 0))
        if unit is not None and unit.addends is not None:
            rows = unit.addends.take(width, sharding.local(p).numel())
        else:
            rows = sharding.dense_gradient(p).detach().reshape(1, -1)
            if now.idle:
                rows = torch.zeros_like(rows)
        p.grad = None
        mine.met |= not now.idle
        self._count(mine, self.names[p])
        at_once = now.passes == 1 and self._replicas(unit) is None
        if now.last and at_once:
            hand_over(p, mine.mean(rows, self.divided.dtype_of(p)))
        else:
            mine.add(rows)

    def _replicas(self, unit: sharding.Unit | None) -> Any:
        """The process group that still has to add up a sum; None: no one."""
        return self._copies if unit is None else unit.replicas

    def finish(self) -> None:
        if self._copies is not None:
            self._share_met(self._copies)
        waiting: dict[Any, list[Tensor]] = {}
        for p, mine in self.of.items():
            if mine.words is None:
                continue
            replicas = self._replicas(self._units.get(p, (None, 0))[0])
            if replicas is None:
                hand_over(p, mine.mean(None, self.divided.dtype_of(p)))
            else:
                waiting.setdefault((replicas, self.divided.dtype_of(p)), []).append(p)
        for (replicas, dtype), params in waiting.items():
            self._join_replicas(replicas, dtype, params)

    def _share_met(self, group: Any) -> None:
        """Gives every rank a sum of each parameter that any rank's micro-batches reached."""
        for (p, mine), any_met in zip(self.of.items(), self._met_anywhere([group]), strict=True):
            if not any_met:
                mine.words = None
            elif mine.words is None:
                here = sharding.local(p)
                mine.words = torch.zeros(here.numel(), dtype=torch.int64, device=here.device)

    def _join_replicas(self, group: Any, dtype: torch.dtype, params: Sequence[Tensor]) -> None:
        """Sends each chunk of the words to one replica, which adds them up,
        and shares the means.
        """
        words = [w for p in params if (w := self.of[p].words) is not None]
        chunks = sharding.Chunks([w.numel() for w in words], group.size())
        rows = self.exchange(chunks.pack(words), group)
        joined = sharding.gather(Sum(self.divided).mean(rows, dtype), group)
        for p, mean in zip(params, chunks.unpack(joined), strict=True):
            hand_over(p, mean)
            self.of[p].clear()


def hand_over(p: Tensor, mean: Tensor) -> None:
    """Makes a mean p's gradient, with p's shape, device and placement."""
    here = sharding.local(p)
    p.grad = sharding.like(p, mean.to(here.device).view(here.shape), p.shape)


def refuse_left_out(params: Mapping[Tensor, str], served: Collection[Tensor], what: str) -> None:
    """Raises NotImplementedError if a parameter is outside of the wrapper, so that every rank would
    keep its own mean.
    """
    among = {id(p) for p in served}
    left_out = [name for p, name in params.items() if id(p) not in among]
    if left_out:
        raise NotImplementedError(
            f"{what} does not reduce {len(left_out)} of the trained parameters, such as "
            f"{left_out[0]!r}, so that each rank would keep a mean of its own; wrap the whole model"
        )
