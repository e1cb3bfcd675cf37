"""Whether the host waits for the GPU."""

import time
from contextlib import contextmanager

import torch

CYCLES = 3_000_000_000  # more than any GPU's clock ticks in a second


@contextmanager
def not_waited_for(seconds=0.5):
    """What is done inside must come back while the current stream is still busy with what was
    queued before it, for `seconds` at least (more at a slow clock); a step takes the host some
    milliseconds. torch raises where it waits by itself; CUDA's own calls do not, so an event behind
    the busy kernel tells.

    Yields that event. AssertionError where it is over when the block ends: what came behind it may
    be over or not.
    """
    torch.cuda.synchronize()
    torch.cuda._sleep(int(seconds * CYCLES))
    over = torch.cuda.Event()
    over.record()
    began, mode = time.perf_counter(), torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield over
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    waited, took = over.query(), time.perf_counter() - began
    assert not waited, (
        f"the host waited for the GPU: it was busy for {seconds} s or more, and the host came back "
        f"after {took:.2f} s (or the host itself is that slow)"
    )
