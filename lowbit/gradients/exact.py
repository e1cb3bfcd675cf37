"""Means of gradients whose bits do not depend on ranks, wrappers, or the order of micro-batches."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import sharding
from lowbit.gradients import hooks as places
from lowbit.gradients.exact_reduced import BucketSums, FlatSums
from lowbit.gradients.exact_sums import Divided, ParamSums, Pass, Sums
from lowbit.ops.gradient import most_addends
from lowbit.state.settings import some

_UNNUMBERED: Any = object()  # the index of a micro-batch that has none


class ExactAccumulator:
    """The accumulator of `lowbit.accumulate(rounding="exact")`.

    A gradient is the sum of the addends of all micro-batches of all data-parallel ranks, divided by
    their number and rounded once. An addend is the gradient of one micro-batch, as autograd or the
    wrapper's mixed precision hands it to the reduction.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        average: int | None,
        seed: int,
        group: Any = None,
        ranks_per_node: int | None = None,
    ) -> None:
        if average is not None and average > most_addends():
            raise ValueError(
                f'rounding="exact" adds up to {most_addends():,} micro-batches in a step, but '
                f"average is {average}"
            )
        self.model, self.seed, self.micro_batches = model, seed, average
        self.steps = 0  # finished
        self._round = 0  # micro-batches of this step that this rank has begun
        self._now: Pass | None = None
        self._indices: list[int] = []  # of this step, on this rank
        self._losses: dict[int, Tensor] = {}
        self._numbered = False  # whether the micro-batches of this step have indices
        self._running: int | None = None  # the index of the one that runs
        self._checked = 0  # of how many rounds the ranks have compared their indices
        places.check_model(model, "lowbit.accumulate")
        flat = bool(sharding.fsdp1_modules(model))
        params: dict[Tensor, str] = {
            p: name for name, p in model.named_parameters() if p.requires_grad
        }
        for p, name in params.items():
            places.check_free(p, name, "lowbit.accumulate", hooks=not flat)
            places.check_dtype(p, name)
        places.check_buckets(model, params)
        self._most = most_addends() if average is None else average
        divided = Divided(self._most, average or 1, dtype, ranks_per_node)
        self._params = params
        self._sums = sums_of(model, params, divided, group)
        self.ranks, self.rank = sharding.size_and_rank(self._sums.groups)
        for p in params:
            places.accumulators[p] = weakref.ref(self)
        self._frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self._names = {name: p for p, name in params.items()}
        check_place = functools.partial(
            places.check_place, what="lowbit.accumulate", names=self._names, frozen=self._frozen
        )
        self._handles = [model.register_forward_pre_hook(check_place, prepend=True)]
        self._recovery = None if flat else places.Recovery(model, params)
        if self._recovery:
            self._handles.append(self._recovery.handle)

    # Micro-batches

    def indices(self) -> list[int | None]:
        """This rank's micro-batches of a step, dealt round robin;
        None: it has none while other ranks have one.

        Pass each to `micro`, None too: the ranks meet in every forward and backward pass.

        Raises:
            ValueError: `average` was not given.
        """
        if self.micro_batches is None:
            raise ValueError(
                "indices() needs the number of micro-batches of a step: "
                "lowbit.accumulate(average=...)"
            )
        mine = range(self.rank, self._rounds() * self.ranks, self.ranks)
        return [i if i < self.micro_batches else None for i in mine]

    def _rounds(self) -> int:
        assert self.micro_batches is not None
        return -(-self.micro_batches // self.ranks)

    @contextlib.contextmanager
    def micro(
        self, last: bool | None = None, *, index: int | None = _UNNUMBERED, passes: int = 1
    ) -> Iterator[None]:
        """A context for one micro-batch's forward and backward pass. After the last,
        every `p.grad` is the mean.

        An exception inside it calls `reset`.

        Args:
            last: whether it is this rank's last one of the step. By default that follows from
                `average` and the number of ranks, if micro-batches are dealt as `indices` deals
                them.
            index: its number in the step, 0 to average - 1, each once over all ranks. It seeds
                torch's generators by (seed, step, index) inside the context, so that dropout does
                not depend on the rank; afterwards they continue as before. None: the rank has no
                micro-batch while others have, and what it computes counts as zero. Without an
                index, nothing is seeded.
            passes: how many backward passes the context has, 1 by default. A pipeline's schedule
                has one for each of its micro-batches; `average` counts them all, and `last` has to
                be said. Without a wrapper only: replicas of a stage are said by `group`.

        Raises:
            ValueError: an index out of range, or twice; or neither `last` nor `average` is given.
            RuntimeError: contexts are nested; a `p.grad` is left from before the step; the model is
                under DDP's join(); or, in the first step, the ranks did not share the
                micro-batches.
        """
        if self._now is not None:
            raise RuntimeError(places.NESTED)
        places.check_joined(
            self.model,
            'rounding="exact"',
            "leave it out, and deal micro-batches as accumulator.indices() does, with "
            "micro(index=None) where a rank has none",
        )
        if last is None:
            if self.micro_batches is None:
                raise ValueError("say micro(last=...), or lowbit.accumulate(average=...)")
            last = self._round + 1 == self._rounds()
        now = Pass(last, passes, index is None)
        number = None if index is _UNNUMBERED else index
        self._check(number, now, index is _UNNUMBERED)
        try:
            self._sums.begin(now)
            if self._round == 0:
                self._losses = {}  # of the step before
            self._now = now
            self._round += 1
            self._numbered = self._numbered or index is not _UNNUMBERED
            self._running = number
            if number is not None:
                self._indices.append(number)
            if self._recovery:
                self._recovery.began = False
            unseeded = contextlib.nullcontext()
            with unseeded if index is _UNNUMBERED else self._seeded(number):
                yield
            self._sums.end()
            if last:
                self._finish()
        except BaseException:
            self.reset()
            raise
        finally:
            self._now = self._running = None
            self._sums.begin(None)

    def _check(self, index: int | None, now: Pass, unnumbered: bool) -> None:
        """Everything that can be wrong with a micro-batch before it runs."""
        addends = (self._round + 1) * now.passes * self.ranks  # of all ranks, if none is idle
        if unnumbered and addends > self._most:
            raise ValueError(
                f"{self.ranks} ranks with {self._round + 1} micro-batches of {now.passes} passes "
                f"each have {addends} addends, and "
                + (
                    f"a step adds up {self._most:,} at most"
                    if self.micro_batches is None
                    else f"average={self.micro_batches} counts them all"
                )
            )
        if self._round > 0 and unnumbered == self._numbered:
            raise ValueError("give every micro-batch of a step an index, or none of them")
        if index is not None:
            if now.passes > 1:
                raise ValueError("a micro-batch with an index has one backward pass: leave out one")
            self._check_index(index)
        if self._round == 0:
            places.check_trained(self.model, self._names, self._frozen)
            self._check_cleared()

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self._most:
            raise ValueError(
                f"micro-batches have the indices 0 to {self._most - 1}, but this has {index}"
            )
        if index in self._indices:
            raise ValueError(f"micro-batch {index} ran already in this step")

    def _check_cleared(self) -> None:
        for p, name in self._params.items():
            if p.grad is not None:
                raise RuntimeError(
                    f"{name!r} has a gradient from before the step, which belongs to no "
                    "micro-batch; call opt.zero_grad(), with set_to_none=True as by default, "
                    "before the first one"
                )

    @contextlib.contextmanager
    def _seeded(self, index: int | None) -> Iterator[None]:
        accelerator = torch.accelerator.current_accelerator()
        devices = list(range(torch.accelerator.device_count()))  # manual_seed seeds all of them
        kind = "cuda" if accelerator is None else accelerator.type
        with torch.random.fork_rng(devices, device_type=kind):
            given = most_addends() if index is None else index
            torch.manual_seed(mixed_seed(self.seed, self.steps, given))
            yield

    def _finish(self) -> None:
        with torch.no_grad():
            self._sums.finish()
        self._sums.clear()
        if self._numbered and self._checked != self._round:  # the same decision on all ranks
            self._gathered(dict.fromkeys(self._indices, 0.0))
            self._checked = self._round
        self._round, self._indices, self._numbered = 0, [], False
        self.steps += 1

    def reset(self) -> None:
        """Discards the step's sums, so that it can be run again. Call it on every rank,
        and `zero_grad()`.
        """
        self._sums.clear()
        self._round, self._indices, self._numbered, self._losses = 0, [], False, {}
        for stepper in places.steppers_of(self._params):
            stepper.give_up()
        ddp = sharding.is_ddp(self.model)
        if self._recovery and (not ddp or (self._now is not None and self._recovery.began)):
            self._recovery.raised()

    def remove(self) -> None:
        """Restores the model's own reduction. Under FSDP1 torch cannot: wrap the model again."""
        self._sums.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for p in self._params:
            places.accumulators.pop(p, None)
            if getattr(p, "grad_dtype", p.dtype) is None and p.grad is None:
                p.grad_dtype = p.dtype

    def state_dict(self) -> dict[str, Any]:
        """The number of finished steps, which seeds depend on. Save it between steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the number of finished steps."""
        self.steps = int(state_dict["steps"])

    # Losses

    def log(self, loss: Tensor) -> None:
        """Notes the loss of the running micro-batch, a scalar. The micro-batch has an index; if
        that is None, it counts nothing.

        Raises:
            RuntimeError: no micro-batch with an index is running.
        """
        if self._now is not None and self._now.idle:
            return
        if self._now is None or self._running is None:
            raise RuntimeError("call log(loss) inside `with accumulator.micro(index=...)`")
        self._losses[self._running] = loss.detach().float().reshape(())

    def loss(self) -> float:
        """The mean of the losses that the last step's micro-batches noted: the same number on every
        rank, and for any number of ranks.

        It is a collective, for every rank to call after a step, and waits for the device.

        Raises:
            RuntimeError: a micro-batch of the step has no loss, or two ranks ran the same one.
        """
        losses, self._losses = self._losses, {}
        values = self._gathered(losses)
        if not all(map(math.isfinite, values)):
            return sum(values) / len(values)
        return math.fsum(values) / len(values) if values else math.nan

    def _gathered(self, mine: Mapping[int, Tensor | float]) -> list[float]:
        """One number of each micro-batch, from whichever rank has it, in their order."""
        groups = self._sums.groups
        first = next(iter(self._params), torch.empty(0, dtype=torch.float32, device="cpu"))
        device = sharding.host_device(groups, sharding.local(first).device)
        table = torch.zeros(2, self._most, dtype=torch.int32, device="cpu")
        for index, value in mine.items():
            table[0, index] = 1
            number = torch.as_tensor(value, dtype=torch.float32, device="cpu")
            table[1, index] = number.view(torch.int32)
        table = table.to(device)
        for group in groups:
            sharding.reduce_over([(table, group, "sum")])  # one rank's bits, and zeros
        counts, bits = table.cpu()
        values = bits.view(torch.float32).tolist()
        twice = [i for i, n in enumerate(counts.tolist()) if n > 1]
        never = (
            []
            if self.micro_batches is None
            else [i for i, n in enumerate(counts.tolist()) if not n]
        )
        if twice or never:
            wrong = (
                f"{some(twice)} ran on several ranks" if twice else f"{some(never)} ran on no rank"
            )
            raise RuntimeError(
                f"of the micro-batches of a step, {wrong}; deal them as accumulator.indices() does"
            )
        return [v for v, n in zip(values, counts.tolist(), strict=True) if n]


def mixed_seed(seed: int, step: int, index: int) -> int:
    """A seed of 63 bits, mixed as SplitMix64 does (Steele, Lea and Flood, OOPSLA 2014)."""
    mask = 0xFFFFFFFFFFFFFFFF
    z = seed & mask
    for word in (step, index):
        z = (z + 0x9E3779B97F4A7C15 * (word + 1)) & mask
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z >> 1


def sums_of(model: nn.Module, params: Mapping[Tensor, str], divided: Divided, group: Any) -> Sums:
    """The sums that fit the model's wrapper. group: the ranks that hold a model without one.

    Raises:
        ValueError: a group, for a model that has a wrapper.
    """
    ddp, units = sharding.is_ddp(model), sharding.flat_units(model)
    if group is not None and (ddp or units or sharding.is_fully_sharded(model)):
        raise ValueError(
            "group= is for a model without a wrapper; DistributedDataParallel, FSDP1 and "
            "fully_shard have process groups of their own"
        )
    if ddp:
        return BucketSums(model, params, divided)
    if units:
        return FlatSums(model, params, divided, units)
    return ParamSums(model, params, divided, group)
