"""The gradient that an accumulator holds for one parameter."""

from __future__ import annotations

from torch import Tensor

from lowbit import sharding
from lowbit.state.layout import stream_of


class HeldGradient:
    """The accumulated gradient of one parameter."""

    def __init__(self, p: Tensor, name: str, index: int) -> None:
        self.name = name
        self.stream = stream_of(name, index)
        self.added = 0
        self.finished = 0  # how many of `added` belong to finished steps
        self.buffer: Tensor | None = None
        self.compensation: list[Tensor] = []
        self.place = _place(p, name)

    def clear(self) -> None:
        self.buffer, self.compensation = None, []


def _place(p: Tensor, name: str) -> list[int]:
    """Rows, columns, global columns and the first element's index of the local part."""
    if sharding.is_flat(p):  # its position is unknown, so the random bits depend on the rank
        return [1, p.numel(), p.numel(), sharding.rank() << 40]
    part = sharding.part(p, f"parameter {name!r}")
    first = part.row_offset * part.global_cols + part.col_offset
    if part.whole_rows:
        return [1, part.rows * part.cols, part.rows * part.cols, first]
    return [part.rows, part.cols, part.global_cols, first]
