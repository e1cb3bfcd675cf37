"""The tensors of one optimizer state: its codes and scales, their shapes, and the keys they are
saved under (docs/definitions/formats.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lowbit import ops, sharding


@dataclass(frozen=True)
class StateTensor:
    """One state tensor of one parameter: its key, dtype, and global and local shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole parameter
    local: tuple[int, ...]  # of the part here, which begins at
    offset: tuple[int, ...]
    dims: tuple[int, ...]  # the part's dimension that each of its own follows
    places: tuple[int, ...] | None = None  # the parameter's, where that is another

    @property
    def follows(self) -> tuple[int, ...]:
        """The parameter's dimension that each of its own follows, or -1."""
        return self.dims if self.places is None else self.places


@dataclass(frozen=True)
class Slot:
    """One state tensor of an update rule: torch's name for it, and its format."""

    name: str
    format: str
    block: int = 0
    scale: str = "none"
    stochastic: bool = False

    @property
    def coded(self) -> bool:
        return self.scale != "none"

    @property
    def cross_tile(self) -> bool:
        """Whether a scale covers more than a tile, so that it is measured before the update."""
        return self.scale not in ("none", "block")

    @property
    def key(self) -> str:
        """The state key. It contains the format,
        because DCP compares no dtypes: one key must mean one thing.
        """
        return self.name if self.format == "float32" else f"{self.name}_{self.format}"

    def codes(self, cols: int) -> int:
        """The bytes of a row's codes, for that many columns."""
        return -(-cols * ops.state_format(self.format)["bits"] // 8)

    def scales(self, cols: int) -> int:
        """The number of scale values of a row's blocks, for that many columns."""
        return int(ops.state_format(self.format)["scale_numbers"]) * -(-cols // self.block)

    def entries(self, part: sharding.Part) -> list[StateTensor]:
        """The slot's tensors: values or codes, then scales."""
        made = self._entries(part)
        if not part.follows:
            return made
        places = (*part.follows, -1)  # so that index -1 gives -1
        return [replace(e, places=tuple(places[d] for d in e.dims)) for e in made]

    def _entries(self, part: sharding.Part) -> list[StateTensor]:
        info = ops.state_format(self.format)
        dtype = getattr(torch, info["dtype"])
        whole = tuple(range(len(part.shape)))
        if not self.coded:
            return [StateTensor(self.key, dtype, part.shape, part.local, part.offset, whole)]

        def matrix(key: str, dtype: torch.dtype, width: Callable[[int], int]) -> StateTensor:
            return StateTensor(
                key,
                dtype,
                (part.global_rows, width(part.global_cols)),
                (part.rows, width(part.cols)),
                (part.row_offset, width(part.col_offset)),
                (0, 1),
            )

        entries = [matrix(self.key, dtype, self.codes)]
        if self.scale == "block":
            kind = getattr(torch, info["scale_dtype"])
            scales = matrix(f"{self.key}_scale", kind, self.scales)
            if part.cut == sharding.CUT_ALL:  # every rank with part of a row keeps all its scales
                local = (part.rows, self.scales(part.global_cols))
                scales = replace(scales, local=local, offset=(part.row_offset, 0), dims=(0, -1))
            return [*entries, scales]
        name, f32 = f"{self.key}_scale_{self.scale}", torch.float32
        rows = StateTensor(name, f32, (part.global_rows,), (part.rows,), (part.row_offset,), (0,))
        if self.scale == "row":
            return [*entries, rows]
        if self.scale == "tensor":
            return [*entries, StateTensor(name, f32, (1,), (1,), (0,), ())]
        if self.scale == "column":
            return [
                *entries,
                StateTensor(name, f32, (part.global_cols,), (part.cols,), (part.col_offset,), (1,)),
            ]
        return entries + [
            StateTensor(
                f"{name}_{d}", f32, (part.shape[d],), (part.local[d],), (part.offset[d],), (d,)
            )
            for d in whole
        ]
