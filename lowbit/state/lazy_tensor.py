"""Tensors of a checkpoint that are not in memory: they have a dtype and a shape,
and read boxes on request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class LazyTensor:
    """A tensor in a checkpoint, with as much of the Tensor interface as loading state uses."""

    def __init__(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        read: Callable[[tuple[int, ...], tuple[int, ...]], bytearray],
    ) -> None:
        """
        Args:
            dtype: of the tensor.
            shape: of the tensor.
            read: `read(offset, shape)` returns the row-major bytes of a box.
        """
        self.dtype, self.shape, self._read = dtype, tuple(shape), read

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def box(self, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box of `shape` at `offset`, as a new CPU tensor."""
        if math.prod(shape) == 0:
            return torch.empty(tuple(shape), dtype=self.dtype, device="cpu")
        content = self._read(tuple(offset), tuple(shape))
        return torch.frombuffer(content, dtype=self.dtype).reshape(tuple(shape))

    def tensor(self) -> Tensor:
        """The whole tensor, on the CPU."""
        return self.box((0,) * self.ndim, self.shape)

    def squeeze(self, dim: int) -> LazyTensor:
        """The tensor without a dimension of length 1; itself if the dimension is longer."""
        at = dim % self.ndim
        if self.shape[at] != 1:
            return self
        read = self._read

        def wider(offset: tuple[int, ...], shape: tuple[int, ...]) -> bytearray:
            return read((*offset[:at], 0, *offset[at:]), (*shape[:at], 1, *shape[at:]))

        return LazyTensor(self.dtype, self.shape[:at] + self.shape[at + 1 :], wider)
