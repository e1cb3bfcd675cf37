"""Steps captured in a CUDA graph."""

import torch


def captured(first, step):
    """The graph of `step()`, behind `first()` on a stream of its own as torch asks of what comes
    before a capture: it loads kernels and makes scratch.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
