"""The optimizers: torch.optim.Optimizer in every respect that a scheduler, scaler, hook, trainer or checkpoint can see."""

from __future__ import annotations

import glob
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from lowbit import layout, memory, overrides, shard
from lowbit.adopt import Adoption, adopt_state, holds, is_stored
from lowbit.batch import Batch, reductions, run_phases
from lowbit.coding import fresh_slot
from lowbit.holders import Holders
from lowbit.layout import Layout
from lowbit.options import check_group
from lowbit.stats import Stats, collect
from lowbit.steady import Steady

# Group entries that say how state is laid out: the live optimizer's, whatever a loaded state dict says.
STRUCTURE = (
    "state_format", "param_format", "wide", "overrides", "min_numel", "rank", "decoupled_weight_decay"
)  # fmt: skip


class LowbitOptimizer(Optimizer):
    """What every lowbit optimizer shares: state, its layout, loading, and one operator call for each group and device.

    State is plain tensors (DTensors placed as the parameter where that is one), created at construction for every parameter that requires
    a gradient; see docs/formats.md for the keys. A subclass says which update rule a group takes and with which hyperparameters.
    """

    _step_supports_amp_scaling = (
        True  # GradScaler hands over grad_scale and found_inf instead of unscaling
    )

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._layouts: dict[Any, Layout] = {}
        self._pieces: dict[Tensor, list[shard.Piece]] = {}  # of flat shards: fsdp1.bind
        self._holders: Holders | None = None
        self._plans: dict[Any, tuple[list[Tensor], list[int], Tensor]] = {}
        self._steady: Steady | None = None
        self._laid_out_for: Any = None
        self._structure: dict[int, tuple[Any, dict[str, Any]]] = {}  # by group
        self._ready = False
        # In no group, so that checkpoints do not differ by it and load whatever it is.
        self.state_memory = memory.checked(defaults.pop("state_memory", "device"))
        # Left out of the groups where they say nothing, so that checkpoints without them still load.
        optional = ("overrides", "min_numel")
        defaults = {k: v for k, v in defaults.items() if k not in optional or v not in (None, {})}
        _check_group("the optimizer", defaults)
        super().__init__(params, defaults)
        self._ready = True
        if self._unbound():
            return  # fsdp1.bind goes on from here
        overrides.check_matched(self.param_groups)
        self.init_state()

    # For subclasses

    decides: tuple[
        str, ...
    ] = ()  # group entries that the rule depends on and that may change between steps

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        """The update rule of a parameter of this global shape, as the catalog names it."""
        raise NotImplementedError

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        """The rule's hyperparameters in the catalog's order; the learning rate first, 0 where it is a tensor."""
        raise NotImplementedError

    def layout_of(
        self, group: Mapping[str, Any], p: Tensor, name: str | None, index: int
    ) -> Layout:
        """How the state of a parameter is laid out; `index` counts parameters over all groups."""
        return layout.layout_of(self.rule(group, tuple(p.shape)), group, p, name, index)

    def initial(self, group: Mapping[str, Any], name: str) -> float:
        """What fresh state of that name is filled with."""
        return 0.0

    # State

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "state_memory": self.state_memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("state_memory", "device")  # of one that was pickled before
        self._layouts, self._plans, self._steady = {}, {}, None
        self._laid_out_for, self._structure = self._decided(), {}
        self.__dict__.setdefault("_pieces", {})
        self._holders = None
        self._ready = True

    def _lay_out_again(self) -> None:
        """Forgets what was decided about parameters and made of them."""
        self._layouts.clear()
        self._plans.clear()
        self._steady = None

    def _check_structure(self) -> None:
        """ValueError where a group says something else of how state is laid out than when that was done."""
        for number, group in enumerate(self.param_groups):
            now = {key: group.get(key) for key in STRUCTURE if key not in self.decides}
            known, before = self._structure.get(id(group), (None, now))
            for key in now if known is group else ():
                if now[key] != before[key]:
                    raise ValueError(
                        f"group {number} has {key}={now[key]!r}, but its state was laid out for {before[key]!r}: build another optimizer with it and load "
                        "this one's state dict into that"
                    )
            self._structure[id(group)] = (group, now)

    def _decided(self) -> list[Any]:
        """What the layouts depend on and groups say now."""
        return [
            [(group[key] is None, bool(group[key])) for key in self.decides]
            for group in self.param_groups
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's, and state for the new parameters."""
        if isinstance(param_group, dict):
            _check_group("the parameter group", param_group)
        super().add_param_group(param_group)
        if self._ready and not self._unbound():
            self._lay_out_again()
            try:
                overrides.check_matched(self.param_groups)
                self.init_state()
            except BaseException:
                self.param_groups.pop()
                self._lay_out_again()
                raise

    def init_state(self) -> None:
        """Creates state for every parameter that requires a gradient and has none, or not all of it, empty shards included.

        Called at construction. Parameters on the meta device are left out until a later call, or the first step: build the optimizer before
        the weights exist, materialise them, then call this.
        """
        self._check_structure()
        self._laid_out_for = self._decided()
        self._drop_replaced()
        if self._unbound():
            self._layouts.clear()  # of whole parameters, where FSDP1 came later: refused below
        for group, p, lay in self._laid_out():
            if p.requires_grad and not p.is_meta:
                state = self._state_of(p)
                if not state or any(key not in state for key in lay.keys):
                    self._keep(p, {**self._fresh(group, p, lay), **state})

    def _drop_replaced(self) -> None:
        """Forgets parameters that something put others in the place of after construction, as Accelerate does where it shards."""
        here = {p for group in self.param_groups for p in group["params"]}
        gone = [p for p in self.state if isinstance(p, Tensor) and p not in here]
        if not any(p.requires_grad and not self.state.get(p) for p in here):
            gone = []  # nothing is in their place: a group was taken out, which keeps its state
        for p in gone:
            if _steps(self.state[p]) > 0:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} was replaced in the optimizer's groups after it had been stepped, and its state cannot "
                    "follow; wrap or shard the model first, then load the checkpoint"
                )
            del self.state[p]
        owners = (p.owner if isinstance(p, shard.Piece) else p for p in self._layouts)
        if any(p not in here for p in owners):
            self._lay_out_again()

    def state_dict(self) -> dict[str, Any]:
        """torch's; with state for every parameter, those included that were put in the place of others since."""
        self.init_state()
        return super().state_dict()

    def _state_of(self, p: Any) -> dict[str, Any]:
        """The state of a parameter, or of a piece: that of a flattened parameter holds one for each original parameter, by name."""
        if not isinstance(p, shard.Piece):
            return self.state.get(p, {})
        kept = self.state.get(p.owner, {})
        return kept if p.alone else kept.get(p.name, {})

    def _keep(self, p: Any, values: dict[str, Any], among: Any = None) -> None:
        """Makes `values` the state of a parameter or a piece."""
        among = self.state if among is None else among
        if isinstance(p, shard.Piece) and not p.alone:
            among[p.owner][p.name] = values
        else:
            among[p.owner if isinstance(p, shard.Piece) else p] = values

    def _unbound(self) -> bool:
        """Whether flat shards are there whose places in the original parameters are not known yet."""
        return any(
            shard.is_flat(p) and p not in self._pieces
            for g in self.param_groups
            for p in g["params"]
        )

    def _fresh(self, group: Mapping[str, Any], p: Any, lay: Layout) -> dict[str, Tensor]:
        device = shard.local(p).device
        state = {
            "step": torch.zeros(
                (), dtype=torch.float32, device=device if device.type == "cuda" else "cpu"
            ),
            **lay.told(lay.stream),
        }
        for entry in lay.entries():
            tensor = memory.empty(lay, entry, device, self.state_memory).zero_()
            state[entry.key] = shard.like(p, tensor, entry.shape, entry.follows)
        for slot in lay.slots:  # the code of zero is not 0 in every format
            value = self.initial(group, slot.name)
            if slot.coded or value:
                tensors = fresh_slot(value, lay, slot, device)
                for entry, tensor in zip(lay.of_slots[slot.name], tensors, strict=True):
                    shard.local(state[entry.key]).copy_(tensor)
        return state

    def _bind_pieces(self, pieces: dict[Tensor, list[shard.Piece]]) -> None:
        """Takes the original parameters for the flat shards that hold pieces of them; state that was laid out otherwise is dropped."""
        late = [p for p in pieces if p not in self._pieces]
        for p in late:
            if float(self.state.get(p, {}).get("step", 0.0)) > 0:
                raise RuntimeError(
                    f"{sum(len(pieces[p]) for p in late)} parameters became flat shards of FSDP1 after the optimizer had been stepped, and its state cannot "
                    "follow; wrap the model first, then load the checkpoint"
                )
        for p in late:
            self.state.pop(p, None)
        self._pieces, self._holders = pieces, None
        self._lay_out_again()
        overrides.check_matched(
            [
                {**group, "param_names": [name for k, _, name, _ in self._members() if k == number and name] or None}
                for number, group in enumerate(self.param_groups)
            ]
        )  # fmt: skip
        self.init_state()

    def _members(self) -> Iterable[tuple[int, Any, str | None, int]]:
        """Every parameter, pieces in place of flattened ones: (number of its group, parameter, name, number over all groups)."""
        index = 0
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                name = names[i] if names else None
                for piece in self._pieces.get(p, ()):
                    yield number, piece, name if piece.alone else piece.name, index
                if p not in self._pieces:
                    yield number, p, name, index
                index += 1

    def _laid_out(self) -> Iterable[tuple[dict[str, Any], Any, Layout]]:
        """Every parameter with its group and layout."""
        streams: dict[int, str] = {}
        members = list(self._members())
        complete = len(self._layouts) == len(members)
        for number, p, name, index in members:
            group = self.param_groups[number]
            if not complete and p not in self._layouts:
                self._layouts[p] = self.layout_of(group, p, name, index)
                reductions(self._layouts[p])  # raises where shards could not agree
            if not complete and name:
                stream = self._layouts[p].stream
                other = streams.setdefault(stream, name)
                if other != name:
                    raise ValueError(
                        f"parameters {other!r} and {name!r} have the same stream of random bits ({stream}, the CRC-32 of the "
                        "name); rename one of them"
                    )
            yield group, p, self._layouts[p]

    def _found(self, p: Any, what: str) -> tuple[dict[str, Any], str | None, int]:
        """The group, the name and the number of a parameter."""
        index = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for i, q in enumerate(group["params"]):
                if q is p and q not in self._pieces:
                    return group, names[i] if names else None, index
                index += 1
        raise ValueError(f"{what!r} of the module is no parameter of this optimizer")

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
        return scale * shard.local(given).to(scale.device)

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
            "lr": shard.local(lr) if isinstance(lr, Tensor) else None,
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

    # Loading

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` gave; dtypes stay as they are.

        A torch AdamW or Adam state dict is taken too: its float moments are encoded into this optimizer's formats on the spot. So is lowbit state in other
        formats than this optimizer's. How state is laid out (`state_format`, `param_format`, `wide`, `overrides`, `min_numel`) stays this optimizer's; all
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
        groups = []
        for saved, group in zip(saved_groups, self.param_groups, strict=True):
            own = {key: group[key] for key in STRUCTURE if key in group}
            saved = {key: value for key, value in saved.items() if key not in STRUCTURE}
            names = {"param_names": group["param_names"]} if "param_names" in group else {}
            groups.append({**group, **saved, **own, **names, "params": group["params"]})
        before = self.param_groups, self._layouts
        self.param_groups, self._layouts = groups, {}  # the rule follows the loaded settings
        try:
            laid_out = list(self._laid_out())
        finally:
            self.param_groups, self._layouts = before
        owners = [p for group in groups for p in group["params"]]
        key_of = dict(zip(owners, ids, strict=True))
        state: defaultdict[Any, Any] = defaultdict(dict)
        adopted: list[tuple[Any, Adoption, bool]] = []
        for _, p, lay in laid_out:
            piece = isinstance(p, shard.Piece)
            key = key_of[p.owner if piece else p]
            value = state_dict["state"].get(key, {})
            if piece and not p.alone:
                value = value.get(p.name, {})
            if value:
                in_place = is_stored(value) or holds(value, self._state_of(p))
                adopt = adopt_state(p, lay, value, key, self.state_memory)
                adopted.append((p, adopt, in_place))
        known = set(ids)
        state.update({k: value for k, value in state_dict["state"].items() if k not in known})
        self._steady = None  # which holds what is here
        for p, adopt, in_place in adopted:  # all of them fit
            made = adopt(self._state_of(p) if in_place else {})
            self._keep(p, made, state)
            self._keep(p, made)  # what was here is free before the next is made
        loaded = {p for p, _, _ in adopted}
        for group, p, lay in laid_out:
            if p.requires_grad and not p.is_meta and p not in loaded:
                self._keep(p, self._fresh(group, p, lay), state)
        self.__setstate__({"state": state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _check_group(what: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError where the options given in one place contradict each other, TypeError where one is of no use."""
    check_group(options)
    overrides.check(options.get("overrides") or {})
    overrides.check_together(what, options)


def _steps(state: Mapping[str, Any]) -> float:
    """Of a parameter, or of the original ones in a flattened one."""
    inside = [_steps(values) for values in state.values() if isinstance(values, dict)]
    return max([float(state.get("step", 0.0)), *inside])


def on_device(number: Tensor | None, device: torch.device) -> Tensor | None:
    """What is here of a tensor of one number, on the device. What the host knows is filled in there: a copy would wait for the device."""
    if number is None:
        return None
    number = shard.local(number)
    if number.device.type == "cpu" != device.type and not torch.compiler.is_compiling():
        return torch.full((), float(number), dtype=number.dtype, device=device)
    return number.to(device)
