"""Optimizer steps inside the backward pass, which free each gradient as soon as it was used."""

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
from lowbit.config.size import parsed
from lowbit.gradients import hooks as places
from lowbit.gradients.after_reducer import AfterReducer
from lowbit.gradients.beside import Beside
from lowbit.gradients.clip import NormSums, divisor_for
from lowbit.optim.one_step import Step
from lowbit.optim.optimizer import LowbitOptimizer
from lowbit.state.reduce_groups import reduce_groups
from lowbit.step.numbers import capturing
from lowbit.step.presence import is_cut_batch, waits_for_others
from lowbit.step.versions import raise_versions, versioned


def step_in_backward(
    model: nn.Module,
    opt: LowbitOptimizer,
    *,
    scaler: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    overlap: bool = False,
    waiting: int | str | None = None,
) -> InBackward:
    """Steps each parameter as soon as the backward pass has its gradient, and frees the gradient.

    The training loop does not change:

        lowbit.step_in_backward(model, opt)
        ...
        loss.backward()   # steps
        opt.step()        # ends the step: parameters without a hook, the norm for the next step
        scheduler.step()

    The result has the bits of a step after the backward pass. On FSDP2 call it after `fully_shard`;
    the step runs once a gradient's shard has been reduced; sharded experts, [E, H, D], whose rule
    reduces over ranks are stepped by `opt.step()`, which agrees on who has a gradient. Under
    DistributedDataParallel, which keeps its buckets allocated anyway, all parameters are stepped
    when the reducer has finished; those of a static graph's first pass, by `opt.step()`. With
    `lowbit.accumulate`, called first, the last micro-batch steps. Without it, run all backward
    passes of a step but the last in `with released.hold():`, where `released` is the returned
    object.

    Args:
        model: the model as it is trained.
            `opt.step()` steps parameters of `opt` that are not in it.
        opt: an optimizer of lowbit with parameters of the model.
        scaler: the torch.amp.GradScaler that scales the loss; None by default. Call
            `scaler.step(released)` instead of `opt.step()`, then `scaler.update()`. A parameter
            whose gradient is not finite is not stepped. The others are, since most of them have
            already been stepped when it is found.
        max_norm: clips by the norm of the *previous* step's gradients; None (default) does not
            clip. This step's norm is known only after its first gradients were used. Gradients are
            divided by max(1, (previous norm + 1e-6) / max_norm), in the first step by 1. Unlike
            `clip_grad_norm_`, this clips a sudden large gradient one step late. A checkpoint keeps
            that norm by `state_dict()` of what this returns.
        norm_type: of that norm; 2 by default, positive.
        overlap: runs steps beside the rest of the backward pass, with the same bits; False by
            default. On a GPU they run on a second stream: worth it where state lies in the host's
            memory (`state_memory="pinned"`). Parameters on the CPU are stepped by a thread: worth
            it where the CPU is idle meanwhile, as under FSDP2 with CPUOffloadPolicy on GPUs.
            Read weights only after `opt.step()`, or in the model's own forward pass, which wait;
            so do the optimizer's `state_dict`, `load_state_dict` and `stats`. What a step raised,
            these raise, until `reset()`. Parameters whose step reduces over ranks or takes
            several passes are stepped as without it.
        waiting: bytes of gradients that wait for their steps with `overlap` on each device, a
            number or such as "1GiB"; None (default) is "256MiB". A larger gradient waits alone.
            Under FSDP2 the gradients of a unit are freed together.

    Returns:
        An `InBackward`, which has `hold`, `reset`, `remove` and the attribute `norm`. A model that
        is not used any more is freed after `remove()` alone: torch keeps what has such hooks.

    Raises:
        TypeError: the optimizer belongs to another library.
        ValueError: FSDP1 or composable DDP (`replicate`), whose hooks never run or run before the
            reduction; a parameter that is already stepped in the backward pass; an optimizer
            without a parameter of the model; a scaler with sharded experts; a negative max_norm; a
            norm_type that is not positive; overlap under DistributedDataParallel, whose reducer
            ends with the backward pass; or a `waiting` that is not a size, or without overlap.
        RuntimeError: in the backward pass, where a parameter's gradient comes in two parts, of
            which the first was used already: a weight that is used twice under
            `checkpoint(use_reentrant=True)`, or a second backward pass without `hold`.
    """
    if not isinstance(opt, LowbitOptimizer):
        raise TypeError(f"step_in_backward takes an optimizer of lowbit, not {type(opt).__name__}")
    if max_norm is not None and not max_norm >= 0.0:
        raise ValueError(f"max_norm must be at least 0, not {max_norm}")
    norm_type = float(norm_type)
    if not norm_type > 0.0:
        raise ValueError(f"norm_type must be positive, not {norm_type}")
    if overlap and sharding.is_ddp(model):
        raise ValueError(
            "overlap=True has nothing to run beside under DistributedDataParallel: its gradients "
            "are reduced when the backward pass ends. Leave it out, or use fully_shard (FSDP2)"
        )
    if waiting is not None and not overlap:
        raise ValueError("waiting= is of gradients that wait for their steps: give overlap=True")
    beside = Beside(parsed("256MiB" if waiting is None else waiting)) if overlap else None
    return InBackward(model, opt, scaler, max_norm, norm_type, beside)


class InBackward:
    """The handle that `step_in_backward` returns. GradScaler accepts it as an optimizer.

    Attributes:
        norm: of the last whole step's gradients: a float32 tensor of no dimensions,
            or None without max_norm.
        held: whether a backward pass adds up gradients and steps nothing, as inside `hold`.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        opt: LowbitOptimizer,
        scaler: Any,
        max_norm: float | None,
        norm_type: float,
        beside: Beside | None = None,
    ) -> None:
        self.opt, self.scaler, self.max_norm, self.norm_type = opt, scaler, max_norm, norm_type
        self.norm: Tensor | None = None
        self._model = model
        self._ddp = sharding.is_ddp(model)
        self._beside = beside
        self._divisor: Tensor | None = None
        self._sums = NormSums(norm_type)
        self._found: dict[torch.device, Tensor] = {}
        self.held = self._begun = False
        self._reducer = AfterReducer(model, self._reduced)
        self._handles: list[Any] = []
        self._names: dict[Tensor, str] = {}  # of the parameters with a hook
        self._groups: dict[Tensor, int] = {}  # the number of each parameter's group in this step
        places.check_model(model, "lowbit.step_in_backward")
        own = {id(p): name for name, p in model.named_parameters()}
        late = self._late(own)
        for p in (p for group in opt.param_groups for p in group["params"]):
            if p.requires_grad and id(p) in own and p not in late:
                places.check_free(p, own[id(p)], "lowbit.step_in_backward")
                self._names[p] = own[id(p)]
        if not self._names and not late:
            raise ValueError(
                "the optimizer has no parameter of this model; build it after the model is sharded"
            )
        for p in self._names:
            places.steppers[p] = weakref.ref(self)
            hook = self._after_reducer if self._ddp else self._hook
            self._handles.append(p.register_post_accumulate_grad_hook(hook))
        names = {name: p for p, name in self._names.items()}
        check = functools.partial(places.check_place, what="lowbit.step_in_backward", names=names)
        self._handles.append(model.register_forward_pre_hook(check, prepend=True))
        self._recovery = places.Recovery(model, self._names)
        self._handles.append(self._recovery.handle)
        self._handles.append(opt.register_step_pre_hook(self._before_rest))
        if beside is not None:
            wait = opt.wait_for_steps
            self._handles.append(opt.register_state_dict_pre_hook(lambda _: wait()))
            self._handles.append(model.register_forward_pre_hook(lambda *_: wait(), prepend=True))
        self._handles.append(opt.register_step_post_hook(self._end))
        opt.steppers.append(self)

    def _late(self, own: Mapping[int, str]) -> set[Any]:
        """The sharded experts that `opt.step()` steps, because their steps reduce over ranks.

        A rank whose experts got no token runs no hook; the others would wait for it.
        """
        experts = [(p, lay) for _, p, lay in self.opt.laid_out() if is_cut_batch(p, lay)]
        if experts and self.scaler is not None:
            raise ValueError(
                "step_in_backward with a GradScaler asks all ranks about each gradient, but a "
                f"rank whose experts {own.get(id(experts[0][0]))!r} get no token has none: train "
                "in bfloat16 without a scaler, or step after the backward pass"
            )
        return {p for p, lay in experts if waits_for_others(p, lay)}

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """A context for all backward passes of a step but the last: gradients add up in `p.grad`,
        nothing is stepped.
        """
        before, self.held = self.held, True
        try:
            yield
        finally:
            self.held = before

    def reset(self) -> None:
        """Discards a step whose backward pass raised. Call it on every rank.

        Neither the norm nor the scaler then counts its gradients in the next step, and DDP and
        FSDP2 can run the next pass. Parameters that were stepped stay stepped. Clear gradients that
        were not used with `zero_grad()`. Steps beside the backward pass have ended, and what one
        raised is forgotten.
        """
        if self._beside is not None:
            self._beside.discard()
        self._recovery.raised()
        self.give_up()

    def wait(self) -> None:
        """Returns when no step runs beside the backward pass any more; raises what one raised."""
        if self._beside is not None:
            self._beside.wait()

    def give_up(self) -> None:
        """Forgets what the running step has counted; what was stepped stays stepped."""
        self._begun = False
        self.opt.stepped_early.difference_update(self._names)
        self._sums, self._found = NormSums(self.norm_type), {}

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        try:
            self.wait()  # which raises what a step raised
        finally:
            self.opt.steppers = [other for other in self.opt.steppers if other is not self]
            self.give_up()
            for p in self._names:
                places.steppers.pop(p, None)

    # Backward pass

    @torch.no_grad()
    def _hook(self, p: Tensor) -> None:
        if self.held or p.grad is None:  # None: an accumulator has taken it
            return
        places.wait_for_copy(p)
        self._step([p])

    def _step(self, params: list[Tensor]) -> None:
        places.check_first(params, self.opt.stepped_early, self._names)
        self._begin()
        params = [p for p in params if p in self._groups]
        if not params:  # they have left the optimizer, whose step would not take them either
            return
        found = None
        for p in params:
            if self.max_norm is not None:
                self._sums.add(p)
            if self.scaler is not None:
                found = self._look(p, found)
        scale = self._scale()
        now: list[Tensor] = []
        beside: list[Tensor] = []
        for p in params:
            (beside if self._runs_beside(p) else now).append(p)
        if now:
            Step(self.opt, scale, found).step([(self._groups[p], p) for p in now])
        for p in beside:
            self._start(p, scale, found)
        raise_versions(versioned(params))
        self.opt.stepped_early.update(params)
        for p in params:
            p.grad = None

    def _runs_beside(self, p: Any) -> bool:
        """Whether a parameter's step is a call of one operator on this rank alone. Collectives on
        a second thread or stream would not come in the order of other ranks.
        """
        if self._beside is None:
            return False
        lay = self.opt.layouts[p]
        alone = not (lay.home or lay.in_passes or any(reduce_groups(lay)))
        return alone and not capturing(sharding.local(p).device)

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs of this one, for a checkpoint: {"norm": the last norm, or None
        before the first step, without max_norm, or where it was not finite}.
        """
        norm = None if self.norm is None else float(self.norm)
        return {"norm": norm if norm is not None and math.isfinite(norm) else None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next step clips by that norm. Without it, the first after a resume is not clipped."""
        norm = state_dict["norm"]
        if norm is None or self.max_norm is None:
            self.norm = None
            if self._divisor is not None:
                self._divisor.fill_(1.0)
            return
        device = next((p.device for p in self._names), None)
        self.norm = torch.tensor(norm, dtype=torch.float32, device=device or "cpu")
        self._divide_by(divisor_for(self.norm, self.max_norm))

    def _divide_by(self, divisor: Tensor) -> None:
        """Sets what divides the next step's gradients: in place, where a CUDA graph reads it."""
        if self._divisor is None or self._divisor.device != divisor.device:
            self._divisor = divisor
        self._divisor.copy_(divisor)

    def _start(self, p: Any, scale: Tensor | None, found: Tensor | None) -> None:
        """Starts the step of a parameter beside the backward pass."""
        assert self._beside is not None
        step = Step(self.opt, scale, found, later=True)
        step.gather([(self._groups[p], p)])
        self._beside.start(sharding.local(p).device, step)

    def _begin(self) -> None:
        if self._begun:
            return
        places.check_captured(self.max_norm, self._divisor, self._names)
        self._begun = True
        self.opt.prepare_step()
        groups = enumerate(self.opt.param_groups)  # which may have been edited since the last step
        self._groups = {p: number for number, group in groups for p in group["params"]}
        if self.max_norm is not None:  # every rank in the same order, whichever gradients it has
            for group in self.opt.param_groups:
                for p in group["params"]:
                    self._sums.expect(p)

    def _scale(self) -> Tensor | None:
        """The divisor of the gradients, or None for 1."""
        if self.scaler is None:
            return self._divisor
        device = self._divisor.device if self._divisor is not None else next(iter(self._found))
        scale = self.scaler.scale(torch.ones((), dtype=torch.float32, device=device))
        return scale if self._divisor is None else scale * self._divisor

    def _look(self, p: Tensor, before: Tensor | None) -> Tensor:
        """1 if any rank's part of the gradient has a value that is not finite,
        else 0: float32 of no dimensions.
        """
        finite = sharding.gradient(p).isfinite().all()
        bad = (~finite).to(torch.int32).reshape(1)
        sharding.reduce_over([(bad, group, "max") for group in sharding.process_groups(p)])
        found = bad.float().reshape(())
        last = self._found.get(found.device)
        self._found[found.device] = found if last is None else torch.maximum(last, found)
        return found if before is None else torch.maximum(before.to(found.device), found)

    def _after_reducer(self, p: Tensor) -> None:
        # The accumulator calls `_reduced` after the last micro-batch. In its first pass a static
        # graph reduces at the very end, and nothing says whether a pass is nested: `opt.step()`.
        if self.held or self._recovery.first or places.accumulator_of(p) is not None:
            return
        self._reducer.queue()

    @torch.no_grad()
    def _reduced(self) -> None:
        params = [p for p in self._names if p.grad is not None]
        if params:
            self._step(params)

    # End of a step

    def step(self) -> Any:
        """Calls `opt.step()`; GradScaler calls this."""
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                setattr(self.opt, name, getattr(self, name))
        try:
            return self.opt.step()
        finally:
            for name in ("grad_scale", "found_inf"):
                if hasattr(self, name):
                    delattr(self.opt, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups for GradScaler to search for infinities: one flag per device,
        and the parameters not yet stepped.

        A flag is a tensor whose gradient is infinite if any stepped gradient was not finite.
        """
        flags = []
        for device, found in self._found.items():
            flag = torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
            flag.grad = torch.where(found > 0, torch.inf, 0.0).to(flag.dtype)
            flags.append(flag)
        rest = [p for g in self.opt.param_groups for p in g["params"] if p.grad is not None]
        return [{"params": flags + rest}]

    def _before_rest(self, opt: Any, args: Any, kwargs: Any) -> Any:
        """Clips parameters that no hook stepped in the last micro-batch like the others."""
        if self._divisor is None:
            return None
        given = kwargs.get("grad_scale")
        return args, {
            **kwargs,
            "grad_scale": self._divisor if given is None else self._divisor * given,
        }

    def _end(self, opt: Any, args: Any, kwargs: Any) -> None:
        if self.max_norm is not None:
            # even if this rank has no gradient: other ranks wait for its part of the norm
            self._begin()
            for group in opt.param_groups:  # those without a hook, which a closure may have filled
                for p in group["params"]:
                    self._sums.add(p)
            norm = self._sums.norm()
            if self.scaler is not None:
                norm = norm / self.scaler.scale(torch.ones_like(norm))
            self.norm, divisor = norm, divisor_for(norm, self.max_norm)
            # The scaler skips infinite norms; they say nothing about the next step.
            self._divide_by(torch.where(norm.isfinite(), divisor, 1.0))
        self._begun, self._found = False, {}
