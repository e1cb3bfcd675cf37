"""How a parameter's state is laid out: decided from its global shape and its name, never from who holds it (docs/formats.md)."""

from __future__ import annotations

import fnmatch
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, shard

MIN_NUMEL, MIN_COLS = 4096, 16  # smaller parameters, or shorter rows, keep wide state
PLAN_COLUMNS, MAX_SLOTS = 16, 4

# Public names of `state_format`, for a signed and an unsigned slot.
PRESETS = {
    "8bit": ("dynamic8", "dynamic8_unsigned"),
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
}
_WRAPPERS = re.compile(r"\b(?:module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class Slot:
    """One state tensor of one parameter: torch's name for it, and how it is kept."""

    name: str
    format: str
    block: int

    @property
    def coded(self) -> bool:
        return self.block > 0

    @property
    def keys(self) -> tuple[str, ...]:
        """State keys. The format is part of the name: DCP compares no dtypes, so a name must not be able to mean two things."""
        if self.format == "float32":
            return (self.name,)
        base = f"{self.name}_{self.format}"
        return (base, base + "_scale") if self.coded else (base,)


@dataclass(frozen=True)
class Layout:
    """Where a parameter's state lies here."""

    part: shard.Part
    slots: tuple[Slot, ...]
    param_format: str
    stream: int

    def shapes(
        self, slot: Slot, rows: int, cols: int, shape: tuple[int, ...]
    ) -> list[tuple[int, ...]]:
        """Shapes of the slot's tensors for a parameter of `rows` x `cols` and `shape`, local or global."""
        if not slot.coded:
            return [shape]
        bits = ops.state_format(slot.format)["bits"]
        return [(rows, -(-cols * bits // 8)), (rows, -(-cols // slot.block))]

    def local_shapes(self, slot: Slot) -> list[tuple[int, ...]]:
        return self.shapes(slot, self.part.rows, self.part.cols, self.part.local)

    def global_shapes(self, slot: Slot) -> list[tuple[int, ...]]:
        return self.shapes(slot, self.part.global_rows, self.part.global_cols, self.part.shape)

    def plan_row(self, stream: int) -> list[int]:
        """The row that csrc/ops.cpp reads."""
        part = self.part
        gap = MAX_SLOTS - len(self.slots)
        formats = [ops.state_format(slot.format)["index"] for slot in self.slots] + [-1] * gap
        blocks = [slot.block for slot in self.slots] + [0] * gap
        rows, cols, global_cols = part.rows, part.cols, part.global_cols
        first = part.row_offset * global_cols + part.col_offset
        if part.whole_rows and not any(
            blocks
        ):  # one long row: nothing but the element index counts
            rows, cols = 1, rows * cols
            global_cols = max(cols, part.global_rows * global_cols)
        index = ops.param_format(self.param_format)["index"]
        return [rows, cols, global_cols, first, stream, index, *formats, *blocks, 0, 0]


def clean_name(name: str) -> str:
    """A parameter's fully qualified name without what wrappers put into it."""
    return _WRAPPERS.sub("", name)


def stream_of(name: str | None, index: int) -> int:
    """The parameter's stream of random bits: of its name where there is one, so that order does not matter."""
    return index if name is None else zlib.crc32(clean_name(name).encode())


def is_wide(shape: Sequence[int], name: str | None, wide: bool | Sequence[str]) -> bool:
    """Whether a parameter of this global shape and name keeps wide state."""
    numel = 1
    for size in shape:
        numel *= size
    if len(shape) < 2 or numel < MIN_NUMEL or numel // max(shape[0], 1) < MIN_COLS or wide is True:
        return True
    return bool(wide) and any(
        fnmatch.fnmatch(clean_name(name or ""), pattern) for pattern in wide or ()
    )


def slots_of(rule: str, state_format: str | Mapping[str, str], wide: bool) -> tuple[Slot, ...]:
    """The slots of a rule in the formats that `state_format` names: a preset, a format, or either for each slot's name.

    Raises:
        ValueError: no such format or slot, or an unsigned format for a signed slot.
    """
    slots = []
    names = [slot["name"] for slot in ops.rule(rule)["slots"]]
    if isinstance(state_format, Mapping) and (unknown := set(state_format) - set(names)):
        raise ValueError(f"state_format names {sorted(unknown)}, but {rule} keeps {names}")
    for slot in ops.rule(rule)["slots"]:
        name = slot["name"]
        choice = (
            state_format.get(name, "float32") if isinstance(state_format, Mapping) else state_format
        )
        if choice in PRESETS:
            choice = PRESETS[choice][0 if slot["signed"] else 1]
        try:
            entry = ops.state_format(choice)
        except ValueError as error:
            raise ValueError(f"{error}; presets are {', '.join(PRESETS)}") from None
        if slot["signed"] and not entry["signed"]:
            raise ValueError(
                f"{name} has negative values, which the unsigned format {choice} cannot hold"
            )
        if wide and entry["scaled"]:
            entry = ops.state_format("float32")
        slots.append(Slot(name, entry["name"], entry["block"]))
    return tuple(slots)


def param_format_of(p: Tensor, param_format: str, what: str) -> str:
    """The parameter format: 'auto' is stochastic for bfloat16 and float32 for float32."""
    dtype = str(p.dtype).removeprefix("torch.")
    if param_format == "auto":
        param_format = {"float32": "float32", "bfloat16": "bfloat16_stochastic"}.get(dtype, "")
    if not param_format or ops.param_format(param_format)["dtype"] != dtype:
        served = sorted({entry["dtype"] for entry in ops.catalog()["param"]})
        raise ValueError(
            f"{what} is {dtype}, which " + (f"param_format={param_format!r} does not store" if param_format else "is not served")
            + f"; parameters may be {' or '.join(served)}"
        )  # fmt: skip
    return param_format


def layout_of(
    rule: str, group: Mapping[str, Any], p: Tensor, name: str | None, index: int
) -> Layout:
    """The layout of parameter p of an optimizer group."""
    what = f"parameter {name!r}" if name else f"parameter {index}"
    part = shard.part(p, what)
    slots = slots_of(rule, group["state_format"], is_wide(part.shape, name, group["wide"]))
    for slot in slots:
        if (
            slot.coded
            and not part.whole_rows
            and (part.col_offset % slot.block or part.cols % slot.block)
        ):
            raise ValueError(
                f"{what} of {part.global_cols} columns is cut at columns {part.col_offset}..{part.col_offset + part.cols}, inside a block of "
                f"{slot.block}; shard it on dimension 0, or keep its state wide with wide=[{name!r}]"
            )
    param_format = param_format_of(p, group["param_format"], what)
    return Layout(part, slots, param_format, stream_of(name, index))


def plan_tensor(rows: Sequence[Sequence[int]]) -> Tensor:
    """Plan rows as the operator wants them: int64 [n, PLAN_COLUMNS] on the CPU."""
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), PLAN_COLUMNS)
