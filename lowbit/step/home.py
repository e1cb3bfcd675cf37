"""Steps of parameters whose state lies on other ranks: weights and gradients go there,
and the weights return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from lowbit import sharding
from lowbit.state.layout import Layout
from lowbit.state.reduce_groups import reduce_groups
from lowbit.step.buckets import buckets, numel_of_rank
from lowbit.step.group import StepGroup, refuse_overlap
from lowbit.step.phases import run_phases


class Visitor:
    """One parameter in one step."""

    def __init__(self, number: int, p: Any, lay: Layout, state: dict[str, Tensor]) -> None:
        """
        Args:
            number: of its group.
        """
        assert lay.home
        self.number, self.p, self.lay, self.state = number, p, lay, state
        self.home, self.value = lay.home, sharding.local(p).detach()
        refuse_overlap(self.value)

    @property
    def kept(self) -> list[Tensor]:
        """What goes home and returns: the weights, and their compensation."""
        extra = self.lay.compensation
        return [self.value, sharding.local(self.state[extra.key])] if extra else [self.value]

    def add(self, step_group: StepGroup, kept: Sequence[Tensor], grad: Tensor) -> None:
        """Adds its step.

        Args:
            kept: the weights, and their compensation, at home.
            grad: at home.
        """
        value, *extra = kept
        step_group.params.append(value)
        step_group.grads.append(grad)
        keys = self.lay.keys[len(extra) :]  # the first is the compensation's
        step_group.state += [*extra, *(sharding.local(self.state[key]) for key in keys)]
        step_group.steps.append(self.state["step"])
        step_group.rows.append((self.lay.at_home, self.state["stream"]))
        step_group.members.append(self.p)


def sent_home(home: sharding.Home, tensors: Sequence[Tensor]) -> list[sharding.Sent]:
    return [sharding.Sent(home, tensor) for tensor in tensors]


def run(
    visitors: Sequence[Visitor],
    groups: Sequence[dict[str, Any]],
    bind: Callable[[Any, StepGroup], None],
) -> None:
    """Steps the parameters.

    Args:
        visitors: the same in the same order on all ranks of a process group that has parts of them.
        groups: the optimizer's.
        bind: binds a step group to its operator call: (where its plan is kept, step group).
    """
    for bucket in _buckets(visitors):
        _run(bucket, groups, bind)


def _run(
    bucket: Sequence[Visitor],
    groups: Sequence[dict[str, Any]],
    bind: Callable[[Any, StepGroup], None],
) -> None:
    """One bucket's step; its copies at home are gone when it returns."""
    leaving = [each for one in bucket for each in sent_home(one.home, one.kept)]
    gradients = [sharding.Sent(one.home, sharding.dense_gradient(one.p)) for one in bucket]
    arrived = sharding.to_homes([*leaving, *gradients])
    kept, at = arrived[: len(leaving)], iter(arrived)
    counts = [len(one.kept) for one in bucket]
    of_each = [[next(at) for _ in range(count)] for count in counts]
    made: dict[Any, StepGroup] = {}
    for one, mine, grad in zip(bucket, of_each, at, strict=True):
        lay = one.lay
        where = (one.number, one.value.device, lay.rule, lay.phases, reduce_groups(lay), "home")
        if where not in made:
            made[where] = StepGroup(groups[one.number], lay)
        one.add(made[where], mine, grad)
    for where, step_group in made.items():
        bind(where, step_group)
    run_phases(list(made.values()))
    sharding.from_homes(leaving, kept)


def _buckets(visitors: Sequence[Visitor]) -> Iterator[list[Visitor]]:
    """Parameters that step together: those on the same process groups,
    which agree on what has a gradient.
    """
    together: dict[Any, list[Visitor]] = {}
    for one in visitors:
        groups = tuple(group for _, group in one.lay.part.cuts)
        together.setdefault((groups, one.value.device), []).append(one)
    for several in together.values():
        yield from buckets(several, lambda one: numel_of_rank(one.lay))


def at_home(
    p: Any, lay: Layout, state: dict[str, Tensor], grad: Tensor
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Copies at home of a parameter's weights, of its compensation in its state,
    and of its gradient. A collective.
    """
    one = Visitor(0, p, lay, state)
    value, *extra, grad = sharding.to_homes(sent_home(one.home, [*one.kept, grad]))
    if lay.compensation:
        state = {**state, lay.compensation.key: extra[0]}
    return value, state, grad
