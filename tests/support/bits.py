"""Tensors compared by dtype, shape and bytes, so that a NaN equals itself and -0 is not 0."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def equal(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(equal, a, b))


def bits(params: Iterable[Tensor], opt: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of weights and state."""
    return [t.detach().clone() for p in params for t in (p, *opt.state[p].values())]
