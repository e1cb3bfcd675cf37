"""Accumulation of micro-batch gradients in bfloat16 or float32 buffers, as autograd,
DDP or FSDP2 produces them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import ops, sharding
from lowbit.config.overrides import clean_name
from lowbit.gradients import hooks as places
from lowbit.gradients.held import HeldGradient, add_all, by_bytes
from lowbit.state.settings import some


class Accumulator:
    """The accumulator of a model's gradients, as `accumulate` returns it."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        format: str,
        scale: float,
        seed: int,
        hooks: bool,
    ) -> None:
        self.model, self.dtype, self.format, self.scale = model, dtype, format, scale
        # Without hooks, DDP's gradients need no special care.
        self._ddp = hooks and sharding.is_ddp(model)
        # Whether a gradient may lie in a bucket of DDP, which the next pass overwrites: without
        # hooks too, and where DDP is around a part of the model.
        self._in_buckets = sharding.has_bucket_views(model)
        self._fsdp2 = sharding.is_fully_sharded(model)
        self.seed = seed ^ (sharding.rank() << 32) if self._ddp else seed
        self._params: dict[Tensor, HeldGradient] = {}
        self._micro = ""  # "", "more" or "last": the kind of micro-batch that is running
        self._begun = False  # whether the step's first `micro` was entered
        self._handles: list[Any] = []
        if hooks:
            places.check_model(model, "lowbit.accumulate")
        self._frozen: dict[str, Tensor] = {}
        for i, (name, p) in enumerate(model.named_parameters()):
            if p.requires_grad:
                places.check_free(p, name, "lowbit.accumulate", hooks)
                places.check_dtype(p, name)
                self._params[p] = HeldGradient(p, name, i)
            else:
                self._frozen[name] = p
        places.check_buckets(model, self._params)
        for q in self._params:
            self._attach(q, hooks)
        self._names = {held.name: p for p, held in self._params.items()}
        self._check_place = functools.partial(
            places.check_place, what="lowbit.accumulate", names=self._names, frozen=self._frozen
        )
        if hooks:
            check = model.register_forward_pre_hook(self._check_place, prepend=True)
            self._handles.append(check)
        self._unreduced = False  # whether the last forward pass ran under no_sync()
        if self._ddp:
            self._handles.append(model.register_forward_pre_hook(self._note_sync))
        self._recovery = places.Recovery(model, self._params) if hooks else None
        if self._recovery:
            self._handles.append(self._recovery.handle)

    def _attach(self, p: Tensor, hooks: bool) -> None:
        places.accumulators[p] = weakref.ref(self)
        if hooks:
            self._handles.append(p.register_post_accumulate_grad_hook(self._hook))
        if p.dtype != self.dtype and self._any_dtype(p):
            p.grad_dtype = None  # None: any dtype

    def _any_dtype(self, p: Tensor) -> bool:
        """Whether p.grad may have a dtype other than p's."""
        return not self._ddp and not sharding.is_flat(p) and hasattr(p, "grad_dtype")

    # Micro-batches

    @contextlib.contextmanager
    def micro(self, last: bool) -> Iterator[None]:
        """A context for one micro-batch's forward and backward pass. After the last,
        every `p.grad` is the sum or average.

        An exception inside it calls `reset`.

        Raises:
            RuntimeError: `micro` is nested; DDP with static_graph=True begins with a micro-batch
                that is not the last; DDP with find_unused_parameters=True is under join(); or, in
                the backward pass, the last one ran under no_sync().
        """
        if self._micro:
            raise RuntimeError(places.NESTED)
        self._check_place(self.model)
        if getattr(self.model, "find_unused_parameters", False):
            places.check_joined(
                self.model,
                "lowbit.accumulate under find_unused_parameters=True",
                "leave out one of the two, or give each rank as many micro-batches",
            )
        enqueued = getattr(self.model, "_static_graph_delay_allreduce_enqueued", True)
        if not last and getattr(self.model, "static_graph", False) and not enqueued:
            raise RuntimeError(
                "DistributedDataParallel(static_graph=True) must reduce in its first backward "
                "pass; begin with one micro-batch in `with accumulator.micro(last=True)`"
            )
        self._micro = "last" if last else "more"
        if self._recovery:
            self._recovery.began = False
        try:
            if not self._begun:
                self._move_aside()
            waits: Any = self.model.no_sync if self._ddp and not last else contextlib.nullcontext
            with waits():
                yield
            if last:
                self.finish()
        except BaseException:
            self.reset()
            raise
        finally:
            self._micro = ""

    def finish(self) -> None:
        """Moves the accumulated sums to `p.grad`. `micro(last=True)` calls it.

        Parameters that no micro-batch used keep their `p.grad`.

        Raises:
            RuntimeError: under DDP, outside `micro(last=True)`.
        """
        if self._ddp and self._micro != "last":
            raise RuntimeError(
                "under DistributedDataParallel the last micro-batch reduces the sum: run it in "
                "`with accumulator.micro(last=True)`"
            )
        with torch.no_grad():
            if self._ddp:
                self._reduce_left()
            else:
                self._hand_over()
        self._begun = False
        for held in self._params.values():
            held.finished = held.added
            held.end()

    def reset(self) -> None:
        """Discards what was added since the last step, so that the step can be run again.
        Call it on every rank.

        It also restores the counts that random bits depend on. `micro` calls it if an exception
        leaves it. A `p.grad` that a last micro-batch has already set stays: clear it with
        `zero_grad()`. One that the step's first `micro` found is discarded too: it was added, and a
        copy of it would take the memory of all gradients again.
        """
        self._begun = False
        for held in self._params.values():
            held.clear()
            held.added = held.finished
            held.end()
        for stepper in places.steppers_of(self._params):
            stepper.give_up()
        # Under no_sync the DDP reducer takes no part in a pass.
        if self._recovery and (not self._ddp or (self._micro == "last" and self._recovery.began)):
            self._recovery.raised()

    @torch.no_grad()
    def _move_aside(self) -> None:
        """Makes gradients from before the step the initial sums; left in `p.grad`,
        they would be divided too.
        """
        self._begun = True
        for p, held in self._params.items():
            if p.grad is None or held.buffer is not None:
                continue
            grad = sharding.dense_gradient(p).detach().contiguous()
            held.buffer = grad.to(self.dtype, copy=self._in_buckets)
            if ops.param_format(self.format)["compensation"]:
                held.compensation = [torch.zeros_like(held.buffer)]
            p.grad = None

    def _reduce_left(self) -> None:
        """Reduces, under DDP, sums without a gradient in the last micro-batch;
        the reducer took zeros for them.
        """
        if getattr(self.model, "find_unused_parameters", False):
            group: Any = self.model.process_group
            params = list(self._params)
            left = torch.tensor(
                [self._params[p].buffer is not None for p in params], device="cpu"
            ).int()
            left = left.to(sharding.local(params[0]).device)
            sharding.reduce_over([(left, group, "max")])  # a sum on any rank is reduced on all
            for p, any_has in zip(params, left.tolist(), strict=True):
                if any_has:
                    buffer = self._params[p].buffer
                    mine = (
                        torch.zeros_like(p) if buffer is None else buffer.to(p.dtype).view(p.shape)
                    )
                    sharding.average_over(mine, group)
                    p.grad = mine if p.grad is None else p.grad.add_(mine)
        for held in self._params.values():
            held.clear()
        for stepper in places.steppers_of(self._params):
            stepper._reduced()  # it waited for the reduction

    @torch.no_grad()
    def add(self) -> None:
        """Moves every existing `p.grad` into the buffers.
        Call it after each backward pass if `hooks=False`.

        Raises:
            RuntimeError: a parameter was unfrozen or added since.
        """
        places.check_trained(self.model, self._names, self._frozen)
        for group in by_bytes(p for p in self._params if p.grad is not None):
            self._take(*group)
            for p in group:
                p.grad = None

    def remove(self) -> None:
        """Removes the hooks. Sums that were not returned as `p.grad` are lost."""
        for handle in self._handles:
            handle.remove()
        for p, held in self._params.items():
            held.clear()
            held.end()
            places.accumulators.pop(p, None)
            if self._any_dtype(p) and p.grad_dtype is None and p.grad is None:
                p.grad_dtype = p.dtype
        self._handles = []

    def state_dict(self) -> dict[str, Any]:
        """The number of additions so far, by parameter name without the prefixes of wrappers;
        random bits depend on it.

        It does not include the buffers, so save it between steps.
        """
        return {"added": {name: held.added for name, held in self._named().items()}}

    def _named(self) -> dict[str, HeldGradient]:
        held = {clean_name(held.name): held for held in self._params.values()}
        if len(held) == len(self._params):
            return held
        return {held.name: held for held in self._params.values()}  # "module" is a layer's own name

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the counts of `state_dict`, so that random bits continue where it was taken.

        Raises:
            KeyError: it lacks a parameter. Nothing has changed then.
        """
        held = self._named()
        given = {name: int(count) for name, count in state_dict["added"].items()}
        added = {clean_name(name): count for name, count in given.items()} | given
        if lacking := held.keys() - added.keys():
            raise KeyError(
                f"this state of an accumulator has no count for {some(sorted(lacking))}; it is of "
                "another model, or of other trained parameters"
            )
        for name, one in held.items():
            one.added = one.finished = added[name]

    # Backward pass

    def _note_sync(self, model: Any, _: Any) -> None:
        if torch.is_grad_enabled():
            self._unreduced = not model.require_backward_grad_sync

    @torch.no_grad()
    def _hook(self, p: Tensor) -> None:
        if p.grad is None:
            return
        places.wait_for_copy(p)
        if self._ddp and not self._micro:
            raise RuntimeError(
                "a backward pass under DistributedDataParallel ran outside `with "
                "accumulator.micro(last=...)`, where its reducer would run for every micro-batch, "
                "or reduce gradients that were already moved; run each micro-batch inside it"
            )
        if self._micro == "last" and self._unreduced:
            raise RuntimeError(
                "the forward pass of the last micro-batch ran under no_sync() of "
                "DistributedDataParallel, so each rank would keep its own gradients; leave "
                "no_sync() out: `with accumulator.micro(last=False)` enters it itself"
            )
        held = self._params[p]
        if self._micro == "last" and held.handed:
            if held.scaled is None:
                raise RuntimeError(
                    f"{held.name!r} got a second gradient in the last micro-batch, after its "
                    "average was reduced or handed over: run one backward pass in it, and use "
                    "checkpoint(use_reentrant=False) for a layer that is used twice"
                )
        elif self._micro != "last":
            self._take(p)
            p.grad = None
        elif (
            held.buffer is not None
            or self.scale != 1.0
            or (self._any_dtype(p) and sharding.local(p.grad).dtype != self.dtype)
        ):  # otherwise it is the only gradient and stays unchanged
            self._take(p)
            p.grad = None
            p.grad = self._handed(p)
            held.clear()
            if self.scale != 1.0:
                held.handed = True
                if not (self._ddp or self._fsdp2):  # what else comes, torch adds to it
                    held.divide_later(p, self.scale)

    def _take(self, *params: Tensor) -> None:
        """Adds the gradients to their buffers, in one call for all that have one."""
        added: list[tuple[HeldGradient, Tensor]] = []
        for p in params:
            held, grad = self._params[p], sharding.dense_gradient(p)
            if grad.device.type not in ("cpu", "cuda"):
                raise NotImplementedError(
                    "lowbit.accumulate supports the CPU and CUDA, but the gradient of "
                    f"{held.name!r} is on {grad.device}"
                )
            grad = grad.detach().contiguous()
            if held.buffer is None:
                if ops.param_format(self.format)["compensation"]:
                    held.compensation = [torch.zeros_like(grad, dtype=torch.bfloat16)]
                if self.scale == 1.0 and grad.dtype == self.dtype:  # the gradient itself is the sum
                    held.buffer = grad.clone() if self._in_buckets else grad
                    held.added += 1
                    continue
                held.buffer = torch.zeros_like(grad, dtype=self.dtype)
            added.append((held, grad))
        add_all(added, self.format, self.scale, self.seed)

    def _handed(self, p: Tensor) -> Tensor:
        """The buffer as p's gradient: its shape, placement and, if p requires it, dtype."""
        buffer = self._params[p].buffer
        assert buffer is not None
        if not self._any_dtype(p):
            buffer = buffer.to(p.dtype)
        return sharding.like(p, buffer.view(sharding.local(p).shape), p.shape)

    def _hand_over(self) -> None:
        for p, held in self._params.items():
            if held.buffer is not None:
                p.grad = None
                p.grad = self._handed(p)
                held.clear()
