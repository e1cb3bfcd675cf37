"""Where hooks on gradients are right, and which parameters have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lowbit import shard

accumulators: Any = WeakIdKeyDictionary()  # parameter -> a weak reference to its Accumulator
steppers: Any = WeakIdKeyDictionary()  # parameter -> one to the InBackward that steps it


def accumulator_of(p: Tensor) -> Any:
    """The Accumulator of a parameter, None where it has none (any more: without hooks nothing keeps one alive but its owner)."""
    made = accumulators.get(p)
    return None if made is None else made()


def stepper_of(p: Tensor) -> Any:
    """The InBackward that steps a parameter, or None."""
    made = steppers.get(p)
    return None if made is None else made()


def check_model(model: nn.Module, what: str) -> None:
    """ValueError where a DistributedDataParallel is inside of a module: who asks needs it itself."""
    if not shard.is_ddp(model) and any(shard.is_ddp(m) for m in model.modules()):
        raise ValueError(
            f"there is a DistributedDataParallel inside of this {type(model).__name__}; call {what} on that module itself"
        )


def check_free(p: Tensor, name: str, what: str, hooks: bool = True) -> None:
    """ValueError where a parameter cannot have another hook, or none at all."""
    if stepper_of(p) is not None:
        raise ValueError(
            f"{name!r} is stepped in the backward pass already, as soon as its gradient is there; call lowbit.accumulate before lowbit.step_in_backward, "
            "and each once (`remove()` takes hooks off)"
        )
    if what == "lowbit.accumulate" and accumulator_of(p) is not None:
        raise ValueError(f"{name!r} has an accumulator already; `remove()` that one first")
    if hooks and shard.is_flat(p):
        instead = (
            "use lowbit.accumulate(model, hooks=False) and call accumulator.add() behind each backward pass"
            if what == "lowbit.accumulate"
            else "step behind the backward pass, or use fully_shard (FSDP2)"
        )
        raise ValueError(
            f"{name!r} is a flat shard of FSDP1 (FullyShardedDataParallel), on which hooks never run, or run before the reduction; {instead}"
        )


def check_place(model: nn.Module, *_: Any, what: str, names: Mapping[str, Tensor]) -> None:
    """A forward pre-hook: RuntimeError where a model was wrapped or sharded after its parameters got their hooks."""
    if shard.inside_ddp(model):
        raise RuntimeError(
            f"{what} was called on a module inside DistributedDataParallel, whose reducer would average what the hooks have taken "
            "away; call it on the DistributedDataParallel module"
        )
    now = {id(p) for p in model.parameters()}
    for name, p in names.items():
        if id(p) not in now and not shard.is_sharded(p):
            sharded = shard.is_fully_sharded(model)
            why = f"fully_shard was called after {what}" if sharded else "the model has another parameter there now"  # fmt: skip
            raise RuntimeError(
                f"the hook on {name!r} will never run: {why}; call {what} on the model as it is trained"
            )
