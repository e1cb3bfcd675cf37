"""Over which process groups the numbers of a sharded parameter are reduced."""

from __future__ import annotations

from typing import Any, NamedTuple

from lowbit.state.layout import Layout


class ReduceGroups(NamedTuple):
    """Process groups over which each tensor of a workspace is reduced."""

    totals: tuple[Any, ...] = ()
    rows: tuple[Any, ...] = ()
    cols: tuple[Any, ...] = ()
    row_absmax: tuple[Any, ...] = ()
    col_absmax: tuple[Any, ...] = ()
    blocks: tuple[Any, ...] = ()


def reduce_groups(lay: Layout) -> ReduceGroups:
    """The process groups that reduce a parameter's sums and maxima; empty if its update needs none.

    Raises:
        ValueError: one state has scale='tensor' and another has a different cross-tile scale.
    """
    cuts, last = lay.part.cuts, len(lay.part.shape) - 1
    if not lay.phases or not cuts:
        return ReduceGroups()
    scales = {slot.scale for slot in lay.slots if slot.cross_tile}
    if "tensor" in scales and len(scales) > 1:
        raise ValueError(
            "scale='tensor' for one state of a sharded parameter and another cross-tile scale for "
            "the next is not supported; use scale='tensor' for both, or for none"
        )
    return ReduceGroups(
        totals=tuple(group for _, group in cuts),
        rows=tuple(group for dim, group in cuts if dim == last),
        cols=tuple(group for dim, group in cuts if dim == last - 1),
        row_absmax=tuple(group for dim, group in cuts if dim > 0 or "tensor" in scales),
        col_absmax=tuple(group for dim, group in cuts if dim == 0),
        blocks=tuple(group for dim, group in cuts if dim > 0),
    )
