"""The contestants. Add a class here, and every table gets its row."""

from bench.baselines import (
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
from bench.contestant import Contestant
from bench.ours import (
    Came,
    Companded,
    Eight,
    EightAvx2,
    EightFloat32,
    EightInGraph,
    Factored,
    FactoredAdamW,
    FactoredAvx2,
    Floats,
    Four,
    FourAvx2,
    General,
    Kahan,
    Logarithmic,
    Managed,
    Pinned,
    Split,
)

# Ratios are relative to the first one and to the copy.
ALL: tuple[type[Contestant], ...] = (
    Torch, TorchInGraph, Eight, EightInGraph, Four, Floats, Logarithmic, Companded, Kahan, Split, EightFloat32, FactoredAdamW, Factored, Came,
    General, EightAvx2, FourAvx2, FactoredAvx2, Pinned, Managed,
    TorchBfloat16, DeepSpeed, Torchao, Bitsandbytes, FlashOptim, Adafactor8bit, Torchastic, Eager, Copy,
)  # fmt: skip
GROWING = (Torch, TorchBfloat16, Eight, Four, Copy)
