"""What torch really allocates on the CPU: every allocation and release, inside kernels too."""

import contextlib
import json
import pathlib
import tempfile

from torch.profiler import ProfilerActivity, profile


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
    memory = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    live = 0
    for event in sorted(memory, key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        result.peak = max(result.peak, live)
    result.end = live
