"""Steps that run beside the backward pass: on a stream of their own, or on a thread.

A gradient is whole when its hook runs, and nothing that is left of the backward pass needs the
parameter, so its step may run at any time before `opt.step()` ends. On a GPU it runs on a second
stream, where the state's way over the bus does not keep the next layer waiting. For parameters on
the CPU it runs on a thread, whose operator does not hold the interpreter's lock.
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lowbit.optim.one_step import Step


class Running(Protocol):
    """A step that was started."""

    def wait(self) -> None:
        """Returns when it has ended, or lets the stream of its gradients wait for that."""


class Beside:
    """The steps that run beside the backward pass, and the bytes of gradients that wait for them.

    Every step keeps its gradients until something waits for it. A gradient larger than the limit
    waits alone.
    """

    def __init__(self, most: int) -> None:
        """
        Args:
            most: bytes of gradients that wait at once.
        """
        self.most = most
        self._started: collections.deque[tuple[Running, int]] = collections.deque()
        self._bytes = 0
        self._lanes: dict[torch.device, Callable[[Callable[[], Step]], Running]] = {}

    def start(self, device: torch.device, size: int, gathered: Callable[[], Step]) -> None:
        """Starts a step.

        Args:
            device: of its parameters.
            size: bytes of its gradients, which only the step still has.
            gathered: makes the step, up to the call of its operators.
        """
        while self._started and self._bytes + size > self.most:
            self._wait()
        if device not in self._lanes:
            self._lanes[device] = Thread() if device.type == "cpu" else Stream(device)
        self._started.append((self._lanes[device](gathered), size))
        self._bytes += size

    def wait(self) -> None:
        """Returns when all steps have ended, on a GPU for what its streams do from now on.

        Raises:
            Exception: what the first step that failed raised, when none runs any more.
        """
        failed: BaseException | None = None
        while self._started:
            try:
                self._wait()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _wait(self) -> None:
        running, size = self._started.popleft()
        self._bytes -= size
        running.wait()


class Thread:
    """The thread that steps the parameters of a CPU, one step after the other."""

    def __init__(self) -> None:
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "lowbit-steps")

    def __call__(self, gathered: Callable[[], Step]) -> Running:
        step = gathered()  # here: the hook's thread reads what the training loop may change
        return _OnThread(self._worker.submit(_launched, step))


class Stream:
    """A stream of a GPU that waits for the gradients of each step."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def __call__(self, gathered: Callable[[], Step]) -> Running:
        origin = self._module.current_stream(self._stream.device)
        self._stream.wait_stream(origin)
        with self._module.stream(self._stream):
            step = gathered()
            step.launch()
            return _OnStream(origin, self._stream.record_event(), step)


class _OnThread:
    def __init__(self, future: concurrent.futures.Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _OnStream:
    """Keeps the gradients, whose memory belongs to the stream that made them, until that stream
    waits. torch's `record_stream` would give it back only when the host has seen the event.
    """

    def __init__(self, origin: Any, event: Any, step: Step) -> None:
        self._origin, self._event, self._step = origin, event, step

    def wait(self) -> None:
        self._origin.wait_event(self._event)


@torch.no_grad()
def _launched(step: Step) -> None:
    step.launch()
