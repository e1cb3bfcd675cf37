"""Schedule-Free AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit import sharding
from lowbit.config import arguments
from lowbit.config.arguments import Options
from lowbit.optim.optimizer import LowbitOptimizer
from lowbit.state.torch_functions import is_loading
from lowbit.state.weights import mix
from lowbit.step.group import StepGroup
from lowbit.step.numbers import capturing
from lowbit.step.versions import raise_versions, versioned


class ScheduleFreeAdamW(LowbitOptimizer):
    """Schedule-Free AdamW (arXiv:2405.15682): an average of the weights takes the place of a
    learning rate schedule.

    Call `train()` before training and `eval()` before evaluating or saving, as with the authors'
    `schedulefree`. In between, the parameters hold the weights that gradients are taken at (y), and
    after `eval()` the average (x), which is the result. The state holds a third copy (z) and the
    second moment; x is computed from y and z in place.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr: learning rate, a float or a tensor of one element on the CPU; 0.0025 by default. A
            schedule on top of it is allowed and not needed.
        betas: share of the average in y, above 0, and decay of the second moment;
            (0.9, 0.999) by default.
        eps: added to the denominator; 1e-8 by default.
        weight_decay: applied at y; 0 by default.
        warmup_steps: steps over which the learning rate grows linearly to `lr`; 0 by default.
        r: step t has weight t^r in the average; 0 by default.
        weight_lr_power: and the largest learning rate so far, to this power; 2 by default.
        foreach: accepted for the signature of `schedulefree` and ignored.
        maximize: maximizes the objective instead; False by default.
        state_format: "8bit" by default. A preset or format stores exp_avg_sq; z is a copy of
            weights and has their precision: float32, or bfloat16 rounded stochastically for
            bfloat16 parameters without compensation. A mapping {"z": ..., "exp_avg_sq": ...} says
            it for both.
        param_format, full_precision, seed, overrides, min_numel, state_memory: as in `Adam`.

    Raises:
        ValueError: an argument is out of range; betas[0] is 0, from which x cannot be recovered; lr
            is a tensor on a GPU; or ZeroRedundancyOptimizer hands out groups of
            `lowbit.param_groups`, and a mode would be one rank's.
    """

    counted = ("k", "train_mode", "weight_sum", "lr_max")

    @arguments.documents_options(Options)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = arguments.group_defaults(self, lr, maximize=maximize, foreach=foreach, **options)
        defaults |= {
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
            "r": r,
            "weight_lr_power": weight_lr_power,
            "k": 0,
            "train_mode": False,
            "weight_sum": 0.0,
            "lr_max": -1.0,
            "scheduled_lr": 0.0,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        _check_host(group["lr"])
        super().check_options(group)
        arguments.check_betas(group["betas"])
        if not float(group["betas"][0]) > 0.0:
            raise ValueError(
                "betas[0] is 0: the parameters would be z alone, from which the average x cannot "
                "be computed; it should be in (0, 1)"
            )
        arguments.check_least(epsilon=group["eps"], weight_decay=group["weight_decay"])
        arguments.check_least(warmup_steps=group["warmup_steps"], r=group["r"])
        arguments.check_least(weight_lr_power=group["weight_lr_power"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict) and self.param_groups:
            param_group["train_mode"] = self.param_groups[0]["train_mode"]
        super().add_param_group(param_group)

    add_param_group.__doc__ = LowbitOptimizer.add_param_group.__doc__

    @contextlib.contextmanager
    def _adding(self, param_group: Any) -> Iterator[None]:
        with super()._adding(param_group):
            if self.names.by_parts:
                raise ValueError(
                    "ScheduleFreeAdamW got a part of a group of lowbit.param_groups, as torch's "
                    "ZeroRedundancyOptimizer hands it out: that one overwrites the mode in each "
                    "step, and train() and eval() would change this part's weights on this rank "
                    "alone. Use fully_shard, or give a group the names of its own parameters"
                )
            yield

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "schedule_free_adamw"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        lr, average, _ = _next(group)
        beta1, beta2 = group["betas"]
        return [lr, float(beta1), float(beta2), group["eps"], group["weight_decay"], average]

    # Modes

    def train(self) -> None:
        """Sets the parameters to y, the weights at which gradients are taken.
        Without effect in train mode.

        Weights are rounded to the nearest. They do not wander off: after the first rounding any
        number of calls of `eval()` and `train()` leaves the same bits, but for a few of weights
        with correction bits, which come to rest. A collective, as `eval()` is, if the state of a
        sharded parameter lies elsewhere: then call it on all ranks.
        """
        self._set_mode(True)

    def eval(self) -> None:
        """Sets the parameters to x, the average: evaluate and save these weights.
        Without effect in eval mode.
        """
        self._set_mode(False)

    @torch.no_grad()
    def _set_mode(self, train: bool) -> None:
        moving = [group for group in self.param_groups if bool(group["train_mode"]) != train]
        if moving:
            self._give_up_gathered()
        for group, p, lay in self.laid_out():
            state = self.state_of(p)
            if not any(group is one for one in moving) or not float(state.get("step", 0.0)) > 0:
                continue  # z begins as the parameter, in its first step
            beta1 = float(group["betas"][0])
            slot = next(slot for slot in lay.slots if slot.name == "z")
            mix(p, lay, state, slot, 1.0 - beta1 if train else 1.0 - 1.0 / beta1)
            raise_versions(versioned([p]))
        for group in moving:
            group["train_mode"] = train

    def _give_up_gathered(self) -> None:
        """Gives up weights that FSDP has gathered and holds beyond a pass, as after an evaluation:
        the next pass would take those of the mode before.
        """
        sharding.reshard_owners({p for group in self.param_groups for p in group["params"]})
        model = None if self.wrapped is None else self.wrapped()
        if model is not None:
            sharding.reshard_flat(model)

    def _check_mode(self) -> None:
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                "the optimizer is in eval mode, in which parameters are the average of the "
                "weights: call opt.train() before training, and opt.eval() "
                "before evaluating or saving"
            )

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict.

        Raises:
            RuntimeError: the optimizer has stepped and is in train mode, in which the model's
                weights are not the result: call `eval()`, save both, then call `train()`.
        """
        if not is_loading():  # torch asks for the state that it replaces
            self.check_saving()
        return super().state_dict()

    def check_saving(self) -> None:
        if any(group["train_mode"] and group["k"] for group in self.param_groups):
            raise RuntimeError(
                "the optimizer is in train mode, in which the model's weights are not the average "
                "that a checkpoint should have: call opt.eval(), save the model and the optimizer, "
                "then call opt.train(). To load one into what torch.distributed.checkpoint gets "
                "here, call opt.eval() before the weights are loaded"
            )

    def _check_overwritten(self) -> None:
        raise ValueError(
            "LocalSGD and DiLoCo overwrite the weights, which ScheduleFreeAdamW keeps as one of "
            "three copies that belong together: use AdamW"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(_with_steps(state_dict))

    load_state_dict.__doc__ = LowbitOptimizer.load_state_dict.__doc__

    # The step

    def prepare_step(self) -> bool:
        self._check_mode()
        return super().prepare_step()

    @torch._disable_dynamo  # the weights of the average are another number in every step
    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None, grad_scale: Tensor | float | None) -> Any:
        self._check_mode()
        if capturing():
            raise RuntimeError(
                "a CUDA graph would replay this step's weight in the average for all steps; step "
                "ScheduleFreeAdamW outside of graphs"
            )
        # Parameters that the backward pass has stepped were, whatever was found after them.
        early = bool(self.stepped_early)
        found_inf = getattr(self, "found_inf", None)
        loss = super()._step(closure, grad_scale)
        if early or found_inf is None or not bool(sharding.local(found_inf)):
            for group in self.param_groups:
                group.update(_next(group)[2])
        return loss

    def call_options(
        self, step_group: StepGroup, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> tuple[list[float], dict[str, Any]]:
        hyper, options = super().call_options(step_group, grad_scale, found_inf)
        return hyper, {**options, "lr": None}  # in `hyper`, with the warm-up


def _check_host(lr: float | Tensor) -> None:
    """Raises ValueError if a learning rate is a tensor of which the host would have to wait in
    every step.
    """
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        raise ValueError(
            f"lr is a tensor on {lr.device}, but the weights of the average are computed from it "
            "on the host; pass a float, or a tensor on the CPU"
        )


def _next(group: Mapping[str, Any]) -> tuple[float, float, dict[str, Any]]:
    """The learning rate and the share in the average of a group's next step,
    and the group's entries after it.

    A step with a learning rate of 0 changes no weights and does not count.
    """
    lr, t, warmup = float(group["lr"]), group["k"] + 1, group["warmup_steps"]
    if lr == 0.0:
        return 0.0, 0.0, {}
    if t <= warmup:
        lr *= t / warmup
    lr_max = max(lr, group["lr_max"])
    weight = float(t) ** group["r"] * lr_max ** group["weight_lr_power"]
    total = group["weight_sum"] + weight
    entries = {"k": t, "scheduled_lr": lr, "lr_max": lr_max, "weight_sum": total}
    return lr, weight / total if total else 0.0, entries


def _with_steps(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of schedulefree's AdamWScheduleFree, which counts steps in the groups,
    with those of each parameter.
    """
    groups, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        return state_dict
    made = dict(state)
    for group in groups:
        for key in group.get("params", ()):
            kept = made.get(key)
            if isinstance(kept, Mapping) and "z" in kept and "step" not in kept and "k" in group:
                made[key] = {**kept, "step": float(group["k"])}
    return {**state_dict, "state": made}
