"""The optimizers' base: a torch.optim.Optimizer for schedulers, scalers, hooks,
trainers and checkpoints.
"""

from __future__ import annotations

import glob
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lowbit import ops
from lowbit.config import overrides
from lowbit.optim import docs
from lowbit.optim.report import Stats
from lowbit.optim.stats import collect
from lowbit.optim.stepping import SteppingOptimizer
from lowbit.optim.warn import warn_of_nearest, warn_of_signed_maps, warn_of_slow_means
from lowbit.state import choose
from lowbit.state.load import restore
from lowbit.step.shared_memory import in_turn


class LowbitOptimizer(SteppingOptimizer):
    """What every lowbit optimizer shares: state, its layout, loading,
    and one operator call for each group and device.

    A subclass decides the update rule of a group and its hyperparameters.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Completes the docstring of an optimizer of this package: see `lowbit.optim.docs`."""
        super().__init_subclass__(**keywords)
        if cls.__module__.startswith("lowbit.") and not cls.__name__.startswith("_"):
            docs.complete(cls)

    def init_state(self) -> None:
        before = self.count_states()
        super().init_state()
        made = self.count_states() > before
        if torch.compiler.is_compiling():
            return
        trained = [(m.group, m.p) for m in self.members() if not choose.is_frozen(m.p)]
        self.shares_memory = len(in_turn(trained)) > 1
        if made:
            warn_of_nearest(self)
            warn_of_slow_means(self)
            warn_of_signed_maps(self)

    init_state.__doc__ = SteppingOptimizer.init_state.__doc__

    def check_saving(self) -> None:
        """Raises RuntimeError where a checkpoint would not hold what it should."""

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """torch's; refuses torchft's LocalSGD and DiLoCo where the state belongs to weights that
        they overwrite.

        Raises:
            ValueError: the hook is theirs, and the optimizer keeps Kahan or split correction bits,
                or is Schedule-Free.
        """
        owner = type(getattr(hook, "__self__", None))
        if any(cls.__module__ == "torchft.local_sgd" for cls in owner.__mro__):
            self._check_overwritten()  # before they have registered anything
        return super().register_step_pre_hook(hook)

    def _check_overwritten(self) -> None:
        """Raises ValueError where something else than a step must not write the weights."""
        for _, p, lay in self.laid_out():
            if lay.compensation:
                raise ValueError(
                    f"LocalSGD and DiLoCo overwrite the weights, and {lay.compensation.key!r} of "
                    f"parameter {self._what(p)} holds correction bits of the weights before: build "
                    "the optimizer with param_format='auto' or 'nearest', or with float32 weights"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict()`; this optimizer's dtypes and layout of state stay.

        It also takes torch's Adam and AdamW state dicts, whose float moments it quantizes, and
        lowbit state in other formats. Group entries are loaded, except those that decide the layout
        (`lowbit.config.arguments.STRUCTURE`).

        Names in the state dict become those of an optimizer without names, as in torch. They are
        left out where `overrides`, `split` or `full_precision` go by the parameters' numbers.

        Parameters are matched by name if both sides name the same ones, however they are grouped.
        Otherwise they are matched by position, as torch does, in groups of the same sizes.
        `lowbit.load_optimizer` can also match by a model's order, and reads files of other
        libraries.

        Warns:
            UserWarning: no parameter has state in the state dict; or a group here joins parameters
                of several saved groups that differ in a setting, which then stays as it is.

        Raises:
            TypeError, ValueError: this optimizer has no such setting of a group,
                such as another number of betas.
            ValueError: the groups differ, names contradict positions, or a layout is unknown;
                the message has what to do.
        """
        self.wait_for_steps()
        with self.whole_groups():  # DeepSpeed empties them between steps
            restore(self, state_dict)

    def override_quantize_enable(self, module: torch.nn.Module, name: str, enable: bool) -> None:
        """Decides whether one parameter's state is quantized,
        whatever `full_precision` and `min_numel` say.

        Call it before the parameter's first step.

        Args:
            module, name: the parameter is `getattr(module, name)`.
            enable: True quantizes the state, False keeps it in full precision.

        Raises:
            ValueError: it is not a parameter of this optimizer, was stepped already, or has too few
                dimensions or too short rows.
        """
        p: Any = getattr(module, name, None)
        group, known, index = self._found(p, name)
        if float(self.state.get(p, {}).get("step", 0.0)) > 0:
            raise ValueError(
                f"{name!r} has been stepped; whether its state is quantized "
                "is decided before the first step"
            )
        if enable and choose.is_full_precision(tuple(p.shape), None, (), 0):
            raise ValueError(
                f"{name!r} of shape {tuple(p.shape)} cannot be quantized: that takes two "
                f"dimensions and rows of {ops.policy('thresholds')['min_cols']}"
            )
        lay = next(lay for _, q, lay in self.laid_out() if q is p)
        before = group.get("overrides")
        pattern = overrides.matched(group, known, index)
        options = dict(before[pattern]) if before and pattern is not None else {}
        options.update(
            {"full_precision": False, "min_numel": 0} if enable else {"full_precision": True}
        )
        if not enable:
            options.pop("state_format", None)
        key = str(index) if known is None else glob.escape(overrides.clean_name(known))
        rest = {k: v for k, v in (before or {}).items() if k != key}
        group["overrides"] = {key: options, **rest}
        self.structure.forget(group)
        kept = self.state.pop(p, None)
        bits = lay.compensation.key if lay.compensation else None
        if kept and bits in kept:
            self.state[p] = {bits: kept[bits]}  # of the weight, whatever its moments are kept in
        self.lay_out_again()
        try:
            self.init_state()
        except BaseException:  # such as where sharding splits its blocks: undo
            group["overrides"] = before
            if before is None:
                del group["overrides"]
            self.state.pop(p, None)
            if kept is not None:
                self.state[p] = kept
            self.structure.forget(group)
            self.lay_out_again()
            raise

    def stats(self, *, probe: bool = False) -> Stats:
        """The size and quality of the state, for each parameter and in total, from every value;
        no sample is taken.

        The result prints as a summary and a table of groups of like tensors; its `table()` has a
        row for each tensor, its `scalars()` the numbers to log, and notebooks show it as HTML.

        Args:
            probe: also runs the next step on copies, with the current gradients, and compares the
                values that it would store with those that it computed; False by default. A
                collective if parameters are sharded and their rule or scales reduce anything, or
                their state lies elsewhere.

        Returns:
            {"parameters": {name: entry}, "total": entry}, of the local shards. An entry has:
            `values`: the number of elements.
            `bytes`: of each component, which are `parameter`, its `compensation`, `codes`,
                `scales`, `full_precision` state, `factors`, `numbers` and `other`; and
                `bytes_per_value`.
            `states`: for each quantized state the share of values whose code is the lowest or the
                highest but 0 (`saturated`), the share that reads as 0 (`zero`), and the share of
                codes that occur (`used`; in the total the mean).
            With `probe` a state also has `rms_error`, the root mean square of the storage error
            relative to that of the state, and `max_error`, the largest error relative to its value.
            The entry has `updates`, the share of weights that the same step in float32 changes, and
            `lost`, the share that it changes but the stored step does not. `lost_updates` is the
            share of these updates that is lost for good: it does not count weights that stochastic
            rounding leaves as they are, because it moves others further.
            Parameters that are rounded to nearest without compensation, under rules whose updates
            are about as large as the learning rate, have `out_of_reach`: the share of weights so
            large that such an update is lost.

        Warns:
            UserWarning: once for an optimizer, and only of weights that are rounded to nearest
                without compensation: a tenth of the updates is lost, or half of the weights is out
                of reach.
        """
        self.wait_for_steps()
        with self.whole_groups():
            return collect(self, probe)
