"""The local part of a sharded tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

# Which rows have blocks that are split between ranks: names of csrc/policy/plan.h.
CUT_NONE, CUT_ENDS, CUT_ALL = "none", "ends", "all"


@dataclass(frozen=True)
class Part:
    """The local part of a tensor: a box of the global shape."""

    shape: tuple[int, ...]  # global
    local: tuple[int, ...]
    offset: tuple[int, ...]
    # One (dimension, process group) for each mesh dimension that shards the tensor.
    cuts: tuple[tuple[int, Any], ...] = ()
    # For a tensor made from a parameter: the parameter's dimension that each of its own follows,
    # or -1.
    follows: tuple[int, ...] = ()
    # If columns are split: the column at which each rank's part begins, without 0.
    begins: tuple[int, ...] = ()
    # For a flat shard: elements at the start of the first row and at the end of the last row that
    # other ranks have.
    front: int = 0
    back: int = 0
    cut: str = CUT_NONE  # CUT_ENDS or CUT_ALL if blocks are split between ranks

    @property
    def rows(self) -> int:
        return self.local[0] if self.local else 1

    @property
    def cols(self) -> int:
        return math.prod(self.local[1:])

    @property
    def global_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def global_cols(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_offset(self) -> int:
        return self.offset[0] if self.offset else 0

    @property
    def col_offset(self) -> int:
        return self.offset[1] * math.prod(self.shape[2:]) if len(self.shape) > 1 else 0

    @property
    def deep(self) -> int | None:
        """The first dimension beyond the second that is split, or None."""
        return next((dim for dim in sorted(dim for dim, _ in self.cuts) if dim > 1), None)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Rows, columns, global columns and the first element's index of the part as a matrix.

        Columns begin at dimension 1, or at the dimension beyond the second that is split.

        Raises:
            ValueError: it is not a matrix, because two dimensions beyond the first are split.
        """
        if self.deep is None:
            first = self.row_offset * self.global_cols + self.col_offset
            return self.rows, self.cols, self.global_cols, first
        dims = sorted({dim for dim, _ in self.cuts})
        if set(dims) - {0, self.deep}:
            raise ValueError(
                f"a tensor of shape {self.shape} is sharded on dimensions {dims}; state and "
                "accumulated gradients follow dimensions 0 and 1, or 0 and one other"
            )
        cols = math.prod(self.shape[self.deep :])
        first = self.row_offset * self.global_cols
        first += self.offset[self.deep] * math.prod(self.shape[self.deep + 1 :])
        return math.prod(self.local[: self.deep]), math.prod(self.local[self.deep :]), cols, first

    @property
    def whole_rows(self) -> bool:
        return self.local[1:] == self.shape[1:]

    def take_rows(self, begin: int, end: int) -> Part:
        """Rows [begin, end) of the local part; all of a part without dimensions."""
        if not self.local:
            return self
        offset = (self.offset[0] + begin, *self.offset[1:])
        return replace(self, local=(end - begin, *self.local[1:]), offset=offset)

    def with_room(self, here: Tensor) -> Tensor:
        """Local elements as rows of the box, in its shape;
        zeros where other ranks have the elements.
        """
        rows = here.new_zeros(self.local)
        self.without_room(rows).copy_(here.reshape(-1))
        return rows

    def without_room(self, rows: Tensor) -> Tensor:
        """The inverse of `with_room`: a view of the local elements in one dimension."""
        flat = rows.reshape(-1)
        return flat[self.front : flat.numel() - self.back]
