"""The optimizers: torch.optim.Optimizer in every respect that a scheduler, scaler, hook, trainer or checkpoint can see."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from lowbit import layout, ops, shard
from lowbit.adopt import adopt_state
from lowbit.batch import Batch, reductions, run_phases
from lowbit.coding import fresh_slot

# Group entries that say how state is laid out: the live optimizer's, whatever a loaded state dict says.
STRUCTURE = ("state_format", "param_format", "wide", "rank")


class LowbitOptimizer(Optimizer):
    """What every lowbit optimizer shares: state, its layout, loading, and one operator call for each group and device.

    State is plain tensors (DTensors placed as the parameter where that is one), created at construction for every parameter that requires
    a gradient; see docs/formats.md for the keys. A subclass says which update rule a group takes and with which hyperparameters.
    """

    _step_supports_amp_scaling = (
        True  # GradScaler hands over grad_scale and found_inf instead of unscaling
    )

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._layouts: dict[Tensor, layout.Layout] = {}
        self._plans: dict[Any, tuple[list[int], Tensor]] = {}
        self._ready = False
        super().__init__(params, defaults)
        self._ready = True
        self.init_state()

    # For subclasses

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        """The update rule of a parameter of this global shape, as the catalog names it."""
        raise NotImplementedError

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        """The rule's hyperparameters in the catalog's order; the learning rate first, 0 where it is a tensor."""
        raise NotImplementedError

    def layout_of(
        self, group: Mapping[str, Any], p: Tensor, name: str | None, index: int
    ) -> layout.Layout:
        """How the state of a parameter is laid out; `index` counts parameters over all groups."""
        return layout.layout_of(self.rule(group, tuple(p.shape)), group, p, name, index)

    def initial(self, group: Mapping[str, Any], name: str) -> float:
        """What fresh state of that name is filled with."""
        return 0.0

    # State

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._layouts, self._plans = {}, {}
        self._ready = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's, and state for the new parameters."""
        super().add_param_group(param_group)
        if self._ready:
            self._layouts.clear()
            self.init_state()

    def init_state(self) -> None:
        """Creates state for every parameter that requires a gradient and has none, empty shards included.

        Called at construction. Parameters on the meta device are left out until a later call, or the first step: build the optimizer before
        the weights exist, materialise them, then call this.
        """
        for group, p, lay in self._laid_out():
            if p.requires_grad and not p.is_meta and not self.state.get(p):
                self.state[p] = self._fresh(group, p, lay)

    def _fresh(self, group: Mapping[str, Any], p: Tensor, lay: layout.Layout) -> dict[str, Tensor]:
        device = shard.local(p).device
        state = {
            "step": torch.zeros(
                (), dtype=torch.float32, device=device if device.type == "cuda" else "cpu"
            ),
            "stream": torch.tensor(lay.stream, dtype=torch.int64),
        }
        for entry in lay.entries():
            tensor = torch.zeros(entry.local, dtype=entry.dtype, device=device)
            state[entry.key] = shard.like(p, tensor, entry.shape, entry.follows)
        for slot in lay.slots:  # the code of zero is not 0 in every format
            value = self.initial(group, slot.name)
            if slot.coded or value:
                tensors = fresh_slot(value, lay, slot, device)
                for entry, tensor in zip(slot.entries(lay.part), tensors, strict=True):
                    shard.local(state[entry.key]).copy_(tensor)
        return state

    def _laid_out(self) -> Iterable[tuple[dict[str, Any], Tensor, layout.Layout]]:
        """Every parameter with its group and layout."""
        index = 0
        streams: dict[int, str] = {}
        complete = len(self._layouts) == sum(len(group["params"]) for group in self.param_groups)
        for group in self.param_groups:
            names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                if not complete and p not in self._layouts:
                    self._layouts[p] = self.layout_of(group, p, names[i] if names else None, index)
                if not complete and names:
                    stream = self._layouts[p].stream
                    other = streams.setdefault(stream, names[i])
                    if other != names[i]:
                        raise ValueError(
                            f"parameters {other!r} and {names[i]!r} have the same stream of random bits ({stream}, the CRC-32 of the "
                            "name); rename one of them"
                        )
                index += 1
                yield group, p, self._layouts[p]

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss; run with gradients enabled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._create_late_state():
            return loss
        with_grad = [
            (number, p)
            for number, group in enumerate(self.param_groups)
            for p in group["params"]
            if p.grad is not None
        ]
        self._update(with_grad, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        return loss

    def _update(
        self,
        params: Iterable[tuple[int, Tensor]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Steps these parameters, each with the number of its group."""
        batches: dict[Any, Batch] = {}
        for number, p in params:
            value, lay = shard.local(p), self._layouts[p]
            where = (number, value.device, lay.rule, lay.phases, reductions(lay))
            batch = batches.get(where)
            if batch is None:
                batch = batches[where] = Batch(self.param_groups[number], lay)
            batch.add(p, value, lay, self.state[p])
        for where, batch in batches.items():
            group, device = batch.group, where[1]
            lr = group["lr"]
            batch.call = functools.partial(
                ops.step,
                batch.rule,
                batch.params,
                batch.grads,
                batch.state,
                batch.steps,
                self._plan(where, batch),
                self.hyper(group, batch.rule),
                lr=shard.local(lr) if isinstance(lr, Tensor) else None,
                grad_scale=_on(grad_scale, device),
                found_inf=_on(found_inf, device),
                maximize=group["maximize"],
                seed=group["seed"],
            )
        run_phases(list(batches.values()))

    def _plan(self, where: Any, batch: Batch) -> Tensor:
        """The plan of a batch, kept until its parameters or their streams change."""
        if torch.compiler.is_compiling():
            return batch.plan()
        kept = self._plans.get(where)
        if kept is None or kept[0] != batch.ids:
            kept = self._plans[where] = (batch.ids, batch.plan())
        return kept[1]

    def _create_late_state(self) -> bool:
        """State for parameters that had none (they were on the meta device). True where this call was only there to create it.

        torch.distributed.checkpoint initialises an optimizer without state by a step with lr = 0 and zero gradients, and torch's own optimizers
        count it. With state that exists at construction that step never runs; where it does run, it creates state and counts nothing.
        """
        if len(self._layouts) == sum(len(group["params"]) for group in self.param_groups) and all(
            self.state.get(p) or not p.requires_grad
            for group in self.param_groups
            for p in group["params"]
        ):
            return False
        fresh = not any(self.state.values())
        self.init_state()
        grads = [
            shard.local(p.grad)
            for g in self.param_groups
            for p in g["params"]
            if p.grad is not None
        ]
        zero_lr = all(float(group["lr"]) == 0.0 for group in self.param_groups)
        return fresh and zero_lr and not any(bool(grad.any()) for grad in grads)

    # Loading

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` gave; dtypes stay as they are.

        A torch AdamW or Adam state dict is taken too: its float moments are encoded into this optimizer's formats on the spot. So is lowbit state in other
        formats than this optimizer's. How state is laid out (`state_format`, `param_format`, `wide`) stays this optimizer's; all
        other group entries are the loaded ones.

        Raises:
            ValueError: other groups than here, or a layout that is not known, with what to do.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        saved_groups = deepcopy(state_dict["param_groups"])
        if len(saved_groups) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        lengths = [
            (len(a["params"]), len(b["params"]))
            for a, b in zip(saved_groups, self.param_groups, strict=True)
        ]
        if any(a != b for a, b in lengths):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
            )
        ids = [key for group in saved_groups for key in group["params"]]
        by_id = dict(zip(ids, self._laid_out(), strict=True))
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in state_dict["state"].items():
            if key not in by_id:
                state[key] = value
                continue
            _, p, lay = by_id[key]
            if value:
                state[p] = adopt_state(p, lay, value, key)
        for group, p, lay in by_id.values():
            if p.requires_grad and not p.is_meta and p not in state:
                state[p] = self._fresh(group, p, lay)
        groups = []
        for saved, group in zip(saved_groups, self.param_groups, strict=True):
            own = {key: group[key] for key in STRUCTURE if key in group}
            names = {"param_names": group["param_names"]} if "param_names" in group else {}
            groups.append({**group, **saved, **own, **names, "params": group["params"]})
        self.__setstate__({"state": state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _on(number: Tensor | None, device: torch.device) -> Tensor | None:
    return None if number is None else shard.local(number).to(device)


class AdamW(LowbitOptimizer):
    """AdamW (arXiv:1711.05101) with state in few bits and, for bfloat16 parameters, no master copy.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts. Names (`model.named_parameters()`, `lowbit.param_groups(model)`) make checkpoints and
            random bits independent of parameter order.
        lr: learning rate, a float or a tensor of one element.
        betas: decay of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: decoupled, applied before the update.
        amsgrad: keep the largest second moment, in a third state tensor.
        maximize: ascend instead.
        foreach, fused: accepted as torch has them and ignored; there is one implementation, and it is fused.
        capturable: accepted as torch has it; the CUDA step never waits for the device and can be captured either way.
        differentiable: not supported; True raises.
        state_format: "8bit" (dynamic8, 1 + 4/256 bytes a value), "float32", "bfloat16", a format of `lowbit.catalog()`, or a mapping
            {"exp_avg": ..., "exp_avg_sq": ...}.
        param_format: "auto": stochastic rounding for bfloat16, plain for float32; or "bfloat16" (to nearest), "bfloat16_stochastic", "float32".
        wide: name patterns (fnmatch) whose parameters keep float32 state, or True for all of a group. Parameters of fewer than 4096 elements, fewer
            than 2 dimensions or rows shorter than 16 always do.
        seed: of the random bits. The last four are per group, as the others are.

    Raises:
        ValueError: a hyperparameter out of range (torch's words), or a parameter that cannot be served, with its name and numbers.
    """

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_format: str | Mapping[str, str] = "8bit",
        param_format: str = "auto",
        wide: bool | Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not float(lr) >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not eps >= 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        for i in (0, 1):
            if not 0.0 <= float(betas[i]) < 1.0:
                raise ValueError(f"Invalid beta parameter at index {i}: {betas[i]}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if differentiable:
            raise ValueError(
                "differentiable=True is not supported: the state is not differentiable. Use torch.optim for that"
            )
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        if isinstance(wide, str):
            wide = (wide,)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "state_format": state_format,
            "param_format": param_format,
            "wide": wide,
            "seed": seed,
            "lowbit_version": 1,
        }
        super().__init__(params, defaults)

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return ("adamw" if self._decoupled else "adam") + ("_amsgrad" if group["amsgrad"] else "")

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        first = 0.0 if isinstance(lr, Tensor) else lr
        return [first, float(beta1), float(beta2), group["eps"], group["weight_decay"]]


class Adam(AdamW):
    """Adam (arXiv:1412.6980) with L2 weight decay, `weight_decay=0` by default; otherwise as `AdamW`."""

    _decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_format: str | Mapping[str, str] = "8bit",
        param_format: str = "auto",
        wide: bool | Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            state_format=state_format,
            param_format=param_format,
            wide=wide,
            seed=seed,
        )


class AdamW8bit(AdamW):
    """`AdamW` under the name that bitsandbytes and torchao use."""


class Adam8bit(Adam):
    """`Adam` under the name that bitsandbytes and torchao use. Its decay is L2, as in torch; bitsandbytes' Adam8bit decouples it."""
