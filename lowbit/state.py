"""What an optimizer keeps: which state each parameter has, how it is laid out, and when it comes into being."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from lowbit import layout, memory, overrides, shard
from lowbit.batch import reductions
from lowbit.coding import fresh_slot
from lowbit.holders import Holders
from lowbit.layout import Layout
from lowbit.options import STRUCTURE, check_group
from lowbit.restore import restore


class StateKeeper(Optimizer):
    """An optimizer as far as it keeps state; `LowbitOptimizer` steps with it.

    State is plain tensors (DTensors placed as the parameter where that is one), created at construction for every parameter that requires
    a gradient; see docs/formats.md for the keys. `defaults` are what `lowbit.options.shared` makes of a constructor's arguments, and checks.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._layouts: dict[Any, Layout] = {}
        self._pieces: dict[Tensor, list[shard.Piece]] = {}  # of flat shards: fsdp1.bind
        self._holders: Holders | None = None
        self._laid_out_for: Any = None
        self._structure: dict[int, tuple[Any, dict[str, Any]]] = {}  # by group
        self._ready = False
        # In no group, so that checkpoints do not differ by it and load whatever it is.
        self.state_memory = memory.checked(defaults.pop("state_memory", "device"))
        # Left out of the groups where they say nothing, so that checkpoints without them still load.
        optional = ("overrides", "min_numel")
        defaults = {k: v for k, v in defaults.items() if k not in optional or v not in (None, {})}
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
        self._layouts = {}
        self._laid_out_for, self._structure = self._decided(), {}
        self.__dict__.setdefault("_pieces", {})
        self._holders = None
        self._ready = True

    def _lay_out_again(self) -> None:
        """Forgets what was decided about parameters and made of them."""
        self._layouts.clear()
        self._holders = None

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
            check_group("the parameter group", param_group)
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
        self._pieces = pieces
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` gave; dtypes stay as they are.

        A torch AdamW or Adam state dict is taken too: its float moments are encoded into this optimizer's formats on the spot. So is lowbit state in other
        formats than this optimizer's. How state is laid out (`lowbit.options.STRUCTURE`) stays this optimizer's; all
        other group entries are the loaded ones.

        Raises:
            ValueError: other groups than here, or a layout that is not known, with what to do.
        """
        restore(self, state_dict)


def _steps(state: Mapping[str, Any]) -> float:
    """Of a parameter, or of the original ones in a flattened one."""
    inside = [_steps(values) for values in state.values() if isinstance(values, dict)]
    return max([float(state.get("step", 0.0)), *inside])
