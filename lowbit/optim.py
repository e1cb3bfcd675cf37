"""The optimizers: torch.optim.Optimizer in every respect that a scheduler, scaler, hook, trainer or checkpoint can see."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit import layout, overrides, shard
from lowbit.batch import Batch, reductions, run_phases
from lowbit.holders import Holders
from lowbit.layout import Layout
from lowbit.state import StateKeeper
from lowbit.stats import Stats, collect
from lowbit.steady import Steady


class LowbitOptimizer(StateKeeper):
    """What every lowbit optimizer shares: state, its layout, loading, and one operator call for each group and device.

    A subclass says which update rule a group takes and with which hyperparameters.
    """

    _step_supports_amp_scaling = (
        True  # GradScaler hands over grad_scale and found_inf instead of unscaling
    )

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._plans: dict[Any, tuple[list[Tensor], list[int], Tensor]] = {}
        self._steady: Steady | None = None
        super().__init__(params, defaults)

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        """The rule's hyperparameters in the catalog's order; the learning rate first, 0 where it is a tensor."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._steady = {}, None

    def _lay_out_again(self) -> None:
        super()._lay_out_again()
        self._plans.clear()
        self._steady = None

    def override_quantize_enable(self, module: torch.nn.Module, name: str, enable: bool) -> None:
        """Decides for one parameter, before its first step, whether its state is quantized, whatever `wide` and `min_numel` say.

        Args:
            module, name: where the parameter is: `getattr(module, name)`.

        Raises:
            ValueError: it is not one of this optimizer's, it has been stepped already, or it has too few dimensions or too short rows.
        """
        p: Any = getattr(module, name, None)
        group, known, index = self._found(p, name)
        if float(self.state.get(p, {}).get("step", 0.0)) > 0:
            raise ValueError(
                f"{name!r} has been stepped; whether its state is quantized is decided before the first step"
            )
        if enable and layout.is_wide(tuple(p.shape), None, (), 0):
            raise ValueError(
                f"{name!r} of shape {tuple(p.shape)} cannot be quantized: that takes two dimensions and rows of {layout.MIN_COLS}"
            )
        before = group.get("overrides")
        pattern = overrides.matched(group, known, index)
        options = dict(before[pattern]) if before and pattern is not None else {}
        options.update({"wide": False, "min_numel": 0} if enable else {"wide": True})
        if not enable:
            options.pop("state_format", None)
        key = str(index) if known is None else glob.escape(overrides.clean_name(known))
        rest = {k: v for k, v in (before or {}).items() if k != key}
        group["overrides"] = {key: options, **rest}
        self._structure.clear()
        kept = self.state.pop(p, None)
        self._lay_out_again()
        try:
            self.init_state()
        except ValueError:  # a shard that cuts its blocks: as before
            group["overrides"], self.state[p] = before or {}, kept or {}
            self._structure.clear()
            self._lay_out_again()
            raise

    def stats(self, *, probe: bool = False) -> Stats:
        """What is kept and how well, for each parameter and in total; print it for a table.

        Args:
            probe: also run the next step on copies, with the gradients there are, and compare what it would store with what it computed. A
                collective where parameters are sharded and their rule or scales reduce anything.

        Returns:
            {"parameters": {name: entry}, "total": entry}, of the local shards. An entry holds `values`; `bytes` of each component (`parameter`,
            `beside` the parameter, `codes`, `scales`, `wide` state, `factors`, `numbers`, `other`) and `bytes_per_value`; and `states`, for
            each state that has codes the shares of its values whose code is the lowest or highest but 0 (`saturated`), that read as 0
            (`zero`), and of its codes that occur (`used`; in the total the mean). With `probe`, a state's `rms_error`, the root mean
            square of what storing adds to it relative to its own, and `max_error`, the largest relative to the value it is added to; and
            the shares of weights that the same step in float32 changes (`updates`), and of those that it changes while the stored one
            stays (`lost`).
        """
        return collect(self, probe)

    # The step

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_scale: Tensor | float | None = None
    ) -> Any:
        """One step over every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss; run with gradients enabled.
            grad_scale: one number that gradients are divided by as they are read, such as `lowbit.clip_scale` gives, beside the attribute
                `grad_scale` that torch's GradScaler sets.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_structure()
        scale, found_inf = self._divisor(grad_scale), getattr(self, "found_inf", None)
        if self._step_again(scale, found_inf) or not self._prepare():
            return loss
        pieces = self._pieces
        with_grad = [
            (number, p)
            for number, group in enumerate(self.param_groups)
            for owner in group["params"]
            for p in (pieces.get(owner, (owner,)) if pieces else (owner,))
            if p.grad is not None
        ]
        batches = self._update(with_grad, scale, found_inf)
        if not torch.compiler.is_compiling() and Steady.serves(with_grad, batches):
            self._steady = Steady(self.param_groups, self.state, batches)
        return loss

    def _divisor(self, given: Tensor | float | None) -> Tensor | None:
        """What gradients are divided by: what GradScaler sets, and what is given beside it."""
        if given is not None and not isinstance(given, Tensor):
            given = torch.tensor(float(given), device="cpu")
        scale = getattr(self, "grad_scale", None)
        if given is None or scale is None:
            return scale if given is None else given
        return scale * on_device(given, scale.device)

    def _step_again(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """A step over the parameters of the last one. False, and nothing done, where they are not as they were."""
        steady = self._steady
        if steady is None or torch.compiler.is_compiling():
            return False
        if self._laid_out_for != self._decided() or not steady.take(self.param_groups, self.state):
            steady.discard()
            self._steady = None
            return False
        try:
            steady.bind(lambda batch: self._options(batch, grad_scale, found_inf))
            run_phases(steady.batches)
        except BaseException:
            steady.discard()  # it has taken the gradients
            self._steady = None
            raise
        return True

    def _prepare(self) -> bool:
        """State as the groups want it now. False where the step is only there to create it."""
        if self._layouts and self._laid_out_for != self._decided():
            self._lay_out_again()  # such as by OneCycleLR, which gives SGD a momentum
            self.init_state()
        return not self._create_late_state()

    def _update(
        self,
        params: Iterable[tuple[int, Any]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> list[Batch]:
        """Steps these parameters, each with the number of its group."""
        batches: dict[Any, Batch] = {}
        holders = self._agreed()
        if holders:
            holders.start()
        for number, p in params:
            value, lay = shard.local(p), self._layouts[p]
            if value.dtype != lay.dtype or not (
                value.shape == lay.part.local or isinstance(p, shard.Piece)
            ):
                raise self._changed(p, value, lay)
            if holders and isinstance(p, shard.Piece):
                holders.steps(p)
                if not value.numel():
                    continue  # where there is some of it, steps are counted
            where = (number, value.device, lay.rule, lay.phases, reductions(lay), type(p))
            batch = batches.get(where)
            if batch is None:
                batch = batches[where] = Batch(self.param_groups[number], lay)
            batch.add(p, value, lay, self._state_of(p) if holders else self.state[p])
        for where, batch in batches.items():
            self._bind(batch, self._plan(where, batch), grad_scale, found_inf)
        run_phases(list(batches.values()), holders)
        if holders and (found_inf is None or not bool(shard.local(found_inf))):
            for p in holders.stepped_elsewhere():
                self._state_of(p)["step"] += 1.0
        return list(batches.values())

    def _changed(self, p: Any, value: Tensor, lay: Layout) -> RuntimeError:
        """What to say of a parameter that is another than when its state was laid out."""
        name, number = next((name, index) for _, q, name, index in self._members() if q is p)
        here, before = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, lay.dtype))
        return RuntimeError(
            f"parameter {number if name is None else repr(name)} is {here} {tuple(value.shape)} now, but its state was laid out for {before} "
            f"{lay.part.local}: convert the model first, then build the optimizer, and load this one's state dict into that"
        )

    def _agreed(self) -> Holders | None:
        """What the holders of flat shards agree on in a step; None where there are none."""
        if self._pieces and self._holders is None:
            pieces = [(p, lay) for _, p, lay in self._laid_out() if isinstance(p, shard.Piece)]
            self._holders = Holders(pieces)
        return self._holders

    def _bind(
        self,
        batch: Batch,
        plan: Tensor,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Gives a batch its operator call."""
        hyper, options = self._options(batch, grad_scale, found_inf)
        batch.bind(plan, hyper, **options)

    def _options(
        self, batch: Batch, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> tuple[list[float], dict[str, Any]]:
        """The hyperparameters of a batch, and the keywords of its operator call."""
        device = batch.params[0].device
        group = batch.group
        lr = group["lr"]
        return self.hyper(group, batch.rule), {
            "lr": lr_beside(shard.local(lr), device) if isinstance(lr, Tensor) else None,
            "grad_scale": on_device(grad_scale, device),
            "found_inf": on_device(found_inf, device),
            "maximize": group["maximize"],
            "seed": group["seed"],
        }

    def _plan(self, where: Any, batch: Batch) -> Tensor:
        """The plan of a batch, kept until its parameters or their streams change."""
        if torch.compiler.is_compiling():
            return batch.plan()
        streams = [stream for _, stream in batch.rows]
        versions = [stream._version for stream in streams]
        where = (where, id(streams[0]))  # parameters may also be stepped one by one
        kept = self._plans.get(where)
        same = kept is not None and kept[1] == versions and len(kept[0]) == len(streams)
        if (
            kept is None
            or not same
            or any(a is not b for a, b in zip(kept[0], streams, strict=True))
        ):
            kept = self._plans[where] = (streams, versions, batch.plan())
        return kept[2]

    def _create_late_state(self) -> bool:
        """State for parameters that had none (they were on the meta device). True where this call was only there to create it.

        torch.distributed.checkpoint initialises an optimizer without state by a step with lr = 0 and zero gradients, and torch's own optimizers
        count it. With state that exists at construction that step never runs; where it does run, it creates state and counts nothing.
        """
        count = sum(len(group["params"]) for group in self.param_groups)
        count += sum(len(pieces) - 1 for pieces in self._pieces.values())
        if len(self._layouts) == count and all(
            (p in self._pieces or (p in self._layouts and not shard.is_flat(p)))
            and (self.state.get(p) or not p.requires_grad)
            for group in self.param_groups
            for p in group["params"]
        ):
            return False
        fresh = not any(self.state.values())
        self.init_state()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        if not fresh or any(float(group["lr"]) != 0.0 for group in self.param_groups):
            return False
        # On every rank the same, also where all that is not zero lies elsewhere.
        groups = dict.fromkeys(group for p in params for group in shard.holders(p))
        device = shard.local(params[0]).device if params else torch.device("cpu")
        some = torch.zeros(1, dtype=torch.int32, device=device)
        for p in params:
            some |= shard.local(p.grad).any().to(device)
        for group in groups:
            shard.reduce_over([(some, group, "max")])
        return not bool(some)


def lr_beside(lr: Tensor, device: torch.device) -> Tensor:
    """A learning rate as the operator takes it: on the CPU, or on the parameters' own GPU where it is on another one."""
    return lr.to(device) if lr.device.type == device.type else lr


def on_device(number: Tensor | None, device: torch.device) -> Tensor | None:
    """What is here of a tensor of one number, on the device. What the host knows is filled in there: a copy would wait for the device.

    RuntimeError while a CUDA graph is captured, which would keep what the host says now for all its replays.
    """
    if number is None:
        return None
    number = shard.local(number)
    if number.device.type == "cpu" != device.type and not torch.compiler.is_compiling():
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a step that a CUDA graph captures was given a number on the CPU ({float(number)}), which every replay would use again; give a tensor "
                f"on {device}"
            )
        return torch.full((), float(number), dtype=number.dtype, device=device)
    return number.to(device)
