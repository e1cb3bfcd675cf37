"""A step like the last one: run again without looking at any parameter, while all that it was made of is still there."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from lowbit import ops, shard
from lowbit.batch import Batch

_version = operator.attrgetter("_version")
_params = operator.itemgetter("params")


class Steady:
    """The batches of a step, ready to be run again.

    Looking at a parameter takes Python some 20 microseconds (its gradient, its state, its row of the plan), which is more than the GPU needs for
    tensors below some megabytes. Here identities are compared, by functions of C, at a small part of a microsecond for each parameter; whatever is
    another object than before sends the step back to looking. State is held until then, also where somebody empties `opt.state`.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[Any, Any],
        batches: Sequence[Batch],
    ) -> None:
        self.groups = [(group, len(group["params"])) for group in groups]
        self.owners = _owners(groups)
        self.idle = [p for p in self.owners if p.grad is None]
        self.keys, self.kept = list(state), list(state.values())
        self.dicts = [values for values in self.kept if isinstance(values, dict)]
        self.values = _values(self.dicts)
        self.streams = [stream for batch in batches for _, stream in batch.rows]
        self.versions = list(map(_version, self.streams))
        self.batches = batches
        self.ids = [batch.prepare() for batch in batches]
        self._finalizer = weakref.finalize(self, _discard, self.ids)

    @staticmethod
    def serves(params: Sequence[Any], batches: Sequence[Batch]) -> bool:
        """Whether these batches are all of a step, and may be run again."""
        return sum(len(batch.owners) for batch in batches) == len(params) and not any(
            batch.copies or batch.pieces or batch.strided for batch in batches
        )

    def take(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> bool:
        """Takes the gradients there are now. False where anything is not as it was."""
        return (
            len(groups) == len(self.groups)
            and all(
                group is before and len(group["params"]) == count
                for group, (before, count) in zip(groups, self.groups, strict=True)
            )
            and _same(_owners(groups), self.owners)
            and _same(list(state), self.keys)
            and _same(list(state.values()), self.kept)
            and _same(_values(self.dicts), self.values)
            and list(map(_version, self.streams)) == self.versions
            and all(p.grad is None for p in self.idle)
            and all(map(_take, self.batches, self.ids))
        )

    def bind(self, options: Callable[[Batch], tuple[list[float], dict[str, Any]]]) -> None:
        """Gives every batch its call; `options` are hyperparameters and keywords of the operator."""
        for batch, number in zip(self.batches, self.ids, strict=True):
            hyper, others = options(batch)
            batch.bind_prepared(number, hyper, **others)

    def discard(self) -> None:
        """Lets go of the tensors."""
        self._finalizer()


def _take(batch: Batch, number: int) -> bool:
    grads = shard.plain_gradients(batch.owners, batch.params)
    return grads is not None and ops.step_take(number, batch.params, grads)


def _discard(ids: Iterable[int]) -> None:
    for number in ids:
        ops.step_discard(number)


def _owners(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(_params, groups)))


def _values(kept: Iterable[dict[str, Tensor]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, kept)))


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))
