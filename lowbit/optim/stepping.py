"""An optimizer as far as it steps: what its steps ask of it, and what outlives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit import sharding
from lowbit.optim.left_out import Watch
from lowbit.optim.one_step import Kept, Step
from lowbit.state.layout import Layout
from lowbit.state.stateful import StatefulOptimizer
from lowbit.step.compiled import is_left_out
from lowbit.step.group import StepGroup
from lowbit.step.mistakes import changed, no_values
from lowbit.step.numbers import lr_beside, on_device
from lowbit.step.presence import Presence


class SteppingOptimizer(StatefulOptimizer):
    """An optimizer as far as it steps: one operator call for each group and device."""

    _step_supports_amp_scaling = (
        True  # GradScaler passes grad_scale and found_inf instead of unscaling
    )

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.kept = Kept()
        self.stepped_early: set[Any] = set()  # the parameters stepped in this backward pass
        self.steppers: list[Any] = []  # the handles of step_in_backward
        self.wrapped: Any = None  # weakly, the module that fsdp1.bind was given
        self.shares_memory = False  # whether parameters did, when missing state was last created
        super().__init__(params, defaults)
        self.watch = Watch(self)  # which asks all optimizers that were made for their groups

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        """The rule's hyperparameters in the catalog's order: the learning rate first,
        0 if it is a tensor.
        """
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.kept, self.stepped_early, self.watch = Kept(), set(), Watch(self)
        self.__dict__.setdefault("wrapped", None)
        self.__dict__.setdefault("shares_memory", False)
        self.__dict__.setdefault("steppers", [])  # a load keeps them, a copy has none

    def lay_out_again(self) -> None:
        super().lay_out_again()
        self.kept = Kept()

    # The step

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_scale: Tensor | float | None = None
    ) -> Any:
        """Steps every parameter that has a gradient. Returns the closure's loss, or None.

        A sharded parameter steps if any rank has a gradient and its rule or scales reduce anything
        (docs/bits/sharding-details.md).

        Args:
            closure: reevaluates the model and returns the loss; runs with gradients enabled.
                None by default.
            grad_scale: a number that divides the gradients as they are read, such as
                `lowbit.clip_scale` returns. It applies in addition to the attribute `grad_scale`
                that torch's GradScaler sets. None (default) means 1.
        """
        if torch.compiler.is_compiling() and (
            self.shares_memory or is_left_out(self.param_groups, self.layouts)
        ):
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
        self.wait_for_steps()
        scale, found_inf = self._divisor(grad_scale), getattr(self, "found_inf", None)
        shown = None if self._whole_groups is None else self._whole_groups.shown(self)
        with self.whole_groups():
            Step(self, scale, found_inf, shown).run()
            self.stepped_early = set()
            if not torch.compiler.is_compiling():  # last, as a warning may be made an error
                self.watch.look(self)
        return loss

    # torch.compiler.disable, as torch's own has
    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """torch's. It also gives up a step that a backward pass began under
        `lowbit.step_in_backward`, and that `step()` does not end.
        """
        for stepper in self.steppers:
            stepper.give_up()
        self.stepped_early = set()
        super().zero_grad(set_to_none)

    def wait_for_steps(self) -> None:
        """Returns when no step runs beside a backward pass any more, and raises what one raised."""
        failed = None
        for stepper in self.steppers:
            try:
                stepper.wait()
            except Exception as error:  # the others' steps end too before it is raised
                failed = failed or error
        if failed is not None:
            raise failed

    def _divisor(self, given: Tensor | float | None) -> Tensor | None:
        """The divisor of the gradients: GradScaler's times the given one, or None for 1."""
        if given is not None and not isinstance(given, Tensor):
            given = torch.tensor(float(given), dtype=torch.float32, device="cpu")
        scale = getattr(self, "grad_scale", None)
        if given is None or scale is None:
            return scale if given is None else given
        return scale * on_device(given, scale.device)

    def forget_step(self) -> None:
        """Releases the step that would be repeated."""
        if self.kept.cache is not None:
            self.kept.cache.discard()
            self.kept.cache = None

    def lacking_gradients(self) -> list[tuple[Any, torch.dtype]]:
        """The sharded parameters without a gradient here of which another rank has one,
        and its dtype.

        It is a collective if the step of any of them reduces anything,
        or if experts are among them.
        """
        if torch.compiler.is_compiling():
            return []
        params = [p for group in self.param_groups for p in group["params"]]
        if self.kept.presence is None or not self.kept.presence.of(params):
            name_of = {member.p: member.name for member in self.members()}
            self.kept.presence = Presence(params, self.laid_out(), name_of)
        return self.kept.presence.lacking(same=False, stepped=self.stepped_early)

    def prepare_step(self) -> bool:
        """Brings state up to the groups' options.
        Returns False if the step is only there to create it.
        """
        if self.layouts and not self.is_laid_out():
            self.init_state()
        return not self._create_late_state()

    def step_params(self, params: Iterable[tuple[int, Any]], step: Step) -> None:
        """Steps these parameters, each with the number of its group, as a part of `step`."""
        step.apply(params)

    def local_shard(self, p: Any, lay: Layout) -> Tensor:
        """The local shard of a parameter. RuntimeError if it is no longer what its state was laid
        out for.
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

    def bind_call(
        self,
        step_group: StepGroup,
        plan: Tensor,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        later: bool = False,
    ) -> None:
        """Gives a step group its operator call, with a learning rate of its own if that comes
        later.
        """
        hyper, options = self.call_options(step_group, grad_scale, found_inf)
        if later and options["lr"] is not None:
            options["lr"] = options["lr"].clone()
        step_group.bind(plan, hyper, **options)

    def call_options(
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

    def plan_of(self, where: Any, step_group: StepGroup) -> Tensor:
        """The plan of a step group, kept until its parameters or their streams change."""
        if torch.compiler.is_compiling():
            return step_group.plan()
        streams = [stream for _, stream in step_group.rows]
        # A version does not change with a write through `.data`;
        # reading a number on a GPU would wait for it.
        marks = [int(stream) if stream.is_cpu else stream._version for stream in streams]
        where = (where, id(streams[0]))  # parameters may also be stepped one by one
        kept = self.kept.plans.get(where)
        same = kept is not None and kept[1] == marks and len(kept[0]) == len(streams)
        if (
            kept is None
            or not same
            or any(a is not b for a, b in zip(kept[0], streams, strict=True))
        ):
            kept = self.kept.plans[where] = (streams, marks, step_group.plan())
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
        fresh = not self.count_states()
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
