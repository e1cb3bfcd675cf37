"""Whether a run fits on one card: the peak of each phase of a step."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowbit.gradients.causal_loss import refusal
from lowbit.planning.peers import PEERS
from lowbit.planning.trace import Loss, Moment, Passes, causal_step, trace
from lowbit.planning.weights import Weight

# What a card's memory holds besides tensors: the context of CUDA with its kernels, and gaps between
# blocks of torch's allocator. A rule of thumb, no measurement.
CONTEXT, GAPS = 1 << 29, 0.05

# What may make a run fit, the cheapest first: arguments of `estimate`.
CHANGES: tuple[tuple[str, Any], ...] = (
    ("loss_chunk", 512),
    ("checkpointing", True),
    ("step_in_backward", True),
    ("state_format", "4bit"),
    ("state_memory", "pinned"),
    ("micro_batch", 1),
)


@dataclass(frozen=True)
class Setting:
    """How a step runs."""

    step_in_backward: bool = False
    micro_batch: int = 1
    context: int | None = None
    checkpointing: bool = False
    loss_chunk: int | None = None
    waiting: int = 0  # bytes of gradients that wait for steps beside the backward pass

    def __str__(self) -> str:
        parts = [] if self.context is None else [f"{self.micro_batch} x {self.context} tokens"]
        parts += ["checkpointed activations"] if self.checkpointing else []
        parts += [f"loss in chunks of {self.loss_chunk}"] if self.loss_chunk is not None else []
        parts += ["gradients released"] if self.step_in_backward else []
        parts += [f"up to {self.waiting / 2**20:.0f} MiB of them waiting"] if self.waiting else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Plan:
    """The bytes of one library: what stays on the card, the peaks of the phases, the host's."""

    title: str
    weights: int
    state: int  # on the card
    host: int  # state, and whatever else the library keeps there
    phases: Mapping[str, Moment]  # forward, backward, step: what comes to weights and state
    note: str = ""

    def total(self, phase: str) -> int:
        """Bytes on the card at the peak of a phase."""
        return self.weights + self.state + self.phases[phase].total

    @property
    def worst(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes on the card at the peak of a step."""
        return self.total(self.worst)


@dataclass(frozen=True)
class Fit:
    """The plans of a run on one card, by library, and what would make lowbit's fit."""

    setting: Setting
    device_memory: int | None
    largest_gradient: int
    plans: dict[str, Plan]
    # Arguments of `estimate` that make lowbit fit; empty if it fits, None if nothing known does.
    changes: dict[str, Any] | None

    @property
    def usable(self) -> int | None:
        """Bytes of the card that tensors can take, after a reserve for CUDA and gaps."""
        return None if self.device_memory is None else usable(self.device_memory)

    def fits(self, library: str = "lowbit") -> bool:
        """Whether a library's peak fits; True where no memory was given."""
        return self.usable is None or self.plans[library].peak <= self.usable

    def as_dict(self) -> dict[str, Any]:
        """Numbers in bytes, for JSON."""
        return {
            **vars(self.setting),
            "device_memory": self.device_memory,
            "usable": self.usable,
            "largest_gradient": self.largest_gradient,
            "changes": self.changes,
            "plans": {
                name: {
                    "title": plan.title,
                    "weights": plan.weights,
                    "state": plan.state,
                    "host": plan.host,
                    "phases": {
                        phase: {**vars(moment), "total": plan.total(phase)}
                        for phase, moment in plan.phases.items()
                    },
                    "peak": plan.peak,
                    "fits": self.fits(name),
                    "note": plan.note,
                }
                for name, plan in self.plans.items()
            },
        }


def fit(
    model: nn.Module,
    dtype: torch.dtype | None,
    setting: Setting,
    device_memory: int | None,
    loss: Loss | None,
    ours: Callable[[Mapping[str, Any]], tuple[str, int, int]],
    weights: int,
    trained: Sequence[Weight],
) -> Fit:
    """Traces a step and adds up its phases.

    Args:
        loss: of a step on the meta device; None takes that of a causal language model.
        ours: lowbit's title and its state in bytes on the card and on the host, for changed options
            of the optimizer.
        weights: bytes of parameters and buffers.
        trained: the parameters that are trained.
    """
    _check(model, setting, loss)

    @functools.cache
    def passes(micro_batch: int, checkpointing: bool, loss_chunk: int | None) -> Passes:
        context = setting.context
        step = loss
        if step is None:
            assert context is not None
            step = causal_step(micro_batch, context, checkpointing, loss_chunk)
        return trace(model, step, dtype)

    @functools.cache
    def state(options: tuple[tuple[str, Any], ...]) -> tuple[str, int, int]:
        return ours(dict(options))

    @functools.cache
    def possible(options: tuple[tuple[str, Any], ...]) -> bool:
        try:
            state(options)
        except (TypeError, ValueError):  # the optimizer does not take them, such as AdamW8bit's
            return False
        return True

    def plan(options: Mapping[str, Any], how: Setting) -> Plan:
        title, card, host = state(tuple(options.items()))
        run = passes(how.micro_batch, how.checkpointing, how.loss_chunk)
        moments = phases(run, how.step_in_backward, how.waiting)
        return Plan(title, weights, card, host, moments)

    now = passes(setting.micro_batch, setting.checkpointing, setting.loss_chunk)
    plans = {"lowbit": plan({}, setting)}
    sizes = [(w.values, w.of(dtype).element_size()) for w in trained]
    for name, peer in PEERS.items():
        card = peer.shared + sum(peer.card(*each) for each in sizes)
        host = sum(peer.host(*each) for each in sizes)
        moments = phases(now, setting.step_in_backward and peer.releases)
        plans[name] = Plan(peer.title, weights, card, host, moments, peer.note)
    found: dict[str, Any] | None = {}
    if device_memory is not None:
        fixed: Sequence[str] = _OF_LOSS
        if loss is None:
            can = {
                "loss_chunk": refusal(model) is None,
                "checkpointing": getattr(model, "supports_gradient_checkpointing", False),
            }
            fixed = [name for name, possible in can.items() if not possible]
        found = _what_helps(plan, possible, setting, usable(device_memory), fixed)
    return Fit(setting, device_memory, now.largest_gradient, plans, found)


def phases(run: Passes, released: bool, waiting: int = 0) -> dict[str, Moment]:
    """The peaks of a step's phases, above weights and state."""
    return {
        "forward": run.forward,
        "backward": run.backward(waiting if released else math.inf),
        "step": Moment(0, 0 if released else run.trained),
    }


def usable(device_memory: int) -> int:
    """What tensors can take of a card's memory."""
    return max(0, int(device_memory * (1 - GAPS)) - CONTEXT)


def _what_helps(
    plan: Callable[[Mapping[str, Any], Setting], Plan],
    possible: Callable[[tuple[tuple[str, Any], ...]], bool],
    setting: Setting,
    limit: int,
    fixed: Sequence[str],
) -> dict[str, Any] | None:
    """The fewest and cheapest changes with which lowbit fits."""
    own = vars(setting)
    known = [
        (name, value) for name, value in CHANGES if own.get(name) != value and name not in fixed
    ]
    for chosen in _subsets(known):
        changes = dict(chosen)
        how = replace(setting, **{k: v for k, v in changes.items() if k in own})
        options = {k: v for k, v in changes.items() if k not in own}
        if possible(tuple(options.items())) and plan(options, how).peak <= limit:
            return changes
    return None


_OF_LOSS = ("loss_chunk", "checkpointing", "micro_batch")  # which a loss of the caller decides


def _subsets(known: Sequence[tuple[str, Any]]) -> Iterable[tuple[tuple[str, Any], ...]]:
    """All choices, those of few changes first."""
    return itertools.chain.from_iterable(
        itertools.combinations(known, count) for count in range(len(known) + 1)
    )


def _check(model: nn.Module, setting: Setting, loss: Loss | None) -> None:
    if setting.waiting and not setting.step_in_backward:
        raise ValueError("waiting= is of gradients that are released: give step_in_backward=True")
    for name in ("micro_batch", "context", "loss_chunk"):
        value = getattr(setting, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} should be at least 1 but is: {value}")
    if loss is not None:
        default = Setting()
        given = [n for n in (*_OF_LOSS, "context") if getattr(setting, n) != getattr(default, n)]
        if given:
            raise ValueError(
                f"{', '.join(given)} say how the loss of a model of transformers is computed, and "
                "loss= computes its own: leave them out, and do in loss= what they say"
            )
        return
    if not hasattr(getattr(model, "config", None), "model_type"):
        raise ValueError(
            f"{type(model).__name__} is not a model of transformers: pass loss=, which gets the "
            "model on the meta device and returns the loss of a micro-batch"
        )
    if setting.context is None:
        raise ValueError("context= is missing: the number of tokens in a sequence")
    if setting.loss_chunk is not None and (reason := refusal(model)) is not None:
        raise ValueError(f"loss_chunk= counts the memory of lowbit.causal_loss, which {reason}")
