"""The gradient that an accumulator holds for one parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lowbit import ops, sharding
from lowbit.state.layout import stream_of
from lowbit.step.numbers import capturing


class HeldGradient:
    """The accumulated gradient of one parameter."""

    def __init__(self, p: Tensor, name: str, index: int) -> None:
        self.name = name
        self.stream = stream_of(name, index)
        self.added = 0
        self.finished = 0  # how many of `added` belong to finished steps
        self.buffer: Tensor | None = None
        self.compensation: list[Tensor] = []
        self.handed = False  # whether the running micro-batch, the last, has handed over an average
        self.scaled: tuple[Any, Any] | None = None  # what divides gradients that come after that
        self.place = _place(p, name)

    def clear(self) -> None:
        self.buffer, self.compensation = None, []

    def end(self) -> None:
        """After the last micro-batch, or one that raised."""
        self.handed = False
        if self.scaled is not None:
            self.scaled[1].remove()
            self.scaled = None

    def divide_later(self, p: Tensor, scale: float) -> None:
        """Scales what autograd adds to p.grad from here on. A hook on the tensor would scale what
        `torch.autograd.grad` returns, too.
        """
        node = get_gradient_edge(p).node  # with its hook, as long as something holds it
        handle = node.register_prehook(  # None: an undefined gradient
            lambda grads: tuple(None if g is None else g * scale for g in grads)
        )
        self.scaled = node, handle


def by_bytes(params: Iterable[Tensor], most: int = 1 << 26) -> Iterator[list[Tensor]]:
    """Groups of parameters with gradients of 64 MiB or more, and the rest.

    A group is added in one call, and its gradients are freed before the next group's buffers are
    allocated.
    """
    group: list[Tensor] = []
    size = 0
    for p in params:
        assert p.grad is not None
        group.append(p)
        size += p.grad.numel() * p.grad.element_size()
        if size >= most:
            yield group
            group, size = [], 0
    if group:
        yield group


def add_all(
    gradients: Sequence[tuple[HeldGradient, Tensor]], format: str, scale: float, seed: int
) -> None:
    """Adds gradients to their buffers, which exist,
    in one call: on a GPU one launch for up to 256 of them.

    Raises:
        RuntimeError: a CUDA graph is being captured, and the format rounds at random.
    """
    if not gradients:
        return
    added = [held for held, _ in gradients]
    if ops.param_format(format)["random"] and any(capturing(g.device) for _, g in gradients):
        raise RuntimeError(
            f"the gradient of {added[0].name!r} is rounded at random while a CUDA graph is "
            "captured: random bits follow the number of additions, which replays do not count, so "
            "all of them would draw the same; take rounding='kahan' or dtype='float32' there"
        )
    ops.accumulate(
        [held.buffer for held in added if held.buffer is not None],
        [tensor for held in added for tensor in held.compensation],
        [gradient for _, gradient in gradients],
        torch.tensor(
            [[*held.place, held.stream, held.added & 0xFFFFFFFF] for held in added], device="cpu"
        ),
        format,
        scale=scale,
        seed=seed,
    )
    for held in added:
        held.added += 1


def _place(p: Tensor, name: str) -> list[int]:
    """Rows, columns, global columns and the first element's index of the local part."""
    if sharding.is_flat(p):  # its position is unknown, so the random bits depend on the rank
        return [1, p.numel(), p.numel(), sharding.rank() << 40]
    part = sharding.part(p, f"parameter {name!r}")
    rows, cols, global_cols, first = part.place
    return (
        [1, rows * cols, rows * cols, first]
        if part.whole_rows
        else [rows, cols, global_cols, first]
    )
