"""How a parameter's state is laid out: decided from its global shape and its name, never from who holds it (docs/formats.md)."""

from __future__ import annotations

import fnmatch
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, shard
from lowbit.overrides import clean_name, effective
from lowbit.presets import FACTORED, SCALES, choices, scaled

MIN_NUMEL, MIN_COLS = 4096, 16  # smaller parameters, or shorter rows, keep wide state
MAX_SLOTS, MAX_DIMS = 4, 6
PLAN_COLUMNS = 12 + 4 * MAX_SLOTS + 1 + MAX_DIMS + 3


@dataclass(frozen=True)
class Entry:
    """One state tensor of one parameter, as it is kept."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole parameter
    local: tuple[int, ...]  # of the part here, which begins at
    offset: tuple[int, ...]
    dims: tuple[int, ...]  # the part's dimension that each of its own follows
    places: tuple[int, ...] | None = None  # the parameter's, where that is another

    @property
    def follows(self) -> tuple[int, ...]:
        """The parameter's dimension that each of its own follows."""
        return self.dims if self.places is None else self.places


@dataclass(frozen=True)
class Slot:
    """One state tensor of an update rule: torch's name for it, and how it is kept."""

    name: str
    format: str
    block: int = 0
    scale: str = "none"
    stochastic: bool = False

    @property
    def coded(self) -> bool:
        return self.scale != "none"

    @property
    def measured(self) -> bool:
        """Whether its scales cover more than a tile, so that they are measured before the update."""
        return self.scale not in ("none", "block")

    @property
    def key(self) -> str:
        """The state key. The format is part of it: DCP compares no dtypes, so a name must not be able to mean two things."""
        return self.name if self.format == "float32" else f"{self.name}_{self.format}"

    def entries(self, part: shard.Part) -> list[Entry]:
        """Values, then scales."""
        made = self._entries(part)
        if not part.follows:
            return made
        places = (*part.follows, -1)  # of -1 too
        return [replace(e, places=tuple(places[d] for d in e.dims)) for e in made]

    def _entries(self, part: shard.Part) -> list[Entry]:
        info = ops.state_format(self.format)
        dtype = getattr(torch, info["dtype"])
        whole = tuple(range(len(part.shape)))
        if not self.coded:
            return [Entry(self.key, dtype, part.shape, part.local, part.offset, whole)]

        def codes(cols: int) -> int:
            return -(-cols * info["bits"] // 8)

        def matrix(key: str, dtype: torch.dtype, width: Callable[[int], int]) -> Entry:
            return Entry(
                key, dtype, (part.global_rows, width(part.global_cols)), (part.rows, width(part.cols)),
                (part.row_offset, width(part.col_offset)), (0, 1),
            )  # fmt: skip

        entries = [matrix(self.key, dtype, codes)]
        if self.scale == "block":
            count, kind = info["scale_numbers"], getattr(torch, info["scale_dtype"])

            def numbers(cols: int) -> int:
                return count * -(-cols // self.block)

            scales = matrix(f"{self.key}_scale", kind, numbers)
            if part.cut == shard.CUT_ALL:  # every holder of a row keeps all of its scales
                local = (part.rows, numbers(part.global_cols))
                scales = replace(scales, local=local, offset=(part.row_offset, 0), dims=(0, -1))
            return [*entries, scales]
        name, f32 = f"{self.key}_scale_{self.scale}", torch.float32
        rows = Entry(name, f32, (part.global_rows,), (part.rows,), (part.row_offset,), (0,))
        if self.scale == "row":
            return [*entries, rows]
        if self.scale == "tensor":
            return [*entries, Entry(name, f32, (1,), (1,), (0,), ())]
        if self.scale == "column":
            return [*entries, Entry(name, f32, (part.global_cols,), (part.cols,), (part.col_offset,), (1,))]  # fmt: skip
        return entries + [
            Entry(f"{name}_{d}", f32, (part.shape[d],), (part.local[d],), (part.offset[d],), (d,))
            for d in whole
        ]


@dataclass(frozen=True)
class Layout:
    """Where a parameter's state lies here, and which rule updates it."""

    rule: str
    part: shard.Part
    slots: tuple[Slot, ...]
    param_format: str
    stream: int

    # Derived, and looked at in every step:
    dtype: torch.dtype = torch.float32  # of the parameter
    keys: tuple[str, ...] = ()  # state keys of entries()
    rounds: int = 0  # of sums that the rule measures before the update
    phases: int = 0  # of those, and of the maxima of measured scales

    def __post_init__(self) -> None:
        rounds = ops.rule(self.rule)["rounds"]
        dtype = getattr(torch, ops.param_format(self.param_format)["dtype"])
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "keys", tuple(entry.key for entry in self.entries()))
        object.__setattr__(self, "rounds", rounds)
        measured = self.part.cut or any(slot.measured for slot in self.slots)
        object.__setattr__(self, "phases", rounds + bool(measured))

    @property
    def extra(self) -> Entry | None:
        """What the parameter format keeps beside the parameter."""
        info = ops.param_format(self.param_format)
        if not info["extra"]:
            return None
        part = self.part
        key = "param_" + self.param_format.removesuffix("_stochastic")  # however it is rounded
        dtype = getattr(torch, info["extra"])
        dims = tuple(range(len(part.shape)))
        if dtype == torch.uint8:  # several bytes to a value, in a dimension of their own
            n = info["extra_bytes"]
            return Entry(
                key, dtype, (*part.shape, n), (*part.local, n), (*part.offset, 0), (*dims, -1)
            )
        return Entry(key, dtype, part.shape, part.local, part.offset, dims)

    @property
    def factors(self) -> list[Entry]:
        """Row and column means of each factored moment."""
        shape, local, offset = self.part.shape, self.part.local, self.part.offset
        dims = tuple(range(len(shape)))
        made = []
        for name in ops.rule(self.rule)["factors"]:
            for suffix, keep in (("row", dims[:-1]), ("col", dims[:-2] + dims[-1:])):
                made.append(
                    Entry(
                        f"{name}_{suffix}", torch.float32, tuple(shape[d] for d in keep),
                        tuple(local[d] for d in keep), tuple(offset[d] for d in keep), keep,
                    )
                )  # fmt: skip
        return made

    @property
    def number(self) -> Entry | None:
        """The numbers that the rule keeps for each tensor."""
        rule = ops.rule(self.rule)
        if not rule["numbers"]:
            return None
        shape = () if rule["numbers"] == 1 else (rule["numbers"],)
        return Entry(rule["number"], torch.float32, shape, shape, (0,) * len(shape), ())

    @property
    def others(self) -> list[Entry]:
        """What is kept beside the moments; a loaded state must have it."""
        return self.factors + ([self.number] if self.number else [])

    @functools.cached_property
    def of_slots(self) -> dict[str, list[Entry]]:
        """The tensors of each slot, by its name."""
        return {slot.name: slot.entries(self.part) for slot in self.slots}

    @functools.cached_property
    def large(self) -> frozenset[str]:
        """The keys of tensors that have something for each value: codes, values, and what is beside the parameter, but no scales, means or numbers."""
        first = [entries[0].key for entries in self.of_slots.values()]
        return frozenset([*first, self.extra.key] if self.extra else first)

    def entries(self) -> list[Entry]:
        """Every tensor that csrc/ops_plan.cpp takes for the parameter, in its order."""
        extra = self.extra
        made = [extra] if extra else []
        for slot in self.slots:
            made += self.of_slots[slot.name]
        return made + self.others

    def told(self, stream: int) -> dict[str, Tensor]:
        """What state says of the parameter itself: its stream of random bits and, where codes would not tell it, its shape."""
        said = {"stream": torch.tensor(stream, dtype=torch.int64, device="cpu")}
        if any(slot.coded for slot in self.slots):
            said["shape"] = torch.tensor(self.part.shape, dtype=torch.int64, device="cpu")
        return said

    def plan_row(self, stream: int) -> list[int]:
        """The row that csrc/ops_plan.cpp reads."""
        part = self.part
        slots: list[int] = []
        for slot in self.slots:
            index = ops.state_format(slot.format)["index"]
            slots += [index, slot.block, SCALES.index(slot.scale), int(slot.stochastic)]
        slots += [-1, 0, 0, 0] * (MAX_SLOTS - len(self.slots))
        rows, cols, global_cols = part.rows, part.cols, part.global_cols
        first = part.row_offset * global_cols + part.col_offset
        flat = not any(slot.coded for slot in self.slots) and not self.factors
        if part.whole_rows and flat:  # one long row: nothing but the element index counts
            rows, cols = 1, rows * cols
            global_cols = max(cols, part.global_rows * global_cols)
        inner = [1, *_pair(part.local), *_pair(part.shape)]
        inner[0] = math.prod(part.local[:-2])
        index = ops.param_format(self.param_format)["index"]
        ranked = any(slot.scale == "rank1" for slot in self.slots)
        dims = [len(part.local), *part.local] if ranked else []
        dims += [0] * (1 + MAX_DIMS - len(dims))
        ends = [part.front, part.back, part.cut]
        return [rows, cols, global_cols, first, stream, index, math.prod(part.shape), *inner, *slots, *dims, *ends]  # fmt: skip


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    """The last two dimensions."""
    return (1, 1, *shape)[-2:]  # type: ignore[return-value]


def stream_of(name: str | None, index: int) -> int:
    """The parameter's stream of random bits: of its name where there is one, so that order does not matter."""
    return index if name is None else zlib.crc32(clean_name(name).encode())


def is_wide(
    shape: Sequence[int], name: str | None, wide: bool | Sequence[str], min_numel: int = MIN_NUMEL
) -> bool:
    """Whether a parameter of this global shape and name keeps wide state."""
    numel = math.prod(shape)
    if len(shape) < 2 or numel < min_numel or numel // max(shape[0], 1) < MIN_COLS:
        return True
    return named_wide(name, wide)


def named_wide(name: str | None, wide: bool | Sequence[str]) -> bool:
    """Whether `wide` names the parameter, whatever its shape."""
    if isinstance(wide, bool):
        return wide
    patterns = (wide,) if isinstance(wide, str) else wide or ()
    return any(fnmatch.fnmatch(clean_name(name or ""), pattern) for pattern in patterns)


def rule_of(
    rule: str, chosen: Mapping[str, Mapping[str, Any]], wide: Mapping[str, bool], ndim: int
) -> str:
    """The rule with those second moments factored that `choices` wants so; wide state and vectors are not."""
    wanted = [name for name, spec in chosen.items() if spec["format"] == FACTORED]
    if not wanted or ndim < 2:
        return rule
    factored = f"{rule}_factored"
    if factored not in ops.names("rules") or wanted != ops.rule(factored)["factors"]:
        raise ValueError(f"{rule} cannot keep {' and '.join(wanted)} factored")
    return rule if all(wide[name] for name in wanted) else factored


def slots_of(
    rule: str, chosen: Mapping[str, Mapping[str, Any]], wide: Mapping[str, bool]
) -> tuple[Slot, ...]:
    """The slots of a rule in the formats that `choices` gave for it, or for the rule that it is the factored variant of."""
    slots = []
    for slot in ops.rule(rule)["slots"]:
        name, spec = slot["name"], chosen[slot["name"]]
        if spec["format"] == FACTORED or (wide[name] and spec["scale"] != "none"):
            spec = scaled("float32")
        stochastic = spec["rounding"] == "stochastic"
        slots.append(Slot(name, spec["format"], spec["block"], spec["scale"], stochastic))
    return tuple(slots)


def param_format_of(p: Tensor, param_format: str, what: str) -> str:
    """The parameter format: "auto" rounds 16-bit parameters stochastically, "nearest" to the nearest; both are plain for float32."""
    dtype = str(p.dtype).removeprefix("torch.")
    served = sorted({entry["dtype"] for entry in ops.entries("param")})
    if dtype not in served:
        raise ValueError(
            f"{what} is {dtype}, which is not served; parameters may be {' or '.join(served)}"
        )
    if param_format in ("auto", "nearest"):
        return f"{dtype}_stochastic" if param_format == "auto" and dtype != "float32" else dtype
    if ops.param_format(param_format)["dtype"] != dtype:
        raise ValueError(
            f"{what} is {dtype}, which param_format={param_format!r} does not store"
            f"; parameters may be {' or '.join(served)}"
        )
    return param_format


def chosen_of(
    rule: str, part: shard.Part, options: Mapping[str, Any], name: str | None
) -> tuple[dict[str, dict[str, Any]], dict[str, bool]]:
    """What the options of a parameter say of each state of a rule, and whether it is kept wide."""
    chosen, own = choices(rule, options["state_format"]), options["min_numel"]
    wide = {
        slot: is_wide(
            part.shape,
            name,
            options["wide"],
            spec.get("min_numel", MIN_NUMEL) if own is None else own,
        )
        for slot, spec in chosen.items()
    }
    return chosen, wide


def layout_of(
    rule: str, group: Mapping[str, Any], p: Tensor, name: str | None, index: int
) -> Layout:
    """The layout of parameter p of an optimizer group, whose update rule is `rule` unless a moment of it is stored factored."""
    what = f"parameter {name!r}" if name else f"parameter {index}"
    part = shard.part(p, what)
    options = effective(group, name, index)
    chosen, wide = chosen_of(rule, part, options, name)
    variant = rule_of(rule, chosen, wide, len(part.shape))
    slots = slots_of(variant, chosen, wide)
    for slot in slots:
        check_cut(slot, part, what, name)
    blocks = [slot.block for slot in slots if slot.scale == "block"]
    if any(col % block for col in part.begins for block in blocks):
        part = replace(part, cut=shard.CUT_ALL)
    elif (part.front or part.back) and blocks:
        part = replace(part, cut=shard.CUT_ENDS)
    param_format = param_format_of(p, options["param_format"], what)
    return Layout(variant, part, slots, param_format, stream_of(name, index))


def check_cut(slot: Slot, part: shard.Part, what: str, name: str | None) -> None:
    """Raises ValueError where columns are cut where the slot's codes cannot be, or there are more dimensions than scales for them."""
    if slot.scale == "rank1" and len(part.shape) > MAX_DIMS:
        raise ValueError(
            f"{what} has {len(part.shape)} dimensions, and scale='rank1' takes at most {MAX_DIMS}; take scale='row' for it"
        )
    if not slot.coded or not part.begins:
        return
    columns = ", ".join(str(col) for col in part.begins[:4]) + (", ..." if part.begins[4:] else "")
    cut = f"{what} of {part.global_cols} columns is cut at columns {columns}"
    advice = f"shard it on dimension 0, or keep its state wide with wide=[{name!r}]"
    bits = ops.state_format(slot.format)["bits"]
    if any(col * bits % 8 for col in part.begins):
        raise ValueError(f"{cut}, inside a byte of {bits}-bit codes; {advice}")
    if slot.measured and len(part.shape) > 2:
        raise ValueError(
            f"{cut}, and scale={slot.scale!r} follows only dimension 0 there; {advice}"
        )


def plan_tensor(rows: Sequence[Sequence[int]]) -> Tensor:
    """Plan rows as the operator wants them: int64 [n, PLAN_COLUMNS] on the CPU."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), PLAN_COLUMNS)
