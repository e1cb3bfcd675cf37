"""A small model, batches and a loss, shared by the recipes; replace them with your own. The batch
of a step depends on the step alone, not on the number of ranks.
"""

from __future__ import annotations

import torch
from torch import nn
from train_gpt import GPT, Text, compute_dtype, loss_of

__all__ = ["batch", "loss_of", "make_model"]

_text: Text | None = None


def make_model(dtype: torch.dtype = torch.bfloat16, depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    compute = compute_dtype(dtype, "cuda" if torch.cuda.is_available() else "cpu")
    return GPT(width=64, depth=depth, heads=4, context=64, compute=compute).to(dtype)


def batch(step: int, rank: int = 0, ranks: int = 1, size: int = 16) -> torch.Tensor:
    """This rank's rows of the batch of `step`: int64 [size / ranks, 65]."""
    global _text
    _text = _text or Text([], context=64, limit=1 << 20)
    return _text.batch(0, step, size, rank, ranks)
