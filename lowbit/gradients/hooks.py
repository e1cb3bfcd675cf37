"""Checks for hooks on gradients, the registry of parameters that have one,
and recovery after a failed pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lowbit import sharding
from lowbit.config.hints import warn_once
from lowbit.config.overrides import clean_name
from lowbit.state.settings import some
from lowbit.step.numbers import capturing

accumulators: Any = WeakIdKeyDictionary()  # parameter -> weak reference to its Accumulator
steppers: Any = WeakIdKeyDictionary()  # parameter -> weak reference to its InBackward
offloaded: Any = WeakIdKeyDictionary()  # parameter -> weak reference to FSDP2's record of it
NESTED = "micro-batches do not nest: leave one `accumulator.micro` before entering the next"


def accumulator_of(p: Tensor) -> Any:
    """The Accumulator of a parameter, or None. Without hooks only its owner keeps it alive."""
    made = accumulators.get(p)
    return None if made is None else made()


def stepper_of(p: Tensor) -> Any:
    """The InBackward that steps a parameter, or None."""
    made = steppers.get(p)
    return None if made is None else made()


def steppers_of(params: Iterable[Tensor]) -> set[Any]:
    """The InBackwards that step any of these parameters."""
    return {stepper_of(p) for p in params} - {None}


def warn_of_early_steps(params: Sequence[Tensor]) -> None:
    """Warns, once for each optimizer, if the backward pass has stepped some of these parameters, so
    that their gradients are gone and not clipped by a max_norm of its own either.
    """
    if not steppers or torch.compiler.is_compiling():
        return
    for stepper in steppers_of(params):
        gone = sum(p in stepper.opt.stepped_early for p in params)
        if gone and stepper.max_norm is None:
            warn_once(
                stepper.opt.warned,
                "clipped late",
                f"{gone} of these gradients are not clipped: lowbit.step_in_backward has used and "
                "freed them in the backward pass. step_in_backward(model, opt, "
                "max_norm=...) clips them as it uses them, by the norm of the step before",
            )


def wait_for_copy(p: Tensor) -> None:
    """Returns when a gradient has arrived on the CPU. Under CPUOffloadPolicy torch 2.12 and earlier
    run hooks while the copy from the GPU is still under way.
    """
    record = offloaded[p]() if p in offloaded else None
    event = None if record is None else record.grad_offload_event
    if event is not None:
        event.synchronize()


def check_model(model: nn.Module, what: str) -> None:
    """Notes which gradients FSDP2 copies to the CPU.

    Raises:
        ValueError: a DistributedDataParallel is nested in the model: the hooks must know of its
            reducer. Or the model is under composable DDP, whose reducer they cannot know.
    """
    if sharding.is_replicated(model):
        raise ValueError(_replicated(model, what))
    for p, record in sharding.offloaded(model):
        offloaded[p] = weakref.ref(record)
    if not sharding.is_ddp(model) and any(sharding.is_ddp(m) for m in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} contains a DistributedDataParallel; call {what} on that "
            "module itself"
        )


def _replicated(model: nn.Module, what: str) -> str:
    """What to do about a model under composable DDP."""
    return (
        f"torch.distributed._composable.replicate reduces gradients of this {type(model).__name__} "
        f"after the hooks of {what} have used them, so each rank would train alone; wrap it in "
        "DistributedDataParallel or fully_shard instead"
    )


def check_buckets(model: Any, params: Mapping[Tensor, Any]) -> None:
    """Raises ValueError if DDP reduces a parameter outside its buckets. It reduces a buffer that
    holds the gradient, from which an accumulator would take the gradient away.
    """
    if not sharding.is_ddp(model):
        return
    delayed = {id(p) for p in getattr(model, "_delay_all_reduce_params", ())}
    names = [name for name, p in model.named_parameters() if id(p) in delayed and p in params]
    if names:
        raise ValueError(
            f"{some(names)}: lowbit.accumulate does not support delay_all_reduce_named_params of "
            "DistributedDataParallel, which reduces these parameters apart from its buckets; leave "
            "that option out, or add up in p.grad under the module's no_sync()"
        )


def check_joined(model: nn.Module, what: str, instead: str) -> None:
    """Raises RuntimeError under DDP's join(), whose ranks without inputs would leave the others
    waiting in a collective of lowbit's.
    """
    if sharding.is_joined(model):
        raise RuntimeError(
            f"{what} has collectives of its own, which DistributedDataParallel.join() does not "
            f"repeat on a rank without more inputs: {instead}. After a context of join() torch "
            "leaves it in force until `with model.join(enable=False): pass`"
        )


def check_dtype(p: Tensor, name: str) -> None:
    """Raises ValueError if gradients of a parameter's dtype cannot be added up."""
    if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name!r} is {p.dtype}: lowbit.accumulate adds up gradients of float32, bfloat16 and "
            "float16; convert the parameter, or freeze it with requires_grad_(False)"
        )


def check_free(p: Tensor, name: str, what: str, hooks: bool = True) -> None:
    """Raises ValueError if a parameter can have no hook, or no second one."""
    if stepper_of(p) is not None:
        raise ValueError(
            f"{name!r} is stepped in the backward pass already, as soon as it has a gradient; call "
            "lowbit.accumulate before lowbit.step_in_backward, and "
            "each once (`remove()` removes hooks)"
        )
    if what == "lowbit.accumulate" and accumulator_of(p) is not None:
        raise ValueError(f"{name!r} has an accumulator already; `remove()` that one first")
    if hooks and p in sharding.flats and not sharding.is_flat(p):
        raise ValueError(
            f"{name!r} is a vector of parameters that lowbit.flat.bind bound, which steps as a "
            "whole: step after the backward pass"
        )
    if hooks and sharding.is_flat(p):
        instead = (
            (
                "use lowbit.accumulate(model, hooks=False) and call accumulator.add() after each "
                "backward pass"
            )
            if what == "lowbit.accumulate"
            else "step after the backward pass, or use fully_shard (FSDP2)"
        )
        raise ValueError(
            f"{name!r} is a flat shard of FSDP1 (FullyShardedDataParallel), whose hooks never run, "
            f"or run before the reduction; {instead}"
        )


def check_first(
    params: Iterable[Tensor], stepped: Container[Tensor], names: Mapping[Tensor, str]
) -> None:
    """Raises RuntimeError if a parameter was stepped already since the last `opt.step()`."""
    for p in params:
        if p in stepped:
            raise RuntimeError(
                f"{names[p]!r} got a second gradient after it was stepped with the first one: call "
                "opt.step() after each backward pass, or opt.zero_grad() to give the step up; run "
                "all backward passes of a step but the last in `with released.hold()`; and use "
                "checkpoint(use_reentrant=False) for a layer or a weight that is used twice"
            )


def check_captured(
    max_norm: float | None, divisor: Tensor | None, params: Iterable[Tensor]
) -> None:
    """Raises RuntimeError if a CUDA graph captures a step that clips by the norm of the step
    before, and there is none: each replay reads what the capture read.
    """
    if max_norm is None or divisor is not None:
        return
    if any(capturing(p.device) for p in params):
        raise RuntimeError(
            "step_in_backward(max_norm=...) clips by the norm of the step before, and a CUDA graph "
            "captures the first step, so that no replay would clip: take a step before the capture"
        )


def check_frozen(frozen: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError if a parameter that was frozen when the accumulator was made is trained
    now: nothing divides its gradients.
    """
    for name, p in frozen.items():
        if p.requires_grad:
            raise RuntimeError(
                f"{name!r} was frozen when lowbit.accumulate was called and is trained now: torch "
                "would add up its gradients, undivided; call `remove()` and lowbit.accumulate "
                "again after requires_grad_"
            )


def check_trained(
    model: nn.Module, names: Mapping[str, Tensor], frozen: Mapping[str, Tensor]
) -> None:
    """Raises RuntimeError if the model trains a parameter that the accumulator did not find, or
    found frozen.

    Args:
        names: the parameters that it adds up, by name.
        frozen: those that were frozen when it was made, by name.
    """
    check_frozen(frozen)
    known = {id(p) for p in (*names.values(), *frozen.values())}
    if all(id(p) in known or not p.requires_grad for p in model.parameters()):
        return
    before = {clean_name(name) for name in (*names, *frozen)}  # FSDP2 may have gathered them
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in known and clean_name(name) not in before:
            raise RuntimeError(
                f"{name!r} was added to the model after lowbit.accumulate was called: torch would "
                "add up its gradients, undivided; call `remove()` and lowbit.accumulate again"
            )


def check_place(
    model: nn.Module,
    *_: Any,
    what: str,
    names: Mapping[str, Tensor],
    frozen: Mapping[str, Tensor] | None = None,
) -> None:
    """Forward pre-hook: raises RuntimeError if the model was wrapped or sharded after its
    parameters got hooks, or, unless `frozen` is None, as `check_trained` does.
    """
    # Validation may continue, and a compiler would trace all of it.
    if frozen is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        check_trained(model, names, frozen)
    if sharding.is_replicated(model):
        raise RuntimeError(_replicated(model, what))
    if sharding.inside_ddp(model):
        raise RuntimeError(
            f"{what} was called on a module inside DistributedDataParallel, whose reducer would "
            "average gradients that the hooks have already moved; call it on the "
            "DistributedDataParallel module"
        )
    now = {id(p) for p in model.parameters()}
    for name, p in names.items():
        if id(p) not in now and not sharding.is_sharded(p):
            sharded = sharding.is_fully_sharded(model)
            why = (
                f"fully_shard was called after {what}"
                if sharded
                else "the model has another parameter there now"
            )
            raise RuntimeError(
                f"the hook on {name!r} will never run: {why}; call {what} "
                "on the model as it is trained"
            )


class Recovery:
    """Recovery of DistributedDataParallel or FSDP2 after a pass that raised on every rank;
    the next pass can then run.

    DDP recovers in the next forward pass: its ranks must act together,
    and a rank that exits never gets there.

    Attributes:
        first: whether the last pass was the first of a static graph, which reduces at its end.
        began: set by a forward pass, cleared by the owner.
    """

    def __init__(self, model: nn.Module, params: Iterable[Tensor]) -> None:
        self._model, self._params, self._ddp = model, list(params), sharding.is_ddp(model)
        self._raised = self.first = False
        self.began = False
        self.handle = model.register_forward_pre_hook(self._before_forward, prepend=True)

    def raised(self) -> None:
        """Records that the last pass raised."""
        self._raised = self._ddp or not sharding.reset_fully_sharded(self._model)

    def _before_forward(self, *_: Any) -> None:
        if self._raised:
            self._recover()
        self.began = True
        static = getattr(self._model, "static_graph", False)
        self.first = static and not self._model._static_graph_delay_allreduce_enqueued

    def _recover(self) -> None:
        if self.first:
            raise RuntimeError(
                "the first backward pass of this DistributedDataParallel(static_graph=True) raised "
                "while its reducer counted gradients, and torch cannot restart that pass; wrap the "
                "model again, and build the optimizer and hooks from the new wrapper"
            )
        now = {id(p) for p in self._model.parameters()}
        if self._ddp:
            sharding.reset_reducer(self._model)
        elif any(id(p) not in now for p in self._params):
            raise RuntimeError(
                "a pass under fully_shard (FSDP2) raised and left parameters unsharded, and this "
                "torch cannot reshard them: FSDPModule.reset_iter_state needs torch 2.13 or later; "
                "load the last checkpoint into a new model"
            )
        self._raised = False
