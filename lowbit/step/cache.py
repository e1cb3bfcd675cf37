"""A cache that repeats the last step without inspecting parameters,
as long as all objects are the same.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowbit import ops
from lowbit.step import objects
from lowbit.step.group import StepGroup
from lowbit.step.versions import versioned

_version = operator.attrgetter("_version")


class StepCache:
    """The step groups of a step, ready to run again.

    Inspecting a parameter (gradient, state, row of the plan) takes Python some 20 microseconds,
    more than a GPU needs for tensors below a few megabytes. The cache compares identities and
    addresses in C, a small fraction of a microsecond per parameter. Any changed object makes the
    step inspect everything again. Until then the cache keeps the state alive, even if `opt.state`
    is emptied.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[Any, Any],
        step_groups: Sequence[StepGroup],
        visitors: Sequence[tuple[int, Any]] = (),
    ) -> None:
        """
        Args:
            groups: the optimizer's.
            state: the optimizer's.
            step_groups: of the step.
            visitors: the parameters whose state lies elsewhere, with the numbers of their groups,
                which a repeated step inspects.
        """
        self.visitors = visitors
        # Ranks that lack a gradient give zeros of the dtype that was told when ranks last agreed.
        self.kinds = [p.grad.dtype for _, p in visitors]
        self.groups = [(group, len(group["params"])) for group in groups]
        self.params = list(chain.from_iterable(_params_of(groups)))
        self.idle = [p for p in self.params if p.grad is None]
        self.keys, self.kept = list(state), list(state.values())
        self.dicts = [values for values in self.kept if isinstance(values, dict)]
        self.values: list[Any] = list(chain.from_iterable(map(dict.values, self.dicts)))
        self.step_groups = step_groups
        self.gradients = list(map(objects.Gradients, step_groups))
        # For streams on a GPU, Python compares versions instead of values.
        self.streams: list[Tensor] = []
        self.ids: list[int] = []
        self._finalizer = weakref.finalize(self, _discard, self.ids)
        for step_group in step_groups:
            streams = [stream for _, stream in step_group.rows]
            if not all(stream.is_cpu for stream in streams):
                self.streams += streams
                streams = []
            self.ids.append(step_group.prepare(streams))
        self.versions = list(map(_version, self.streams))
        members = chain.from_iterable(each.members for each in step_groups)
        self.written = versioned(chain(members, (p for _, p in visitors)))

    @staticmethod
    def serves(
        params: Sequence[Any], step_groups: Sequence[StepGroup], visitors: Sequence[Any] = ()
    ) -> bool:
        """Whether these step groups and visitors are the whole step and can be repeated."""
        members = sum(len(step_group.members) for step_group in step_groups)
        return members + len(visitors) == len(params) and not any(
            any(isinstance(p, FakeTensor) for p in step_group.params)  # no memory to come back to
            or step_group.copies
            or step_group.flat_shards
            or step_group.strided
            or any(map(Tensor.is_neg, step_group.params))
            or not all(_watchable(stream) for _, stream in step_group.rows)
            for step_group in step_groups
        )

    def take(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> bool:
        """Takes the current gradients. Returns False if any object has changed since the last
        step.
        """
        return (
            len(groups) == len(self.groups)
            and all(
                group is before and len(group["params"]) == count
                for group, (before, count) in zip(groups, self.groups, strict=True)
            )
            and objects.same(self.params, _params_of(groups))
            and objects.same(self.keys, [list(state)])
            and objects.same(self.kept, [list(state.values())])
            and objects.same(self.values, self.dicts)
            and list(map(_version, self.streams)) == self.versions
            and all(p.grad is None for p in self.idle)
            and all(
                p.grad is not None and p.grad.dtype == kind
                for (_, p), kind in zip(self.visitors, self.kinds, strict=True)
            )
            and all(map(objects.Gradients.take, self.gradients, self.ids))
        )

    def bind(self, options: Callable[[StepGroup], tuple[list[float], dict[str, Any]]]) -> None:
        """Sets every step group's call; `options` returns its hyperparameters and the operator's
        keywords.
        """
        for step_group, number in zip(self.step_groups, self.ids, strict=True):
            hyper, keywords = options(step_group)
            step_group.bind_prepared(number, hyper, **keywords)

    def release(self) -> None:
        """Releases the gradients that `take` got, after the step."""
        for gradients in self.gradients:
            gradients.release()

    def discard(self) -> None:
        """Releases the tensors."""
        self._finalizer()


def _discard(ids: Iterable[int]) -> None:
    for number in ids:
        ops.step_discard(number)


def _watchable(stream: Tensor) -> bool:
    """Whether a repeated step can see that a stream changes: by its value on the CPU,
    by its version on a GPU.
    """
    return not stream.is_cpu or (stream.dtype == torch.int64 and stream.numel() == 1)


def _params_of(groups: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    return [list(group["params"]) for group in groups]
