"""What torch really allocates on the CPU: every allocation and release, but for the scratch of
products and of attention.

What a product allocates and releases within one call belongs to the library that this processor's
instructions choose: with AVX-512 and no bfloat16, oneDNN's products hold a copy in float32, with
AVX2 torch's own hold nothing. An estimate knows neither.
"""

import bisect
import contextlib
import json
import pathlib
import tempfile

from torch.profiler import ProfilerActivity, profile

OPAQUE = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_flash_attention")


class Allocated:
    """Bytes above those at its beginning: the highest, and those at the end."""

    peak = end = 0


@contextlib.contextmanager
def allocated():
    """Records the allocations of torch's CPU allocator in its block."""
    result = Allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield result
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    live = 0
    for size in without_scratch(events):
        live += size
        result.peak = max(result.peak, live)
    result.end = live


def without_scratch(events):
    """Bytes allocated, or released if negative, one after the other."""
    memory = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    memory.sort(key=lambda e: e["ts"])
    calls = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "cpu_op" and e["name"].startswith(OPAQUE)
    )
    began = [begin for begin, _ in calls]

    def call(event):
        """That in which it happened, or None."""
        i = bisect.bisect(began, event["ts"]) - 1
        return i if i >= 0 and event["ts"] <= calls[i][1] else None

    scratch, made = set(), {}
    for i, event in enumerate(memory):
        address, at = event["args"]["Addr"], call(event)
        if event["args"]["Bytes"] > 0:
            made[address] = (i, at)
        elif at is not None and made.get(address, (i, None))[1] == at:
            scratch |= {i, made[address][0]}
    return [e["args"]["Bytes"] for i, e in enumerate(memory) if i not in scratch]
