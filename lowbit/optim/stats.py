"""Statistics of an optimizer's state: bytes, use of codes, and what storing the next step would lose."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.config.overrides import clean_name
from lowbit.optim.stepping import SteppingOptimizer
from lowbit.state.layout import Layout
from lowbit.state.quantize import dequantize_slot
from lowbit.state.slot import Slot
from lowbit.step.flat_shards import FlatShardReducer
from lowbit.step.group import StepGroup
from lowbit.step.phases import run_phases

COMPONENTS = (
    "parameter",
    "compensation",
    "codes",
    "scales",
    "full_precision",
    "factors",
    "numbers",
    "other",
)
_AT_ONCE = 1 << 20  # values to process at a time


class Stats(dict):  # type: ignore[type-arg]
    """The result of `stats()`: a dict that prints as a table."""

    def __str__(self) -> str:
        rows = [("", "values", "bytes each", "state", "format", "saturated", "zero", "used", "rms error", "max error", "lost")]  # fmt: skip
        for name, entry in [*self["parameters"].items(), ("total", self["total"])]:
            head = [name, str(entry["values"]), f"{entry['bytes_per_value']:.3f}"]
            lost = _percent(entry.get("lost"))
            for state, kept in entry["states"].items() or [("", {})]:
                rows.append(
                    (
                        *head, state, kept.get("format", ""),
                        *(_percent(kept.get(key)) for key in ("saturated", "zero", "used")),
                        *(f"{kept[key]:.3g}" if key in kept else "" for key in ("rms_error", "max_error")),
                        lost,
                    )
                )  # fmt: skip
                head, lost = ["", "", ""], ""
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(w) if i in (0, 3, 4) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in rows
        )  # fmt: skip


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}%"


@torch.no_grad()
def collect(opt: SteppingOptimizer, probe: bool) -> Stats:
    """`LowbitOptimizer.stats`."""
    lacking = opt._lacking() if probe else []
    opt._give_zeros(lacking)
    try:
        return _collect(opt, probe)
    finally:
        for p in lacking:
            p.grad = None


def _collect(opt: SteppingOptimizer, probe: bool) -> Stats:
    parameters: dict[str, dict[str, Any]] = {}
    tallies: dict[str, list[dict[str, float]]] = {}
    total: dict[str, Any] = {"values": 0, "bytes": dict.fromkeys(COMPONENTS, 0)}
    updates: list[dict[str, float]] = []
    for index, (group, name, p, lay) in enumerate(_named(opt)):
        state = opt._state_of(p)
        if not state:
            continue
        made: dict[str, Any] = {
            "values": sharding.local(p).numel(),
            "rule": lay.rule,
            "param_format": lay.param_format,
            "bytes": _bytes(p, lay, state),
            "states": {},
        }
        counted = {slot.name: _codes(lay, slot, state) for slot in lay.slots}
        # A step in a subspace has several parts, and its states do not match the parameter's elements.
        stepped_alone = lay.part.shape == tuple(p.shape)
        # Of a flat shard's parameter other ranks may have a gradient, and need this one.
        wanted = stepped_alone and (p.grad is not None or isinstance(p, sharding.FlatShard))
        if probe and wanted and (found := _probe(opt, group, p, lay, state)):
            for key, tally in found[0].items():
                counted[key].update(tally)
            made.update(_finish(found[1]))
            updates.append(found[1])
        for slot in lay.slots:
            kept = {"format": slot.format, "scale": slot.scale, "block": slot.block}
            made["states"][slot.name] = {**kept, **_finish(counted[slot.name])}
            tallies.setdefault(slot.name, []).append(counted[slot.name])
        made["bytes_per_value"] = _ratio(sum(made["bytes"].values()), made["values"])
        parameters[clean_name(name) if name else str(index)] = made
        total["values"] += made["values"]
        for component in COMPONENTS:
            total["bytes"][component] += made["bytes"][component]
    total["bytes_per_value"] = _ratio(sum(total["bytes"].values()), total["values"])
    total["states"] = {name: _finish(_sum(several)) for name, several in tallies.items()}
    total.update(_finish(_sum(updates)))
    return Stats(parameters=parameters, total=total)


def _named(
    opt: SteppingOptimizer,
) -> Iterator[tuple[dict[str, Any], str | None, Tensor, Layout]]:
    for (group, p, lay), member in zip(opt._laid_out(), opt._members(), strict=True):
        yield group, member.name, p, lay


def _ratio(a: float, b: float) -> float:
    """a / b, with 0 / 0 = 0."""
    return a / b if b else (0.0 if a == 0 else math.inf)


# A tally has sums, so that those of several parameters add up; `_finish` divides them.


def _sum(several: list[dict[str, float]]) -> dict[str, float]:
    made: dict[str, float] = {}
    for tally in several:
        for key, value in tally.items():
            old = made.get(key, 0)
            made[key] = max(old, value) if key == "max_error" else old + value
    return made


def _finish(tally: Mapping[str, float]) -> dict[str, float]:
    made = {
        share: _ratio(tally[share], tally[over])
        for share, over in (
            ("saturated", "coded"), ("zero", "coded"), ("used", "levels"),
            ("updates", "probed"), ("lost", "probed"),
        )
        if share in tally
    }  # fmt: skip
    if "error2" in tally:
        made["rms_error"] = math.sqrt(_ratio(tally["error2"], tally["exact2"]))
        made["max_error"] = tally["max_error"]
    return made


def _bytes(p: Tensor, lay: Layout, state: Mapping[str, Tensor]) -> dict[str, int]:
    """Local bytes of each component."""
    made = dict.fromkeys(COMPONENTS, 0)
    kinds = dict.fromkeys(("step", "stream", "shape"), "numbers")
    if lay.compensation:
        kinds[lay.compensation.key] = "compensation"
    for slot in lay.slots:
        first, *scales = slot.entries(lay.part)
        kinds[first.key] = "codes" if slot.coded else "full_precision"
        kinds.update({entry.key: "scales" for entry in scales})
    kinds.update({entry.key: "factors" for entry in lay.factors})
    if lay.number:
        kinds[lay.number.key] = "numbers"
    made["parameter"] = _size(p)
    for key, value in state.items():
        made[kinds.get(key, "other")] += _size(value)
    return made


def _size(t: Tensor) -> int:
    here = sharding.local(t)
    return here.numel() * here.element_size()


def _kept(lay: Layout, slot: Slot, state: Mapping[str, Tensor]) -> Tensor:
    """Float32 values of a slot; for a flat shard those of all rows that it touches."""
    tensors = [sharding.local(state[entry.key]) for entry in slot.entries(lay.part)]
    return dequantize_slot(tensors, lay, slot)


def _here(lay: Layout, slot: Slot, state: Mapping[str, Tensor]) -> Tensor:
    """This rank's float32 values of a slot, in one dimension."""
    return lay.part.without_room(_kept(lay, slot, state))


def _codes(lay: Layout, slot: Slot, state: Mapping[str, Tensor]) -> dict[str, float]:
    """The use of a slot's codes; empty if it has none."""
    if not slot.coded:
        return {}
    bits = ops.state_format(slot.format)["bits"]
    part = lay.part
    codes = sharding.local(state[slot.key])
    values = _here(lay, slot, state)
    ends = ends_of(slot.format).to(codes.device)
    seen = torch.zeros(1 << bits, dtype=torch.bool, device=codes.device)
    saturated, at_once = 0, max(1, _AT_ONCE // max(1, part.cols))
    for begin in range(0, part.rows, at_once):
        some = unpack(codes[begin : begin + at_once], bits, part.cols).reshape(-1)
        first = begin * part.cols - part.front  # of them among the values
        some = some[max(-first, 0) : values.numel() - first]
        of_them = values[max(first, 0) : max(first, 0) + some.numel()]
        seen[some] = True
        saturated += int((torch.isin(some, ends) & (of_them != 0)).sum())
    return {
        "coded": values.numel(),
        "saturated": saturated,
        "zero": int((values == 0).sum()),
        "used": int(seen.sum()),
        "levels": (1 << bits) if values.numel() else 0,
    }


def unpack(codes: Tensor, bits: int, cols: int) -> Tensor:
    """Unpacks codes [rows, bytes] to int64 [rows, cols]; the first code is in the low bits."""
    if bits == 8:
        return codes.to(torch.int64)
    eight = torch.arange(8, device=codes.device)
    single = (codes.to(torch.int64)[:, :, None] >> eight) & 1
    single = single.reshape(codes.shape[0], -1)[:, : cols * bits]
    weights = 1 << torch.arange(bits, device=codes.device)
    return (single.reshape(codes.shape[0], cols, bits) * weights).sum(-1)


@functools.cache
def ends_of(format: str) -> Tensor:
    """The codes of the lowest and highest value but 0, which values outside the format's range become."""
    info = ops.state_format(format)
    bits, length = info["bits"], 2048
    sample = torch.exp2(-(torch.arange(length) % 21).float())
    if info["signed"]:
        sample[length // 2 :] *= -1
    _, scales = ops.quantize(sample.reshape(1, -1), format, length)
    cols = min(1 << bits, length)
    every = torch.arange(1 << bits).reshape(-1, cols)
    single = (every[:, :, None] >> torch.arange(bits)) & 1
    packed = (single.reshape(len(every), -1, 8) << torch.arange(8)).sum(-1).to(torch.uint8)
    values = ops.dequantize(
        packed, scales.expand(len(every), -1).contiguous(), format, length, cols
    )
    values = values.reshape(-1)
    usable = values[values.isfinite() & ((values != 0) if info["signed"] else (values > 0))]
    return ((values == usable.min()) | (values == usable.max())).nonzero().reshape(-1)


def _probe(
    opt: SteppingOptimizer, group: dict[str, Any], p: Any, lay: Layout, state: dict[str, Tensor]
) -> tuple[dict[str, dict[str, float]], dict[str, float]] | None:
    """The next step on copies, as it is stored and without any rounding of what is stored: (errors of each state, updates lost); None where there is no
    gradient here. All ranks that hold some of a flat shard's parameter must call it at once."""
    value = sharding.local(p).detach()
    before = _weights(value, lay, state)
    stored_state = {key: sharding.local(tensor).clone() for key, tensor in state.items()}
    stored = value.clone(memory_format=torch.contiguous_format)
    _run(opt, group, p, lay, stored, stored_state)
    slots = tuple(Slot(slot.name, "float32") for slot in lay.slots)
    part = replace(lay.part, cut=sharding.CUT_NONE)  # float32 has no blocks
    exact_lay = replace(lay, slots=slots, part=part, param_format="float32")
    exact_state = {key: sharding.local(tensor).clone() for key, tensor in state.items()}
    exact_state.update({slot.name: _kept(lay, slot, state).clone() for slot in lay.slots})
    exact = before.clone()
    _run(opt, group, p, exact_lay, exact, exact_state)
    if p.grad is None:
        return None
    errors = {}
    for slot in lay.slots:
        want = lay.part.without_room(exact_state[slot.name]).double()
        off = (_here(lay, slot, stored_state).double() - want).abs()
        relative = torch.where(off == 0, 0.0, off / want.abs())
        errors[slot.name] = {
            "error2": float(off.square().sum()),
            "exact2": float(want.square().sum()),
            "max_error": float(relative.max()) if relative.numel() else 0.0,
        }
    moved = exact != before
    lost = moved & (_weights(stored, lay, stored_state) == before)
    return errors, {"probed": moved.numel(), "updates": int(moved.sum()), "lost": int(lost.sum())}


def _weights(value: Tensor, lay: Layout, state: Mapping[str, Tensor]) -> Tensor:
    """The float32 weights of a stored parameter and its compensation."""
    if not lay.compensation:
        return value.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    extra = sharding.local(state[lay.compensation.key]).cpu().contiguous()
    if value.shape == lay.part.local:
        return ops.join(value.cpu().contiguous(), extra, lay.param_format).to(value.device)
    rows = lay.part.with_room(value).cpu()  # of a flat shard
    values = ops.join(rows, extra, lay.param_format)
    return lay.part.without_room(values).clone().to(value.device)


def _run(
    opt: SteppingOptimizer, group: dict[str, Any], p: Any, lay: Layout, value: Tensor, state: dict[str, Tensor]
) -> None:  # fmt: skip
    """Steps `value` in place of p, with p's gradient."""
    reducer = FlatShardReducer([(p, lay)]) if isinstance(p, sharding.FlatShard) else None
    step_groups = []
    if p.grad is not None and (value.numel() or not reducer):
        step_group = StepGroup(group, lay)
        step_group.add(p if reducer else _Given(sharding.gradient(p)), value, lay, state)  # type: ignore[arg-type]
        opt._bind(step_group, step_group.plan())
        step_groups.append(step_group)
        if reducer:
            reducer.steps(p)
    run_phases(step_groups, reducer)


class _Given:
    """A gradient in the role of a parameter; torch would require the gradient in the parameter's dtype."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad
