"""Whether Python's objects are those of the last step, and where their memory is: in C where
`lowbit._tensors` is built.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.step.group import StepGroup

module: Any = None  # lowbit._tensors, where it was built and torch has DLPack's C interface
with contextlib.suppress(ImportError):
    from lowbit import _tensors  # type: ignore[attr-defined]

    module = _tensors if _tensors.open(Tensor) else None

_PLAIN = (Tensor, torch.nn.Parameter)


def same(before: list[Any], containers: list[Any]) -> bool:
    """Whether the items of lists and the values of dicts, one container after another,
    are the objects `before`.
    """
    if module is not None:
        return module.same(before, containers)
    now = list(chain.from_iterable(map(_items, containers)))
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _items(container: Any) -> Any:
    return container.values() if isinstance(container, Mapping) else container


class Gradients:
    """How a prepared step gets its parameters' and gradients' addresses."""

    def __init__(self, step_group: StepGroup) -> None:
        """Call it while the gradients are still those of the step that was prepared."""
        self._group = step_group
        self._plain = all(type(p) in _PLAIN for p in step_group.members)
        self._shapes = [p.shape for p in step_group.params]  # a row of the table has its own
        self._held: list[Tensor] = []  # the gradients whose addresses the table has
        self._table: Tensor | None = None
        if module is not None and all(type(p) in _PLAIN for p in step_group.params):
            table = torch.zeros(
                len(step_group.params), module.COLUMNS, dtype=torch.int64, device="cpu"
            )
            if module.record(step_group.params, step_group.grads, table):
                self._table = table

    def take(self, number: int) -> bool:
        """Gives the prepared step the current ones.
        Returns False if anything else about them has changed.
        """
        group = self._group
        grads: Sequence[Tensor] | None = None
        if self._table is None or not self._plain:
            grads = sharding.plain_gradients(group.members, group.params)
            if grads is None:
                return False
        if self._table is None:
            # The operator would get a copy of a parameter that torch negates lazily,
            # and write that.
            return (
                [p.shape for p in group.params] == self._shapes
                and not any(map(Tensor.is_neg, group.params))
                and ops.step_take(number, group.params, grads)
            )
        self._held.clear()
        return module.take(group.params, grads, self._table, self._held) and ops.step_take_table(
            number, self._table
        )

    def release(self) -> None:
        """Releases the gradients. They are held as long as operators run without Python's lock,
        since parameters may lose them then.
        """
        self._held.clear()
