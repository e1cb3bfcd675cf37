"""Steps that run beside the backward pass: on a stream of their own, or on a thread.

A gradient is whole when its hook runs, so its step may run at any time before something reads the
weights again. On a GPU it runs on a second stream, where the state's way over the bus does not keep
the next layer waiting. For parameters on the CPU it runs on a thread, whose operator does not hold
the interpreter's lock.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from lowbit.optim.one_step import Step
from lowbit.step.numbers import capturing

# Returns when a step that was started has ended, on whatever device; raises what it raised.
Wait = Callable[[], object]


class Beside:
    """The steps that run beside the backward pass."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: bytes of gradients that wait at once on each device. A larger gradient waits
                alone.
        """
        self.most = most
        self._lanes: dict[torch.device, Lane] = {}
        self._lock = threading.Lock()

    def start(self, device: torch.device, step: Step) -> None:
        """Launches a step that has gathered what it takes.

        Raises:
            Exception: what an earlier step raised, until `discard`.
        """
        with self._lock:  # autograd has a thread for each device
            lane = self._lanes.get(device)
            if lane is None:
                launch = Thread() if device.type == "cpu" else Stream(device)
                lane = self._lanes[device] = Lane(launch, self.most)
        lane.start(step)

    def wait(self) -> None:
        """Returns when all steps have ended, on a GPU for what the current stream does from now on.

        Raises:
            Exception: what the first step that failed raised, also at later calls: parameters are
                left unstepped. `discard` forgets it.
        """
        for lane in self._lanes.values():
            lane.wait()
        for lane in self._lanes.values():
            if lane.failed is not None:
                raise lane.failed

    def discard(self) -> None:
        """Waits, and forgets what failed."""
        for lane in self._lanes.values():
            lane.wait()
            lane.failed = None


class Lane:
    """The steps of one device, one after the other.

    Attributes:
        failed: what the first step that failed raised.
    """

    def __init__(self, launch: Thread | Stream, most: int) -> None:
        self.failed: Exception | None = None
        self._launch, self._most = launch, most
        self._started: collections.deque[tuple[Wait, int]] = collections.deque()
        self._bytes = 0

    def start(self, step: Step) -> None:
        size = sum(grad.nbytes for group in step.step_groups for grad in group.grads)
        while self._started and self._bytes + size > self._most:
            self._wait()
        if self.failed is not None:
            raise self.failed
        self._started.append((self._launch(step), size))
        self._bytes += size

    def wait(self) -> None:
        while self._started and not self._launch.in_order:
            self._wait()
        self._started.clear()
        self._bytes = 0
        self._launch.join()

    def _wait(self) -> None:
        wait, size = self._started[0]
        try:
            wait()
        except Exception as error:  # an interrupt leaves the step where it is: it still runs
            self.failed = self.failed or error
        self._started.popleft()
        self._bytes -= size


class Thread:
    """The thread that steps the parameters of a CPU."""

    in_order = False  # the host has to wait

    def __init__(self) -> None:
        self._process = -1
        self._worker: concurrent.futures.ThreadPoolExecutor | None = None

    def __call__(self, step: Step) -> Wait:
        if self._worker is None or self._process != os.getpid():  # a fork has no threads
            self._process = os.getpid()
            self._worker = concurrent.futures.ThreadPoolExecutor(1, "lowbit-steps")
        return self._worker.submit(_launched, step).result

    def join(self) -> None:
        """Every step was waited for."""


class Stream:
    """A stream of a GPU that waits for the gradients of each step."""

    in_order = True  # the device waits in the host's place

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def __call__(self, step: Step) -> Wait:
        # The gradients may belong to a third stream (under HSDP that of the reduction inside of a
        # shard group), so that no wait of the current one would keep their memory.
        for tensor in step.taken():
            if tensor.device == self._stream.device:  # a learning rate may lie on the CPU
                tensor.record_stream(self._stream)
        self._stream.wait_stream(self._module.current_stream(self._stream.device))
        with self._module.stream(self._stream):
            step.launch()
            # The host waits: torch gives memory that another stream used back after the event.
            return self._stream.record_event().synchronize

    def join(self) -> None:
        """Lets the caller's stream wait. The hooks' streams may be others: FSDP2's reduction.

        Not while a CUDA graph is captured: no step runs here then, those of before have ended, and
        to wait for what is not captured would break the capture.
        """
        if not capturing(self._stream.device):
            self._module.current_stream(self._stream.device).wait_stream(self._stream)


@torch.no_grad()
def _launched(step: Step) -> None:
    step.launch()
