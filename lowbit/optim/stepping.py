"""A step of an optimizer, from gradients to operator calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit import sharding
from lowbit.state.layout import Layout
from lowbit.state.reduce_groups import reduce_groups
from lowbit.state.stateful import StatefulOptimizer
from lowbit.step import home
from lowbit.step.cache import StepCache
from lowbit.step.compiled import is_left_out
from lowbit.step.flat_shards import FlatShardReducer
from lowbit.step.group import StepGroup
from lowbit.step.mistakes import changed, no_values, warn_idle
from lowbit.step.numbers import lr_beside, on_device
from lowbit.step.phases import run_phases
from lowbit.step.presence import Presence, give_zeros
from lowbit.step.versions import raise_versions, versioned


class SteppingOptimizer(StatefulOptimizer):
    """An optimizer as far as it steps: one operator call for each group and device."""

    _step_supports_amp_scaling = (
        True  # GradScaler passes grad_scale and found_inf instead of unscaling
    )

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._plans: dict[Any, tuple[list[Tensor], list[int], Tensor]] = {}
        self._flat_reducers: dict[Any, FlatShardReducer] = {}  # by the tensors that step together
        self._step_cache: StepCache | None = None
        self._presence: Presence | None = None
        self._visitors: list[tuple[int, Any]] = []  # of the last step: state lies elsewhere
        self._asked = False  # whether ranks have agreed on the gradients of this step
        self.stepped_early: set[Any] = set()  # the parameters stepped in this backward pass
        super().__init__(params, defaults)

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        """The rule's hyperparameters in the catalog's order: the learning rate first,
        0 if it is a tensor.
        """
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._flat_reducers, self._step_cache, self._presence = {}, {}, None, None
        self.stepped_early, self._visitors = set(), []

    def lay_out_again(self) -> None:
        super().lay_out_again()
        self._plans.clear()
        self._flat_reducers, self._step_cache, self._presence, self._visitors = {}, None, None, []

    # The step

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_scale: Tensor | float | None = None
    ) -> Any:
        """Steps every parameter that has a gradient. Returns the closure's loss, or None.

        A sharded parameter steps if any rank has a gradient and its rule or scales reduce anything
        (docs/sharding-details.md).

        Args:
            closure: reevaluates the model and returns the loss; runs with gradients enabled.
                None by default.
            grad_scale: a number that divides the gradients as they are read, such as
                `lowbit.clip_scale` returns. It applies in addition to the attribute `grad_scale`
                that torch's GradScaler sets. None (default) means 1.
        """
        if torch.compiler.is_compiling() and is_left_out(self.param_groups):
            return self._step_uncompiled(closure, grad_scale)
        return self._step(closure, grad_scale)

    @torch._disable_dynamo
    def _step_uncompiled(self, *args: Any) -> Any:
        return self._step(*args)

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None, grad_scale: Tensor | float | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._whole_groups is None:
            self._step_shown(None, grad_scale)
        else:
            self._shown = self._whole_groups.shown(self)
            with self.whole_groups():
                self._step_shown(self._shown, grad_scale)
        self.stepped_early = set()
        return loss

    def _step_shown(self, shown: list[Any] | None, grad_scale: Tensor | float | None) -> None:
        """Steps the tensors that are shown, or all if that is None."""
        self._check_structure()
        scale, found_inf = self._divisor(grad_scale), getattr(self, "found_inf", None)
        self._asked = False
        if self._step_again(scale, found_inf) or not self.prepare_step():
            return
        if not self._asked:
            give_zeros(self.lacking_gradients())
        flat_shards = self.flat_shards
        with_grad = [
            (number, p)
            for number, group in enumerate(self.param_groups)
            for whole in group["params"]
            if shown is None or any(whole is p for p in shown)
            for p in (flat_shards.get(whole, (whole,)) if flat_shards else (whole,))
            if p.grad is not None
        ]
        if not with_grad:
            self._check_idle()
        step_groups = self.step_params(with_grad, scale, found_inf)
        compiling = torch.compiler.is_compiling()
        if not compiling:
            raise_versions(versioned(p for _, p in with_grad))
        away = self._visitors
        if shown is None and not compiling and StepCache.serves(with_grad, step_groups, away):
            self._step_cache = StepCache(self.param_groups, self.state, step_groups, away)

    def _check_idle(self) -> None:
        """Warns that no parameter has a gradient, unless hooks have stepped parameters already."""
        if not (self.stepped_early or torch.compiler.is_compiling()):
            warn_idle([p for group in self.param_groups for p in group["params"]], self.warned)

    def _divisor(self, given: Tensor | float | None) -> Tensor | None:
        """The divisor of the gradients: GradScaler's times the given one, or None for 1."""
        if given is not None and not isinstance(given, Tensor):
            given = torch.tensor(float(given), device="cpu")
        scale = getattr(self, "grad_scale", None)
        if given is None or scale is None:
            return scale if given is None else given
        return scale * on_device(given, scale.device)

    def _step_again(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Repeats the last step from the cache. Returns False, changing nothing,
        if any of its objects has changed.
        """
        cache = self._step_cache
        if cache is None or torch.compiler.is_compiling():
            return False
        if self._laid_out_for != self._decided() or not cache.take(self.param_groups, self.state):
            self.forget_step()
            return False
        try:
            presence = self._presence
            lacking = (
                presence.lacking(same=True, stepped=self.stepped_early)
                if presence is not None
                else []
            )
            if lacking:  # other ranks have gradients that were missing
                self.forget_step()
                give_zeros(lacking)
                self._asked = True
                return False
            cache.bind(lambda step_group: self._options(step_group, grad_scale, found_inf))
            visitors = [self._visitor(number, p) for number, p in cache.visitors]
            run_phases(cache.step_groups)
            self._visit(visitors, grad_scale, found_inf)
            raise_versions(cache.written)
        except BaseException:
            self.forget_step()  # it has taken the gradients
            raise
        finally:
            cache.release()
        return True

    def forget_step(self) -> None:
        """Releases the step that would be repeated."""
        if self._step_cache is not None:
            self._step_cache.discard()
            self._step_cache = None

    def lacking_gradients(self) -> list[tuple[Any, torch.dtype]]:
        """The sharded parameters without a gradient here of which another rank has one,
        and its dtype.

        It is a collective if the step of any of them reduces anything,
        or if experts are among them.
        """
        if torch.compiler.is_compiling():
            return []
        params = [p for group in self.param_groups for p in group["params"]]
        if self._presence is None or not self._presence.of(params):
            self._presence = Presence(params, self.laid_out())
        return self._presence.lacking(same=False, stepped=self.stepped_early)

    def prepare_step(self) -> bool:
        """Brings state up to the groups' options.
        Returns False if the step is only there to create it.
        """
        if self.layouts and self._laid_out_for != self._decided():
            self.lay_out_again()  # such as by OneCycleLR, which gives SGD a momentum
            self.init_state()
        return not self._create_late_state()

    def step_params(
        self,
        params: Iterable[tuple[int, Any]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> list[StepGroup]:
        """Steps these parameters, each with the number of its group."""
        step_groups: dict[Any, StepGroup] = {}
        visitors: list[home.Visitor] = []
        reducer = self._agreed()
        if reducer:
            reducer.start()
        for number, p in params:
            lay = self.layouts[p]
            if lay.home:
                visitors.append(self._visitor(number, p))
                continue
            value = self._local(p, lay)
            if reducer and isinstance(p, sharding.FlatShard):
                reducer.steps(p)
                if not value.numel():
                    continue  # ranks with elements count its step
            where = (number, value.device, lay.rule, lay.phases, reduce_groups(lay), type(p))
            step_group = step_groups.get(where)
            if step_group is None:
                step_group = step_groups[where] = StepGroup(self.param_groups[number], lay)
            step_group.add(p, value, lay, self.state_of(p) if reducer else self.state[p])
        for where, step_group in step_groups.items():
            self.bind_call(step_group, self._plan(where, step_group), grad_scale, found_inf)
        run_phases(list(step_groups.values()), reducer)
        self._visit(visitors, grad_scale, found_inf)
        self._visitors = [(one.number, one.p) for one in visitors]
        if reducer and (found_inf is None or not bool(sharding.local(found_inf))):
            for p in reducer.stepped_elsewhere():
                self.state_of(p)["step"] += 1.0
        return list(step_groups.values())

    def _visitor(self, number: int, p: Any) -> home.Visitor:
        self._local(p, self.layouts[p])
        return home.Visitor(number, p, self.layouts[p], self.state[p])

    def _visit(
        self, visitors: list[home.Visitor], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        def bind(where: Any, some: StepGroup) -> None:
            self.bind_call(some, self._plan(where, some), grad_scale, found_inf)

        home.run(visitors, self.param_groups, bind)

    def _local(self, p: Any, lay: Layout) -> Tensor:
        """What is here of a parameter. RuntimeError if it is no longer what its state was laid out
        for.
        """
        value = sharding.local(p)
        whole = value.shape == lay.param_part.local or isinstance(p, sharding.FlatShard)
        if value.dtype != lay.dtype or not whole:
            raise changed(self._what(p), value, lay)
        return value

    def _what(self, p: Any) -> str:
        """A parameter's name or number, for errors."""
        member = next(member for member in self.members() if member.p is p)
        return str(member.number) if member.name is None else repr(member.name)

    def _agreed(self) -> FlatShardReducer | None:
        """What ranks agree on in a step about the flat shards that are shown;
        None where there are none.
        """
        key = None if self._shown is None else tuple(map(id, self._shown))
        if self.flat_shards and key not in self._flat_reducers:
            flat_shards = [
                (p, lay)
                for _, p, lay in self.laid_out()
                if isinstance(p, sharding.FlatShard) and (key is None or id(p.owner) in key)
            ]
            self._flat_reducers[key] = FlatShardReducer(flat_shards)
        return self._flat_reducers.get(key)

    def bind_call(
        self,
        step_group: StepGroup,
        plan: Tensor,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Gives a step group its operator call."""
        hyper, options = self._options(step_group, grad_scale, found_inf)
        step_group.bind(plan, hyper, **options)

    def _options(
        self, step_group: StepGroup, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> tuple[list[float], dict[str, Any]]:
        """The hyperparameters of a step group, and the keywords of its operator call."""
        device = step_group.params[0].device
        group = step_group.group
        lr = group["lr"]
        return self.hyper(group, step_group.rule), {
            "lr": lr_beside(sharding.local(lr), device) if isinstance(lr, Tensor) else None,
            "grad_scale": on_device(grad_scale, device),
            "found_inf": on_device(found_inf, device),
            "maximize": group["maximize"],
            "seed": group["seed"],
        }

    def _plan(self, where: Any, step_group: StepGroup) -> Tensor:
        """The plan of a step group, kept until its parameters or their streams change."""
        if torch.compiler.is_compiling():
            return step_group.plan()
        streams = [stream for _, stream in step_group.rows]
        # A version does not tell of a write by `.data`;
        # to read a number elsewhere would wait for the GPU.
        marks = [int(stream) if stream.is_cpu else stream._version for stream in streams]
        where = (where, id(streams[0]))  # parameters may also be stepped one by one
        kept = self._plans.get(where)
        same = kept is not None and kept[1] == marks and len(kept[0]) == len(streams)
        if (
            kept is None
            or not same
            or any(a is not b for a, b in zip(kept[0], streams, strict=True))
        ):
            kept = self._plans[where] = (streams, marks, step_group.plan())
        return kept[2]

    def _create_late_state(self) -> bool:
        """Creates state for parameters without any, which were on the meta device.

        torch.distributed.checkpoint initializes an optimizer without state by a step with lr = 0
        and zero gradients, and torch's own optimizers count it. With state from construction that
        step never runs. If it runs, it creates state and counts nothing.

        Returns:
            Whether the step was only there to create state.
        """
        count = sum(len(group["params"]) for group in self.param_groups)
        count += sum(len(flat_shards) - 1 for flat_shards in self.flat_shards.values())
        if len(self.layouts) == count and all(
            (p in self.flat_shards or (p in self.layouts and not sharding.is_flat(p)))
            and (self.state.get(p) or not (p.requires_grad or p.grad is not None))
            for group in self.param_groups
            for p in group["params"]
        ):
            return False
        fresh = not any(self.state.values())
        self.init_state()
        params = [p for g in self.param_groups for p in g["params"]]
        for p in params:
            if p.is_meta and p.grad is not None:
                raise no_values(self._what(p))
        if not fresh or any(float(group["lr"]) != 0.0 for group in self.param_groups):
            return False
        # All ranks must agree, even if only others have nonzero gradients.
        groups = dict.fromkeys(group for p in params for group in sharding.process_groups(p))
        device = sharding.local(params[0]).device if params else torch.device("cpu")
        some = torch.zeros(1, dtype=torch.int32, device=device)
        for p in params:
            if p.grad is not None:
                some |= sharding.local(p.grad).any().to(device)
        for group in groups:
            sharding.reduce_over([(some, group, "max")])
        return not bool(some)
