"""Who races. Add a class here, and every table has its row."""

from bench.contestant import Contestant
from bench.ours import (
    Avx2,
    Eight,
    EightInGraph,
    EightWide,
    Factored,
    Floats,
    Four,
    Kahan,
    Managed,
    Pinned,
    Split,
    Unpopular,
)
from bench.peers import (
    Adafactor8bit,
    Bitsandbytes,
    Copy,
    DeepSpeed,
    Eager,
    FlashOptim,
    Torch,
    Torchao,
    Torchastic,
    TorchBfloat16,
    TorchInGraph,
)

# The first is what ratios are to; the copy is the other measure.
ALL: tuple[type[Contestant], ...] = (
    Torch, TorchInGraph, Eight, EightInGraph, Four, Floats, Kahan, Split, EightWide, Factored, Unpopular, Avx2, Pinned, Managed,
    TorchBfloat16, DeepSpeed, Torchao, Bitsandbytes, FlashOptim, Adafactor8bit, Torchastic, Eager, Copy,
)  # fmt: skip
GROWING = (Torch, TorchBfloat16, Eight, Four, Copy)
