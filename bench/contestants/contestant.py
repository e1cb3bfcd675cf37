"""Contestants: an optimizer's step, or a copy of as many bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch


class Contestant:
    """One optimizer in a comparison. To add one, write a subclass and list it in
    bench/contestants/roster.py.

    Attributes:
        name: its name in tables.
        dtype: of weights and gradients.
        package: the required package, by import name; empty if none.
        devices: the devices it runs on.
        one_shape: whether each shape costs seconds of compilation.
            Models with many shapes then skip it.
    """

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    package: ClassVar[str] = ""
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    one_shape: ClassVar[bool] = False

    def missing(self, device: str) -> str | None:
        """The reason why it cannot run on `device`, or None."""
        if device not in self.devices:
            return f"does not run on {device}"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"the package {self.package} is not installed"
        return None

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        raise NotImplementedError

    def prepare(self, params: list[torch.nn.Parameter]) -> None:
        """Builds the optimizer and takes the first step, so that its state exists."""
        self.params = params
        self.opt = self.optimizer(params)
        with self.running():
            self.opt.step()

    def running(self) -> AbstractContextManager[Any]:
        """A context around steps, outside their timing."""
        return nullcontext()

    def step(self) -> None:
        self.opt.step()

    def state_bytes(self) -> int:
        """Bytes of the optimizer's tensors that grow with the parameters."""
        return sum(
            size_of(t)
            for p in self.params
            for name, t in tensors(self.opt.state[p])
            if t.ndim and "qmap" not in name and name not in ("stream", "shape", "step")
        )

    def traffic(self) -> int:
        """Bytes that a step reads and writes: weights and state twice, the gradient once."""
        weights = sum(p.numel() * p.element_size() for p in self.params)
        return 3 * weights + 2 * self.state_bytes()


class InGraph(Contestant):
    """A mixin for another contestant: captures its step once and replays it,
    so that host time does not count.
    """

    devices = ("cuda",)

    def prepare(self, params: list[torch.nn.Parameter]) -> None:
        super().prepare(params)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.opt.step()

    def step(self) -> None:
        self.graph.replay()


def tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of an optimizer's state at any depth,
    and the inner tensors of packing subclasses.
    """
    if isinstance(state, torch.Tensor):
        if hasattr(state, "codes") and hasattr(state, "scale"):  # torchao
            yield from ((f"{name}.codes", state.codes), (f"{name}.scale", state.scale))
        else:
            yield name, state
    elif hasattr(state, "is_quantized"):  # FlashOptim, no tensor
        if state.is_quantized():
            yield from ((f"{name}.codes", state.quantized), (f"{name}.scale", state.scales))
        else:
            yield name, state.data
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, str(key))
    elif isinstance(state, Sequence) and not isinstance(state, str):
        for value in state:
            yield from tensors(value, name)


def size_of(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()
