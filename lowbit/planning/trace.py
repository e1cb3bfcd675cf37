"""The memory of a forward and a backward pass, traced on the meta device.

A mode sees every operator that runs, and counts the storages that live: those of a GPU or a CPU
have the same sizes and die at the same moments, because autograd and Python's reference counts end
them. What a kernel allocates inside itself is not seen.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowbit.gradients.causal_loss import causal_loss, refusal

Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Moment:
    """Bytes at one moment, above weights and state."""

    activations: int = 0  # and what operators hold while they run
    gradients: int = 0  # of parameters, and those that autograd still adds up

    @property
    def total(self) -> int:
        return self.activations + self.gradients


@dataclass(frozen=True)
class Passes:
    """The peaks of a forward and a backward pass."""

    forward: Moment
    # Of the backward pass: the peak before each gradient is whole, without those that were whole
    # before, and the bytes of that gradient.
    spans: tuple[tuple[Moment, int], ...]
    largest_gradient: int  # bytes of one parameter's
    trained: int  # bytes of all gradients

    def backward(self, waiting: float) -> Moment:
        """The peak where so many bytes of whole gradients wait for their steps, each as long as it
        may: 0 steps each at once, infinity keeps all. A larger one waits alone.
        """
        peak, held, kept = Moment(), collections.deque[int](), 0
        for moment, gradient in self.spans:
            here = Moment(moment.activations, moment.gradients + kept)
            peak = max(peak, here, key=_total)
            if waiting:
                while held and kept + gradient > waiting:
                    kept -= held.popleft()
                held.append(gradient)
                kept += gradient
        return peak


def trace(model: nn.Module, loss: Loss, dtype: torch.dtype | None = None) -> Passes:
    """Runs a forward and a backward pass of a copy on the meta device.

    Attention by `scaled_dot_product_attention` counts as a flash kernel: it keeps its inputs, its
    output and a sum for each row, but no matrix of scores. Operators that read a bool get True;
    transformers reads one to learn whether a batch is unpadded.

    Args:
        model: on any device; it is left as it is.
        loss: gets the copy and returns its loss, of no dimensions.
        dtype: of the copy's floating-point parameters and buffers; None keeps each one's.

    Raises:
        ValueError: the passes cannot run without values; the message has the reason.
    """
    copied = on_meta(model, dtype)
    params = [p for p in copied.parameters() if p.requires_grad]
    live = _Live(copied)
    hooks = [p.register_post_accumulate_grad_hook(live.release) for p in params]
    try:
        with live, _flash(), torch.device("meta"), torch.enable_grad():
            value = loss(copied)
            live.turn()
            value.backward()
    except Exception as error:  # of a model's own code, which may raise anything
        raise ValueError(
            "the forward and the backward pass cannot be traced without values "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); another dtype may "
            "help, such as bfloat16. An estimate without context, device_memory and loss counts "
            "weights, gradients and state"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    sizes = [p.numel() * p.element_size() for p in params]
    return Passes(live.forward, (*live.spans, (live.span, 0)), max(sizes), sum(sizes))


def on_meta(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy on the meta device without values; tied parameters stay tied."""
    stand_ins: dict[int, Any] = {}
    for t in [*model.parameters(), *model.buffers()]:
        to = dtype if dtype is not None and t.is_floating_point() else t.dtype
        empty = torch.empty(tuple(t.shape), dtype=to, device="meta")
        parameter = isinstance(t, nn.Parameter)
        stand_ins[id(t)] = nn.Parameter(empty, t.requires_grad) if parameter else empty
    return copy.deepcopy(model, stand_ins)


class _Live(TorchDispatchMode):
    """Counts the bytes of storages from the operator that made them until they die."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.forward = self.span = Moment()
        self.spans: list[tuple[Moment, int]] = []
        self._live = 0
        self._in_forward = True
        self._known: dict[int, Any] = {}
        held = [t.untyped_storage() for t in [*model.parameters(), *model.buffers()]]
        self._known = {id(storage): storage for storage in held}  # weights count elsewhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_local_scalar_dense" and args[0].dtype == torch.bool:
            return True
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._add(t.untyped_storage())
        self._look()
        return out

    def turn(self) -> None:
        """The forward pass is over."""
        self._in_forward = False
        self._look()

    def release(self, p: Tensor) -> None:
        """A hook of a parameter whose gradient is complete."""
        assert p.grad is not None
        grad = p.grad.numel() * p.grad.element_size()
        self._look(grad)
        p.grad = None
        self.spans.append((self.span, grad))
        self.span = Moment()

    def _add(self, storage: Any) -> None:
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self._live -= size
            self._known.pop(key, None)

        self._live += size
        self._known[key] = weakref.ref(storage, gone)

    def _look(self, gradient: int = 0) -> None:
        if self._in_forward:
            self.forward = max(self.forward, Moment(self._live), key=_total)
            return
        self.span = max(self.span, Moment(self._live - gradient, gradient), key=_total)


def _total(moment: Moment) -> int:
    return moment.total


@contextlib.contextmanager
def _flash() -> Iterator[None]:
    """Replaces the function that would choose the flash kernel on a device by that kernel.

    A mode would not do: autograd leaves it in the backward pass, where layers are computed again.
    """
    functional: Any = nn.functional
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # the kernel shares keys among heads without being asked
) -> Tensor:
    flash: Any = torch._scaled_dot_product_flash_attention_for_cpu  # type: ignore[attr-defined]
    return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


# Models of transformers


def causal_step(
    micro_batch: int, context: int, checkpointing: bool, loss_chunk: int | None
) -> Loss:
    """The loss of a causal language model of transformers on a batch of whole sequences."""

    def run(model: Any) -> Tensor:
        model.train()
        with contextlib.suppress(ValueError, AttributeError):
            model.set_attn_implementation("sdpa")
        checkpoint_layers(model, checkpointing)
        ids = torch.zeros(micro_batch, context, dtype=torch.int64)
        if loss_chunk is None and refusal(model) is not None:
            loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            return loss
        return causal_loss(model, ids, chunk=loss_chunk)

    return run


def checkpoint_layers(model: Any, on: bool) -> None:
    """Turns the recomputation of layers on or off, under its name in this transformers."""
    newer = hasattr(model, "activation_checkpointing_enable")
    word = "activation_checkpointing" if newer else "gradient_checkpointing"
    if on:
        getattr(model, f"{word}_enable")({"use_reentrant": False})
    elif getattr(model, f"is_{word}"):
        getattr(model, f"{word}_disable")()
