"""The layout of a parameter's state: a function of its global shape and name,
never of the ranks (docs/definitions/formats.md).
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.config.hints import warn_once
from lowbit.config.overrides import clean_name, effective
from lowbit.state import choose, plan
from lowbit.state.slot import Slot, StateTensor


@dataclass(frozen=True)
class Layout:
    """The layout of a parameter's state on this rank, and the rule that updates it."""

    rule: str
    part: sharding.Part
    slots: tuple[Slot, ...]
    param_format: str
    stream: int
    home: sharding.Home | None = None  # of the state, if it lies elsewhere; `part` is there

    # Derived, because every step reads them:
    dtype: torch.dtype = torch.float32  # of the parameter
    keys: tuple[str, ...] = ()  # state keys of entries()
    rounds: int = 0  # passes of sums before the update
    phases: int = 0  # `rounds`, plus one if maxima of cross-tile scales are measured

    def __post_init__(self) -> None:
        rounds = ops.rule(self.rule)["rounds"]
        dtype = getattr(torch, ops.param_format(self.param_format)["dtype"])
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "keys", tuple(entry.key for entry in self.entries()))
        object.__setattr__(self, "rounds", rounds)
        cut = self.part.cut != sharding.CUT_NONE
        measured = cut or any(slot.cross_tile for slot in self.slots)
        object.__setattr__(self, "phases", rounds + bool(measured))

    @property
    def param_part(self) -> sharding.Part:
        """The parameter's part on this rank; its compensation lies there too."""
        return self.home.own if self.home else self.part

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's global shape."""
        return self.part.shape

    @property
    def cut_groups(self) -> tuple[Any, ...]:
        """The process groups whose ranks have other parts of the parameter,
        and wait for each other in its step.
        """
        return tuple(group for _, group in self.part.cuts)

    @property
    def exchanges(self) -> bool:
        """Whether ranks with parts of the parameter exchange more in its step than sums and maxima
        of its phases.
        """
        return self.home is not None

    def placed(self, p: Tensor, entry: StateTensor) -> Any:
        """What a state tensor of parameter p is placed like: p, or state at home."""
        if self.home is None or (self.compensation and entry.key == self.compensation.key):
            return p
        return self.home.placed

    @functools.cached_property
    def at_home(self) -> Layout:
        """The layout of a parameter that lies whole where its state does,
        as a step brings it there.
        """
        return replace(self, home=None)

    @property
    def compensation(self) -> StateTensor | None:
        """The compensation tensor of the parameter format, or None."""
        info = ops.param_format(self.param_format)
        if not info["compensation"]:
            return None
        part = self.param_part
        key = "param_" + self.param_format.removesuffix("_stochastic")  # the same for any rounding
        dtype = getattr(torch, info["compensation"])
        dims = tuple(range(len(part.shape)))
        if dtype == torch.uint8:  # several bytes per value, in an added last dimension
            n = info["compensation_bytes"]
            return StateTensor(
                key, dtype, (*part.shape, n), (*part.local, n), (*part.offset, 0), (*dims, -1)
            )
        return StateTensor(key, dtype, part.shape, part.local, part.offset, dims)

    @property
    def factors(self) -> list[StateTensor]:
        """The row and column means of each factored moment, float32."""
        shape, local, offset = self.part.shape, self.part.local, self.part.offset
        dims = tuple(range(len(shape)))
        made = []
        for name in ops.rule(self.rule)["factors"]:
            for suffix, keep in (("row", dims[:-1]), ("col", dims[:-2] + dims[-1:])):
                made.append(
                    StateTensor(
                        f"{name}_{suffix}",
                        torch.float32,
                        tuple(shape[d] for d in keep),
                        tuple(local[d] for d in keep),
                        tuple(offset[d] for d in keep),
                        keep,
                    )
                )
        return made

    @property
    def number(self) -> StateTensor | None:
        """The float32 numbers that the rule keeps for each tensor, or None."""
        rule = ops.rule(self.rule)
        if not rule["numbers"]:
            return None
        shape = () if rule["numbers"] == 1 else (rule["numbers"],)
        return StateTensor(rule["number"], torch.float32, shape, shape, (0,) * len(shape), ())

    @property
    def auxiliary(self) -> list[StateTensor]:
        """The tensors other than moments and compensation; a loaded state must have them."""
        return self.factors + ([self.number] if self.number else [])

    @property
    def in_passes(self) -> bool:
        """Whether a step takes several operator calls, so that `rule` is only one of its parts."""
        return False

    @functools.cached_property
    def of_slots(self) -> dict[str, list[StateTensor]]:
        """Slot name -> its tensors."""
        return {slot.name: slot.entries(self.part) for slot in self.slots}

    @functools.cached_property
    def large(self) -> frozenset[str]:
        """The keys of tensors with data per element: codes, values and compensation; not scales,
        means, numbers.
        """
        first = [entries[0].key for entries in self.of_slots.values()]
        return frozenset([*first, self.compensation.key] if self.compensation else first)

    def entries(self) -> list[StateTensor]:
        """All tensors of the parameter, in the order of csrc/ops/plan.cpp."""
        compensation = self.compensation
        made = [compensation] if compensation else []
        for slot in self.slots:
            made += self.of_slots[slot.name]
        return made + self.auxiliary

    def at_rows(self, begin: int, end: int) -> Layout:
        """The layout of these rows of the parameter alone,
        as a rank has it that holds no others.
        """
        return replace(self, part=self.part.take_rows(begin, end))

    def identity(self, stream: int) -> dict[str, Tensor]:
        """State about the parameter itself, int64: its stream of random bits and,
        if state is quantized, its shape.
        """
        state = {"stream": torch.tensor(stream, dtype=torch.int64, device="cpu")}
        if any(slot.coded for slot in self.slots):
            state["shape"] = torch.tensor(self.part.shape, dtype=torch.int64, device="cpu")
        return state

    def plan_row(self, stream: int) -> list[int]:
        """The parameter's row of the operator's plan."""
        row = list(self._plan_row)
        row[ops.plan_columns()["stream"]] = stream
        return row

    @functools.cached_property
    def _plan_row(self) -> list[int]:
        """`plan_row` without the stream, which comes from the state."""
        return plan.row(self.part, self.slots, bool(self.factors), self.param_format)


def stream_of(name: str | None, index: int) -> int:
    """The parameter's stream of random bits: from its name if it has one,
    so that its position does not matter.
    """
    return index if name is None else zlib.crc32(clean_name(name).encode())


def layout_of(
    rule: str,
    group: Mapping[str, Any],
    p: Tensor,
    name: str | None,
    index: int,
    places: Iterable[sharding.Home | None] | None = None,
) -> Layout:
    """The layout of parameter p of an optimizer group; the rule is `rule`,
    or its variant if a moment is factored.

    Args:
        rule: a name in `lowbit.catalog()["rules"]`.
        group: the options.
        p: the parameter.
        name: its name, or None.
        index: its number in the optimizer.
        places: where its state may lie, the best first; a None among them is where the parameter
            lies. By default that and then `sharding.homes`.

    Raises:
        ValueError: the options do not fit the parameter, or its placement splits codes or scales.
    """
    what = f"parameter {name!r}" if name else f"parameter {index}"
    own = sharding.part(p, what)
    options = effective(group, name, index)
    param_format = choose.param_format_of(p, options["param_format"], what)
    chosen, full_precision = choose.chosen_of(rule, own, options, name, param_format)
    variant = choose.rule_of(rule, chosen, full_precision, len(own.shape))
    slots = choose.slots_of(variant, chosen, full_precision)
    if places is None:
        places = itertools.chain([None], sharding.homes(p))
    part, home = lie(variant, slots, p, own, what, name, places)
    return Layout(variant, part, slots, param_format, stream_of(name, index), home)


def lie(
    rule: str,
    slots: tuple[Slot, ...],
    p: Tensor,
    own: sharding.Part,
    what: str,
    name: str | None,
    places: Iterable[sharding.Home | None],
) -> tuple[sharding.Part, sharding.Home | None]:
    """Where state lies: the part that is here,
    and its home if that is not where the parameter lies.

    The first place is taken that splits no codes and scales.

    Raises:
        ValueError: no place fits; the message gives the reasons of the first two.
    """
    refused: list[tuple[sharding.Home | None, ValueError]] = []
    for home in places:
        try:
            part = fitted(
                rule, slots, home.placed if home else p, home.part if home else own, what, name
            )
        except ValueError as error:
            refused.append((home, error))
        else:
            return part, replace(home, part=part) if home else None
    (_, first), *elsewhere = refused
    for home, second in elsewhere:
        if home:
            by = tuple(home.placed.placements)
            raise ValueError(f"{first}. Nor can its state lie by {by}: {second}") from second
    raise first


def fitted(
    rule: str, slots: tuple[Slot, ...], p: Any, part: sharding.Part, what: str, name: str | None
) -> sharding.Part:
    """The part of state that is placed like p, with the blocks that are split.

    Raises:
        ValueError: codes or scales cannot be placed so.
    """
    check_deep(rule, slots, p, part, what, name)
    for slot in slots:
        check_cut(slot, part, what, name)
    blocks = [slot.block for slot in slots if slot.scale == "block"]
    if any(col % block for col in part.begins for block in blocks):
        part = replace(part, cut=sharding.CUT_ALL)
    elif (part.front or part.back) and blocks:
        part = replace(part, cut=sharding.CUT_ENDS)
    for slot in slots:
        check_columns(slot, p, part, what, name)
    return part


def check_deep(
    rule: str, slots: tuple[Slot, ...], p: Any, part: sharding.Part, what: str, name: str | None
) -> None:
    """Raises ValueError if a dimension beyond the second is split and state cannot follow: codes
    run over whole rows.
    """
    dims = sorted({dim for dim, _ in part.cuts})
    whole_rows = any(slot.coded for slot in slots) or bool(ops.rule(rule)["factors"])
    if part.deep is None or not (whole_rows or set(dims) - {0, part.deep}):
        return
    advice = "shard it on dimensions 0 and 1"
    if whole_rows and not set(dims) - {0, part.deep}:
        advice += f", or keep its state in full precision with {kept_whole(name)}"
    raise ValueError(
        f"{what} of shape {part.shape} is sharded on dimensions {dims} by {tuple(p.placements)} "
        f"over {tuple(p.device_mesh.shape)}, where its state cannot lie. It lies elsewhere if one "
        "mesh dimension alone cuts dimensions beyond the second, and is in order behind those "
        f"that cut dimension 0, or all divide dimension 0 evenly; {advice}"
    )


def kept_whole(name: str | None) -> str:
    """The option that keeps a parameter's state in full precision, for errors."""
    return f"full_precision={True if name is None else [name]}"


def check_cut(slot: Slot, part: sharding.Part, what: str, name: str | None) -> None:
    """Raises ValueError if sharding splits a byte or a scale's columns,
    or if rank1 has too many dimensions.
    """
    limit = ops.plan_limit("dims")
    if slot.scale == "rank1" and len(part.shape) > limit:
        raise ValueError(
            f"{what} has {len(part.shape)} dimensions, and scale='rank1' takes at most {limit}; "
            "take scale='row' for it"
        )
    if not slot.coded or not part.begins:
        return
    columns = ", ".join(str(col) for col in part.begins[:4]) + (", ..." if part.begins[4:] else "")
    cut = f"{what} of {part.global_cols} columns is cut at columns {columns}"
    advice = f"shard it on dimension 0, or keep its state in full precision with {kept_whole(name)}"
    bits = ops.state_format(slot.format)["bits"]
    if any(col * bits % 8 for col in part.begins):
        raise ValueError(f"{cut}, inside a byte of {bits}-bit codes; {advice}")
    if slot.scale == "rank1" and len(part.shape) > 2:
        # the scale of dimension 2 covers the whole of dimension 1, of which each rank has a part
        raise ValueError(
            f"{cut}, and scale='rank1' of {len(part.shape)} dimensions follows only dimension 0; "
            f"{advice}, or take scale='row' for it"
        )


def check_columns(slot: Slot, p: Tensor, part: sharding.Part, what: str, name: str | None) -> None:
    """Raises ValueError if placements split codes or scales elsewhere than p: a checkpoint would
    lose values.
    """
    widths = [slot.codes] if slot.coded else []
    if slot.scale == "block" and part.cut != sharding.CUT_ALL:
        widths.append(slot.scales)
    if slot.scale == "column":
        widths.append(lambda cols: cols)
    if all(sharding.follows_columns(p, width) for width in widths):
        return
    full_precision = "True" if name is None else f"[{name!r}]"
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    raise ValueError(
        f"{what} of shape {part.shape} is sharded on dimension 1 of length {part.shape[1]} over "
        f"{tuple(mesh.shape)} by {tuple(placements)}, which would cut the "
        f"{slot.codes(part.global_cols)} bytes of a row of {slot.format} codes elsewhere; shard it "
        "on dimension 0, over ranks that divide dimension 1 evenly, or keep its state in full "
        f"precision with full_precision={full_precision}"
    )


def check_stream(
    stream: int, name: str, p: Any, known: dict[int, tuple[str, Any]], warned: set[str]
) -> None:
    """Raises ValueError if a parameter of another name has this stream of random bits, or a
    parameter has two names, and warns if another one of the same name has it.

    Args:
        known: stream -> a parameter that has it, and its name; updated.
        warned: what was warned of; updated.
    """
    other, owner = known.setdefault(stream, (name, p))
    if other != name:
        if owner is p:
            raise ValueError(
                f"the parameter {other!r} is tied to {name!r} and listed twice: leave one of the "
                "two names out, as model.named_parameters() does"
            )
        if clean_name(other) == clean_name(name):
            raise ValueError(
                f"parameters {other!r} and {name!r} have one name without the prefixes of wrappers "
                f"({', '.join(ops.policy('wrapper_prefixes'))}), which checkpoints leave out. A "
                "layer of yours has the name of such a prefix: rename the layer, or pass the "
                "parameters without names"
            )
        raise ValueError(
            f"parameters {other!r} and {name!r} have the same stream of random bits ({stream}, the "
            "CRC-32 of the name): rename one of them, or pass the parameters without names, as "
            "model.parameters() does, whose streams are their numbers"
        )
    if owner is not p:
        warn_once(
            warned,
            "names",
            f"two parameters are named {name!r}: they get the same random bits, and checkpoints "
            "cannot tell them apart by name. Give each its own, such as "
            "(f'first.{name}', p) for every name, p of the first of several modules",
        )
