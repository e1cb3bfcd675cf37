"""A cache that repeats the last step without inspecting parameters, as long as all objects are the same."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from lowbit import ops, sharding
from lowbit.step.group import StepGroup

_version = operator.attrgetter("_version")
_group_params = operator.itemgetter("params")


class StepCache:
    """The step groups of a step, ready to run again.

    Inspecting a parameter (gradient, state, row of the plan) takes Python some 20 microseconds, more than a GPU needs
    for tensors below a few megabytes. The cache compares identities in C functions instead, a small fraction of a
    microsecond per parameter. Any changed object makes the step inspect everything again. Until then the cache keeps
    the state alive, even if `opt.state` is emptied.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[Any, Any],
        step_groups: Sequence[StepGroup],
    ) -> None:
        self.groups = [(group, len(group["params"])) for group in groups]
        self.params = _params_of(groups)
        self.idle = [p for p in self.params if p.grad is None]
        self.keys, self.kept = list(state), list(state.values())
        self.dicts = [values for values in self.kept if isinstance(values, dict)]
        self.values = _values(self.dicts)
        self.streams = [stream for step_group in step_groups for _, stream in step_group.rows]
        self.versions = list(map(_version, self.streams))
        self.step_groups = step_groups
        self.ids = [step_group.prepare() for step_group in step_groups]
        self._finalizer = weakref.finalize(self, _discard, self.ids)

    @staticmethod
    def serves(params: Sequence[Any], step_groups: Sequence[StepGroup]) -> bool:
        """Whether these step groups are the whole step and can be repeated."""
        return sum(len(step_group.members) for step_group in step_groups) == len(
            params
        ) and not any(
            step_group.copies or step_group.flat_shards or step_group.strided
            for step_group in step_groups
        )

    def take(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> bool:
        """Takes the current gradients. Returns False if any object has changed since the last step."""
        return (
            len(groups) == len(self.groups)
            and all(
                group is before and len(group["params"]) == count
                for group, (before, count) in zip(groups, self.groups, strict=True)
            )
            and _same(_params_of(groups), self.params)
            and _same(list(state), self.keys)
            and _same(list(state.values()), self.kept)
            and _same(_values(self.dicts), self.values)
            and list(map(_version, self.streams)) == self.versions
            and all(p.grad is None for p in self.idle)
            and all(map(_take, self.step_groups, self.ids))
        )

    def bind(self, options: Callable[[StepGroup], tuple[list[float], dict[str, Any]]]) -> None:
        """Sets every step group's call; `options` returns its hyperparameters and the operator's keywords."""
        for step_group, number in zip(self.step_groups, self.ids, strict=True):
            hyper, keywords = options(step_group)
            step_group.bind_prepared(number, hyper, **keywords)

    def discard(self) -> None:
        """Releases the tensors."""
        self._finalizer()


def _take(step_group: StepGroup, number: int) -> bool:
    grads = sharding.plain_gradients(step_group.members, step_group.params)
    return grads is not None and ops.step_take(number, step_group.params, grads)


def _discard(ids: Iterable[int]) -> None:
    for number in ids:
        ops.step_discard(number)


def _params_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(_group_params, groups)))


def _values(kept: Iterable[dict[str, Tensor]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, kept)))


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))
