"""One step of an optimizer, from gradients to operator calls, and what the next one may reuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import sharding
from lowbit.state.reduce_groups import reduce_groups
from lowbit.step import home
from lowbit.step.cache import StepCache
from lowbit.step.flat_shards import FlatShardReducer
from lowbit.step.group import StepGroup
from lowbit.step.mistakes import warn_idle
from lowbit.step.phases import run_phases
from lowbit.step.presence import Presence, give_zeros
from lowbit.step.shared_memory import in_turn
from lowbit.step.versions import raise_versions, versioned


@dataclasses.dataclass
class Kept:
    """What outlives a step, until the layouts change: all of it can be made again.

    Attributes:
        plans: by where a step group steps: its streams, their marks, and the plan.
        reducers: what ranks agree on about flat shards, by the tensors that step together.
        presence: the parameters about whose gradients ranks agree.
        cache: the last step, to be repeated.
    """

    plans: dict[Any, tuple[list[Tensor], list[int], Tensor]] = dataclasses.field(
        default_factory=dict
    )
    reducers: dict[Any, FlatShardReducer] = dataclasses.field(default_factory=dict)
    presence: Presence | None = None
    cache: StepCache | None = None


class Step:
    """One step: made, run and thrown away.

    `run` either repeats the last step from the cache, or goes through all phases: `agree` with
    other ranks on the parameters that step, `choose` these, `apply` the operators, and `keep` the
    step for the next one to repeat.
    """

    def __init__(
        self,
        opt: Any,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        shown: list[Any] | None = None,
        later: bool = False,
    ) -> None:
        """
        Args:
            opt: a SteppingOptimizer, whose groups have all parameters.
            grad_scale: the divisor of the gradients; None for 1.
            found_inf: nonzero where nothing is to change; None for 0.
            shown: the tensors that step; None for all.
            later: whether `launch` comes when the training loop may have changed a learning rate.
        """
        self.opt, self.shown = opt, shown
        self.grad_scale, self.found_inf = grad_scale, found_inf
        self.later = later
        self.agreed = False  # ranks have told each other of their gradients
        self.step_groups: list[StepGroup] = []
        self.visitors: list[home.Visitor] = []  # parameters whose state lies elsewhere

    def run(self) -> None:
        self.opt.check_structure()
        if self.repeat() or not self.opt.prepare_step():
            return
        self.agree()
        params = self.choose()
        self.step(params)
        self.keep(params)

    # The phases

    def repeat(self) -> bool:
        """Repeats the last step from the cache. Returns False, changing nothing,
        if any of its objects has changed.
        """
        opt, cache = self.opt, self.opt.kept.cache
        if cache is None or torch.compiler.is_compiling():
            return False
        if not opt.is_laid_out() or not cache.take(opt.param_groups, opt.state):
            opt.forget_step()
            return False
        try:
            presence = opt.kept.presence
            lacking = (
                presence.lacking(same=True, stepped=opt.stepped_early)
                if presence is not None
                else []
            )
            if lacking:  # other ranks have gradients that were missing
                opt.forget_step()
                give_zeros(lacking)
                self.agreed = True
                return False
            cache.bind(
                lambda step_group: opt.call_options(step_group, self.grad_scale, self.found_inf)
            )
            self.visitors = [self._visitor(number, p) for number, p in cache.visitors]
            run_phases(cache.step_groups)
            home.run(self.visitors, opt.param_groups, self._bind)
            raise_versions(cache.written)
        except BaseException:
            opt.forget_step()  # it has taken the gradients
            raise
        finally:
            cache.release()
        return True

    def agree(self) -> None:
        """Gives zeros to sharded parameters of which only other ranks have a gradient."""
        if not self.agreed:
            give_zeros(self.opt.lacking_gradients())
            self.agreed = True

    def choose(self) -> list[tuple[int, Any]]:
        """The parameters and flat shards with a gradient, each with the number of its group."""
        flat_shards, shown = self.opt.flat_shards, self.shown
        with_grad = [
            (number, p)
            for number, group in enumerate(self.opt.param_groups)
            for whole in group["params"]
            if shown is None or any(whole is p for p in shown)
            for p in (flat_shards.get(whole, (whole,)) if flat_shards else (whole,))
            if p.grad is not None
        ]
        # Hooks may have stepped all parameters already.
        if not (with_grad or self.opt.stepped_early or torch.compiler.is_compiling()):
            every = [p for group in self.opt.param_groups for p in group["params"]]
            warn_idle(every, self.opt.warned)
        return with_grad

    def step(self, params: Sequence[tuple[int, Any]]) -> None:
        """Steps these parameters by all rules of the optimizer, each with the number of its
        group.
        """
        # Ranks agree once on flat shards, which share no memory with others.
        for together in [params] if self.opt.flat_shards else in_turn(params):
            self.opt.step_params(together, self)

    def apply(self, params: Iterable[tuple[int, Any]]) -> None:
        """Steps these parameters, each with the number of its group."""
        self.gather(params)
        self.launch()

    def gather(self, params: Iterable[tuple[int, Any]]) -> None:
        """Takes the gradients, weights and state of these parameters, each with the number of its
        group, for one call of an operator for each kind of step.
        """
        opt, reducer = self.opt, self._reducer()
        self.visitors = []  # those of another turn have stepped
        called: dict[Any, StepGroup] = {}
        if reducer:
            reducer.start()
        for number, p in params:
            lay = opt.layouts[p]
            if lay.home:
                self.visitors.append(self._visitor(number, p))
                continue
            value = opt.local_shard(p, lay)
            if reducer and isinstance(p, sharding.FlatShard):
                reducer.steps(p)
                if not value.numel():
                    continue  # ranks with elements count its step
            where = (number, value.device, lay.rule, lay.phases, reduce_groups(lay), type(p))
            step_group = called.get(where)
            if step_group is None:
                step_group = called[where] = StepGroup(opt.param_groups[number], lay)
            step_group.add(p, value, lay, opt.state_of(p) if reducer else opt.state[p])
        for where, step_group in called.items():
            self._bind(where, step_group)
        self.step_groups = list(called.values())

    def taken(self) -> list[Tensor]:
        """The tensors that only this object keeps alive between `gather` and `launch`."""
        return [
            t
            for group in self.step_groups
            for t in (
                *group.grads,
                *(copy for _, copy in group.copies),
                *group.call.keywords.values(),
            )
            if isinstance(t, Tensor)
        ]

    def launch(self) -> None:
        """Steps what `gather` has taken."""
        opt, reducer = self.opt, self._reducer()
        run_phases(self.step_groups, reducer)
        home.run(self.visitors, opt.param_groups, self._bind)
        if reducer and (self.found_inf is None or not bool(sharding.local(self.found_inf))):
            for p in reducer.stepped_elsewhere():
                opt.state_of(p)["step"] += 1.0

    def keep(self, params: list[tuple[int, Any]]) -> None:
        """Tells torch that the parameters changed, and keeps the step where it can be repeated."""
        if torch.compiler.is_compiling():
            return
        raise_versions(versioned(p for _, p in params))
        visitors = [(one.number, one.p) for one in self.visitors]
        if self.shown is None and StepCache.serves(params, self.step_groups, visitors):
            opt = self.opt
            opt.kept.cache = StepCache(opt.param_groups, opt.state, self.step_groups, visitors)

    # What they share

    def _bind(self, where: Any, step_group: StepGroup) -> None:
        plan = self.opt.plan_of(where, step_group)
        self.opt.bind_call(step_group, plan, self.grad_scale, self.found_inf, self.later)

    def _visitor(self, number: int, p: Any) -> home.Visitor:
        lay = self.opt.layouts[p]
        self.opt.local_shard(p, lay)
        return home.Visitor(number, p, lay, self.opt.state[p])

    def _reducer(self) -> FlatShardReducer | None:
        """What ranks agree on about the flat shards that are shown; None where there are none."""
        reducers = self.opt.kept.reducers
        key = None if self.shown is None else tuple(map(id, self.shown))
        if self.opt.flat_shards and key not in reducers:
            flat_shards = [
                (p, lay)
                for _, p, lay in self.opt.laid_out()
                if isinstance(p, sharding.FlatShard) and (key is None or id(p.owner) in key)
            ]
            reducers[key] = FlatShardReducer(flat_shards)
        return reducers.get(key)
