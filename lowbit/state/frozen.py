"""The layout of a parameter that may be frozen, where its state could not follow its placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lowbit import sharding
from lowbit.config.overrides import effective
from lowbit.state import choose
from lowbit.state.layout import Layout
from lowbit.state.reduce_groups import reduce_groups


def trained_or_plain(
    layout_of: Callable[..., Layout],
    group: Mapping[str, Any],
    p: Any,
    name: str | None,
    index: int,
) -> Layout:
    """A parameter's layout as `layout_of` has it. A sharded parameter that no step changes has that
    of full-precision state, and no subspace, where its placement would split codes or a row: it
    gets no state before it is trained, and is laid out anew then.

    Raises:
        ValueError: the options do not fit the parameter, or shards could not agree.
    """
    try:
        return _agreed(layout_of(group, p, name, index))
    except ValueError:
        if not (choose.is_frozen(p) and sharding.is_sharded(p)):
            raise
    plain = {"full_precision": True, "overrides": None}
    return _agreed(layout_of({**group, **effective(group, name, index), **plain}, p, name, index))


def _agreed(lay: Layout) -> Layout:
    reduce_groups(lay)  # raises where shards could not agree
    return lay
