"""What says whether the host waited for the GPU (tests/cuda/waiting.py), against a GPU that is
only a clock: it must be able to fail.
"""

import time

import pytest
import torch

from tests.cuda.waiting import CYCLES, not_waited_for

pytestmark = pytest.mark.slow


class Gpu:
    """Work behind work, at a clock of 2 GHz."""

    def __init__(self, monkeypatch):
        self.busy_until, self.mode, gpu = 0.0, 0, self

        class Event:
            def record(self):
                self.at = max(gpu.busy_until, time.perf_counter())

            def query(self):
                return time.perf_counter() >= self.at

        for name, fake in {
            "_sleep": self.sleep,
            "synchronize": self.synchronize,
            "Event": Event,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": self.set_mode,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def sleep(self, cycles):
        self.busy_until = max(self.busy_until, time.perf_counter()) + cycles / 2e9

    def synchronize(self):
        time.sleep(max(0.0, self.busy_until - time.perf_counter()))

    def set_mode(self, mode):
        self.mode = mode


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_a_step_that_does_not_wait(gpu):
    with not_waited_for(0.2) as over:
        assert gpu.mode == "error"
        gpu.sleep(CYCLES // 1000)  # the step's own kernels
    assert gpu.mode == 0 and not over.query()
    gpu.synchronize()
    assert over.query()


def test_a_step_that_waits_before_its_kernels(gpu):
    """Its own kernels still run when it comes back: that alone is no proof."""
    with pytest.raises(AssertionError, match="the host waited for the GPU"), not_waited_for(0.05):
        gpu.synchronize()
        gpu.sleep(CYCLES)


def test_what_the_step_raises_is_not_hidden(gpu):
    with pytest.raises(KeyError), not_waited_for(0.05):
        gpu.synchronize()
        raise KeyError("of the step")
    assert gpu.mode == 0
