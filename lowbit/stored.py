"""Tensors of a checkpoint that are not in memory: a dtype, a shape, and boxes when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Stored:
    """A tensor that lies in a checkpoint; it looks like one as far as loading state asks."""

    def __init__(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        read: Callable[[tuple[int, ...], tuple[int, ...]], bytearray],
    ) -> None:
        """`read(offset, shape)` gives the row-major bytes of a box."""
        self.dtype, self.shape, self._read = dtype, tuple(shape), read

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def box(self, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box of `shape` at `offset`, as a CPU tensor of its own."""
        if math.prod(shape) == 0:
            return torch.empty(tuple(shape), dtype=self.dtype)
        content = self._read(tuple(offset), tuple(shape))
        return torch.frombuffer(content, dtype=self.dtype).reshape(tuple(shape))

    def tensor(self) -> Tensor:
        """All of it."""
        return self.box((0,) * self.ndim, self.shape)

    def squeeze(self, dim: int) -> Stored:
        """Without a dimension of one element; as it is where the dimension has more."""
        at = dim % self.ndim
        if self.shape[at] != 1:
            return self
        read = self._read

        def wider(offset: tuple[int, ...], shape: tuple[int, ...]) -> bytearray:
            return read((*offset[:at], 0, *offset[at:]), (*shape[:at], 1, *shape[at:]))

        return Stored(self.dtype, self.shape[:at] + self.shape[at + 1 :], wider)
