"""Memory of the CPU, as torch's allocator sees it."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


def named(rows, cols, count, dtype=torch.bfloat16):
    """Parameters with gradients."""
    made = []
    for i in range(count):
        p = nn.Parameter(torch.full((rows, cols), 0.01, dtype=dtype))
        p.grad = torch.full_like(p, 1e-3)
        made.append((f"layer{i}.weight", p))
    return made


def peak_bytes(run) -> int:
    """The most that torch's CPU allocator has held at one time during `run()`, above what it held
    before: every tensor, temporaries included, from the profiler's record of each allocation and
    release."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler recorded no allocation"
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def held_bytes(*tensors: torch.Tensor) -> int:
    """Of tensors, DTensors' local parts."""
    return sum(
        t.numel() * t.element_size() for t in (getattr(t, "_local_tensor", t) for t in tensors)
    )
