"""The part of a tensor that is here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Which rows hold blocks that are cut, as csrc/job.h has it.
CUT_ENDS, CUT_ALL = 1, 2


@dataclass(frozen=True)
class Part:
    """The local part of a tensor: a box of the global shape."""

    shape: tuple[int, ...]  # global
    local: tuple[int, ...]
    offset: tuple[int, ...]
    # Where it is cut: a dimension and the process group that holds its parts, for each mesh dimension that shards.
    cuts: tuple[tuple[int, Any], ...] = ()
    # Of something made from a parameter: the parameter's dimension that each of its own follows, -1 where it follows none.
    follows: tuple[int, ...] = ()
    # Where columns are cut: those with which somebody's part begins, but for 0.
    begins: tuple[int, ...] = ()
    # Elements of the box's first and last row that are not here, of a shard of a flattened parameter.
    front: int = 0
    back: int = 0
    cut: int = 0  # CUT_ENDS or CUT_ALL where blocks are

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
    def whole_rows(self) -> bool:
        return self.local[1:] == self.shape[1:]

    def with_room(self, here: Tensor) -> Tensor:
        """The rows of the box, in its shape, from the elements that are here; zeros for those that lie elsewhere."""
        rows = here.new_zeros(self.local)
        self.without_room(rows).copy_(here.reshape(-1))
        return rows

    def without_room(self, rows: Tensor) -> Tensor:
        """The inverse: a view in one dimension."""
        flat = rows.reshape(-1)
        return flat[self.front : flat.numel() - self.back]
