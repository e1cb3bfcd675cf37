"""The AdamW state of other libraries: their documented formats,
as torchao 0.18 and bitsandbytes 0.50 allocate them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

MOMENTS = 2  # exp_avg and exp_avg_sq
STEP = 4  # bytes of a step count, a float32 of no dimensions
COUNT = 8  # bytes of a number of updates, an int64 of no dimensions
CODEBOOK = 256 * 4  # bytes of a map of 8-bit codes to float32
# Both libraries quantize from so many values on, in blocks of so many, with a float32 scale each:
# torchao's `OptimizerBase._new_buffer` and `block_size`, bitsandbytes' `min_8bit_size` and the 256
# of `init_state`.
QUANTIZED_FROM = 4096
BLOCK = 256


@dataclass(frozen=True)
class Library:
    """AdamW of another library."""

    title: str
    dtype: torch.dtype | None  # of weights and gradients; None: the model's own
    state: Callable[[int, int], int]  # bytes for (values here, bytes of a weight)
    step_bytes: int = STEP  # of its step count, which is saved once for all ranks
    codebooks: Callable[[int], bool] = lambda values: False  # whether it needs the shared ones
    shared: int = 0  # bytes of the shared codebooks
    note: Callable[[bool], str] = lambda bfloat16: ""  # on several ranks
    float32_embeddings: bool = False  # whether nn.Embedding's moments are float32


def _torch(values: int, itemsize: int) -> int:
    """Two moments in the weights' dtype, and a step count on the CPU."""
    return MOMENTS * values * itemsize + STEP


def _torchao(values: int, itemsize: int) -> int:
    """Codes, scales and a codebook for each moment of a local tensor of whole blocks;
    else moments in its dtype.
    """
    if values < QUANTIZED_FROM or values % BLOCK:
        return _torch(values, itemsize)
    return MOMENTS * (values + values // BLOCK * 4 + CODEBOOK) + STEP


def _bitsandbytes(values: int, itemsize: int) -> int:
    """Codes and scales for each moment; float32 below the threshold.
    The step count is a number of Python.
    """
    if values < QUANTIZED_FROM:
        return MOMENTS * values * 4
    return MOMENTS * (values + -(-values // BLOCK) * 4)


_BITSANDBYTES = Library(
    "bitsandbytes AdamW8bit",
    None,
    _bitsandbytes,
    step_bytes=0,
    codebooks=lambda values: values >= QUANTIZED_FROM,
    shared=MOMENTS * CODEBOOK,  # all parameters use the same two
    note=lambda bfloat16: "cannot step the parameters of fully_shard",
)

LIBRARIES = {
    "torch_float32": Library("torch AdamW, float32", torch.float32, _torch),
    "torch_bfloat16": Library("torch AdamW, bfloat16", torch.bfloat16, _torch),
    "torchao_8bit": Library(
        "torchao AdamW8bit",
        None,
        _torchao,
        note=lambda bfloat16: (
            "fails at the first step of bfloat16 shards (torch 2.13)" if bfloat16 else ""
        ),
    ),
    "bitsandbytes_8bit": _BITSANDBYTES,
    # transformers 5.23 (trainer.py) gives every nn.Embedding 32-bit state under bitsandbytes.
    "bitsandbytes_8bit_trainer": replace(
        _BITSANDBYTES, title="bitsandbytes AdamW8bit, under Trainer", float32_embeddings=True
    ),
}
