"""The state of an optimizer: what each parameter has, its layout, and when it is created."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim.optimizer import Optimizer

from lowbit import sharding
from lowbit.config import arguments, overrides
from lowbit.config.hints import refuse_keywords
from lowbit.state import choose, layout, memory
from lowbit.state.cut_anew import cut_anew
from lowbit.state.fresh import fresh_state
from lowbit.state.frozen import trained_or_plain
from lowbit.state.layout import Layout, check_stream
from lowbit.state.moment import in_other_format
from lowbit.state.param_names import ParamNames
from lowbit.state.place import check_place
from lowbit.state.replaced import replaced
from lowbit.state.settings import check_added
from lowbit.state.structure import Structure
from lowbit.state.whole_groups import WholeGroups


class Member(NamedTuple):
    """A parameter in an optimizer's groups."""

    group: int  # its number
    p: Any  # a parameter, or a flat shard
    name: str | None
    number: int  # of the parameter, counted over all groups


class StatefulOptimizer(Optimizer):
    """The base of an optimizer that keeps state; `LowbitOptimizer` steps with it.

    State is plain tensors, or DTensors placed like a DTensor parameter; docs/definitions/formats.md
    lists the keys. It is created at construction for every parameter that requires a gradient, and
    in the step for any other that has one. `defaults` come from
    `lowbit.config.arguments.group_defaults`, and `check_options` checks them.

    Other rooms read and change state by `members`, `laid_out`, `state_of` and the other methods
    without an underscore that torch does not have. They are not part of the API: users need none of
    them.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.layouts: dict[Any, Layout] = {}
        self._frozen: set[Any] = set()  # parameters that were laid out while they were frozen
        self.flat_shards: dict[Tensor, list[sharding.FlatShard]] = {}  # lowbit.flat.bind
        self._whole_groups: WholeGroups | None = None  # if something shows some at a time
        self.numbered_groups: list[
            list[str]
        ] = []  # names as another program groups and numbers them
        self._laid_out_for: Any = None
        self.structure = Structure()
        self.names = ParamNames()
        self._ready = False
        self.warned: set[str] = set()  # the warnings that were given
        arguments.check_params(type(self).__name__, params)
        # No group entry, so that checkpoints do not depend on it.
        self.state_memory = memory.checked(defaults.pop("state_memory", "device"))
        # No group entries if they are empty, so that checkpoints without them still load.
        optional = ("overrides", "min_numel")
        defaults = {
            k: arguments.plain(v)
            for k, v in defaults.items()
            if k not in optional or v not in (None, {})
        }
        self.check_options(defaults)
        super().__init__(params, defaults)
        self._ready = True
        if self._unbound():
            return  # fsdp1.bind continues from here
        self._check_matched()
        self.init_state()

    # For subclasses

    decides: tuple[
        str, ...
    ] = ()  # group entries that the rule depends on and that may change between steps
    counted: tuple[str, ...] = ()  # group entries that steps write, as a part of the state

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Checks all options of a group, or of the optimizer itself,
        so that a bad one fails here and not in a step.

        Raises:
            TypeError, ValueError, RuntimeError: with torch's messages,
                where torch checks an option.
        """
        arguments.check_shared(group)

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        """The update rule of a parameter of this global shape, as the catalog names it."""
        raise NotImplementedError

    def layout_of(
        self, group: Mapping[str, Any], p: Tensor, name: str | None, index: int
    ) -> Layout:
        """The layout of a parameter's state; `index` counts parameters over all groups."""
        return layout.layout_of(self.rule(group, tuple(p.shape)), group, p, name, index)

    def initial(self, group: Mapping[str, Any], name: str) -> float:
        """The initial value of the state of that name; 0 by default."""
        return 0.0

    # State

    def __getstate__(self) -> dict[str, Any]:
        if self.flat_shards:
            name = next(iter(self.flat_shards.values()))[0].name
            raise TypeError(
                f"an optimizer that is bound to flat slices, such as that of {name!r}, cannot be "
                "copied or pickled, since they belong to these vectors: bind another optimizer "
                "with lowbit.flat.bind, lowbit.fsdp1.bind or lowbit.integrations.deepspeed.bind, "
                "and load this one's state dict into it"
            )
        made = {**super().__getstate__(), "param_groups": self.named_groups()}
        return {**made, "state_memory": self.state_memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        self.__dict__.setdefault("state_memory", "device")  # older pickles have none
        self.layouts, self._frozen = {}, set()
        self._laid_out_for, self.structure = self._decided(), Structure()
        self.__dict__.setdefault("flat_shards", {})
        if self.__dict__.setdefault("_whole_groups", None) is not None:
            self._whole_groups = WholeGroups(self)
        self.__dict__.setdefault("numbered_groups", [])
        self.__dict__.setdefault("names", ParamNames())
        self.names.moved(before, self.param_groups)
        if not self.names.by_parts:
            for group in self.param_groups:
                self.names.remember(group)
        self.check_structure()
        # The original of a copy has said it.
        self.__dict__.setdefault("warned", {"nearest", "signed"})
        self._ready = True

    def lay_out_again(self) -> None:
        """Drops all layouts and what was derived from them."""
        self.layouts.clear()

    def check_structure(self) -> None:
        """Raises ValueError if a group's layout options changed after its state was laid out."""
        self.structure.check(self.param_groups, self.decides)
        if self._whole_groups is None:
            self.structure.forget_removed(self.param_groups, self.state)

    def is_laid_out(self) -> bool:
        """Whether the layouts are those of the groups' options now."""
        return self._laid_out_for == self._decided()

    def _decided(self) -> list[Any]:
        """The current group entries that layouts depend on."""
        return [
            [(group[key] is None, bool(group[key])) for key in self.decides]
            for group in self.param_groups
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch does, and creates state for its parameters.

        Raises:
            TypeError, ValueError: as in the constructor.
            ValueError: the numbers of `param_names` and parameters differ,
                and which name belongs to which is unknown.
        """
        if isinstance(param_group, dict):
            if "rank" not in self.defaults and param_group.get("rank", 0) is None:
                # Embeddings and heads of `lowbit.param_groups`; saved groups keep their old keys.
                param_group = {k: v for k, v in param_group.items() if k != "rank"}
            param_group.update(self._plain(param_group))
            arguments.check_params(type(self).__name__, param_group.get("params"))
            refuse_keywords(type(self).__name__, param_group, group=True)
            arguments.check_group("the parameter group", param_group)
            arguments.warn_of_typos(param_group, self.defaults, self.warned)
            check_added(self, param_group)
        if self._ready:
            self.check_structure()  # a group that was removed before has no part in this
        with self._adding(param_group):
            super().add_param_group(param_group)
            if not self._ready or self._unbound():
                return
            self.lay_out_again()
            try:
                self._check_matched()
                self.init_state()
            except BaseException:
                for p in self.param_groups.pop()["params"]:
                    self.state.pop(p, None)
                self.lay_out_again()
                raise

    def _adding(self, param_group: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which a group is added, which is undone if that fails."""
        if not isinstance(param_group, dict):
            return contextlib.nullcontext()  # torch refuses it
        return self.names.adding(param_group, self.param_groups)

    def names_of(self, number: int) -> list[str] | None:
        """The names of a group's parameters, or None. ValueError where a group was edited so that
        which name is whose is unknown.
        """
        return self.names.of(number, self.param_groups[number], self.flat_shards)

    def named_groups(self, groups: Sequence[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """The groups, or a state dict's of them, with the names of their own parameters."""
        made = []
        for number, group in enumerate(self.param_groups if groups is None else groups):
            names = self.names_of(number)
            made.append(group if names is None else {**group, "param_names": names})
        return made

    def _check_matched(self) -> None:
        """Checks that the patterns of `overrides` and `full_precision` match a name;
        the latter's only warn, and once.
        """
        known = [self.names.of_whole(group) for group in self.param_groups]
        named = {number: names for number, names in enumerate(known) if names is not None}
        overrides.check_matched(self.named_groups(), named, self.warned)

    def init_state(self) -> None:
        """Creates missing state of every parameter that requires or has a gradient,
        empty shards included.

        The constructor calls it. Parameters on the meta device wait for a later call, or for the
        first step. That serves where they stay the same tensors when they get values, as DTensors
        do under `to_empty`. Elsewhere it makes others: materialize first, then build the optimizer.
        """
        self.check_structure()
        if self.layouts and not self.is_laid_out():
            self.lay_out_again()  # such as by OneCycleLR, which gives SGD a momentum
        self._laid_out_for = self._decided()
        self._drop_replaced()
        self._lay_out_trained()
        if self._whole_groups is None:
            self.names.keep(self.param_groups, self.flat_shards)
        if self._unbound():
            self.layouts.clear()  # FSDP1 wrapped the model later, which raises below
        for group, p, lay in self.laid_out():
            if not p.is_meta and (p.requires_grad or p.grad is not None):
                state = self.state_of(p)
                if not state or any(key not in state for key in lay.keys):
                    self._check_format(p, lay, state)
                    self.set_state_of(p, {**self.fresh_state(group, p, lay), **state})

    def _check_format(self, p: Any, lay: Layout, state: Mapping[str, Any]) -> None:
        """Raises ValueError if a parameter was stepped with a moment in another format."""
        other = in_other_format(lay, state)
        if other is None or not float(state.get("step", 0.0)) > 0:
            return
        self.lay_out_again()  # so that the next step says it too
        found = next(member for member in self.members() if member.p is p)
        what = found.number if found.name is None else repr(found.name)
        raise ValueError(
            f"parameter {what} was stepped with {other[0]!r} and would go on with {other[1]!r}: "
            "its name or number, by which options choose the format, has changed. Build the "
            "optimizer from model.named_parameters(), whose names stay where others are removed, "
            "and load a state dict from before the change"
        )

    def _lay_out_trained(self) -> None:
        """Lays out again once a parameter is trained that was frozen: those may have any dtype."""
        trained = {p for p in self._frozen if not (choose.is_frozen(p) or self.state_of(p))}
        if trained:
            self._frozen -= trained
            self.lay_out_again()

    def count_states(self) -> int:
        """How many parameters have state. What others keep in `opt.state` under keys of their own,
        as torch allows, does not count.
        """
        return sum(isinstance(p, Tensor) and bool(kept) for p, kept in self.state.items())

    def _drop_replaced(self) -> None:
        """Drops parameters that were replaced after construction,
        as Accelerate does when it shards.
        """
        here = {p for group in self.param_groups for p in group["params"]}

        def is_here(p: Any) -> bool:
            return (p.owner if isinstance(p, sharding.FlatShard) else p) in here

        for p in replaced(self, here):
            del self.state[p]
        if self._whole_groups is None:
            self._frozen = {p for p in self._frozen if is_here(p)}
        if not all(map(is_here, self.layouts)):
            self.lay_out_again()

    def whole_groups(self) -> contextlib.AbstractContextManager[None]:
        """A context in which `param_groups` has all groups and tensors,
        even if something shows some of them.
        """
        return (
            contextlib.nullcontext()
            if self._whole_groups is None
            else self._whole_groups.whole(self)
        )

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, with state for every parameter,
        including those that replaced others.
        """
        with self.whole_groups():  # DeepSpeed empties them between steps
            self.init_state()
            made = super().state_dict()
            if "param_groups" in made:  # which a hook may have put elsewhere
                made["param_groups"] = self.named_groups([*map(self._plain, made["param_groups"])])
        return made

    def _plain(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with its options as Python's: a schedule may have written NumPy's."""
        options = self.defaults.keys() | arguments.DEFAULTS.keys()
        return {k: arguments.plain(v) if k in options else v for k, v in group.items()}

    def state_of(self, p: Any) -> dict[str, Any]:
        """The state of a parameter or flat shard.
        A flattened parameter's state has an entry per original parameter.
        """
        if not isinstance(p, sharding.FlatShard):
            return self.state.get(p, {})
        kept = self.state.get(p.owner, {})
        return kept if p.alone else kept.get(p.name, {})

    def set_state_of(self, p: Any, values: dict[str, Any], among: Any = None) -> None:
        """Sets the state of a parameter or flat shard."""
        among = self.state if among is None else among
        if isinstance(p, sharding.FlatShard) and not p.alone:
            among[p.owner][p.name] = values
        else:
            among[p.owner if isinstance(p, sharding.FlatShard) else p] = values

    def _unbound(self) -> bool:
        """Whether the optimizer has flat shards that are not bound to original parameters."""
        return any(
            sharding.is_flat(p) and p not in self.flat_shards
            for g in self.param_groups
            for p in g["params"]
        )

    def fresh_state(self, group: Mapping[str, Any], p: Any, lay: Layout) -> dict[str, Tensor]:
        """The state of a parameter or flat shard before its first step."""
        return fresh_state(p, lay, functools.partial(self.initial, group), self.state_memory)

    def bind_flat_shards(
        self, flat_shards: dict[Tensor, list[sharding.FlatShard]], by_parts: bool = False
    ) -> None:
        """Binds flat shards to the original parameters; drops state with another layout,
        which no step has made yet.
        """
        for p in cut_anew(self, flat_shards):
            self.state.pop(p, None)
        self.flat_shards = flat_shards
        self._whole_groups = WholeGroups(self) if by_parts else None
        self.lay_out_again()
        bound = [
            {
                **group,
                "param_names": [m.name for m in self.members() if m.group == number and m.name]
                or None,
            }
            for number, group in enumerate(self.param_groups)
        ]
        overrides.check_matched(bound, warned=self.warned)
        self.init_state()

    def members(self) -> Iterable[Member]:
        """Every parameter, flat shards in place of flattened ones."""
        index = 0
        for number, group in enumerate(self.param_groups):
            names = self.names_of(number)
            for i, p in enumerate(group["params"]):
                name = names[i] if names else None
                for flat_shard in self.flat_shards.get(p, ()):
                    own = name if flat_shard.alone else flat_shard.name
                    yield Member(number, flat_shard, own, index)
                if p not in self.flat_shards:
                    yield Member(number, p, name, index)
                index += 1

    def laid_out(self) -> Iterable[tuple[dict[str, Any], Any, Layout]]:
        """Every parameter with its group and layout."""
        streams: dict[int, tuple[str, Any]] = {}
        members = list(self.members())
        complete = len(self.layouts) == len(members)
        for number, p, name, index in members:
            group = self.param_groups[number]
            if not complete and p not in self.layouts:
                what = f"parameter {name!r}" if name else f"parameter {index}"
                check_place(p, sharding.local(p), what)
                self.layouts[p] = trained_or_plain(self.layout_of, group, p, name, index)
                if choose.is_frozen(p):
                    self._frozen.add(p)
            if not complete and name:
                check_stream(self.layouts[p].stream, name, p, streams, self.warned)
            yield group, p, self.layouts[p]

    def _found(self, p: Any, what: str) -> tuple[dict[str, Any], str | None, int]:
        """The group, name and number of a parameter.
        Raises ValueError if it is none of this optimizer's.
        """
        index = 0
        for number, group in enumerate(self.param_groups):
            names = self.names_of(number)
            for i, q in enumerate(group["params"]):
                if q is p and q not in self.flat_shards:
                    return group, names[i] if names else None, index
                index += 1
        raise ValueError(f"{what!r} of the module is not a parameter of this optimizer")
