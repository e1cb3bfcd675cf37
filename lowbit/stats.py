"""What an optimizer keeps, in numbers: bytes, how codes are used, and what the next step would lose by storing it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit import ops, shard
from lowbit.batch import Batch, run_phases
from lowbit.coding import decode_slot
from lowbit.holders import Holders
from lowbit.layout import Layout, Slot
from lowbit.overrides import clean_name

if TYPE_CHECKING:
    from lowbit.optim import LowbitOptimizer

COMPONENTS = ("parameter", "beside", "codes", "scales", "wide", "factors", "numbers", "other")
_AT_ONCE = 1 << 20  # values that are looked at together


class Stats(dict):  # type: ignore[type-arg]
    """What `stats()` returns: a plain dict that prints as a table."""

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
def collect(opt: LowbitOptimizer, probe: bool) -> Stats:
    """`LowbitOptimizer.stats`."""
    parameters: dict[str, dict[str, Any]] = {}
    tallies: dict[str, list[dict[str, float]]] = {}
    total: dict[str, Any] = {"values": 0, "bytes": dict.fromkeys(COMPONENTS, 0)}
    updates: list[dict[str, float]] = []
    for index, (group, name, p, lay) in enumerate(_named(opt)):
        state = opt._state_of(p)
        if not state:
            continue
        made: dict[str, Any] = {
            "values": shard.local(p).numel(),
            "rule": lay.rule,
            "param_format": lay.param_format,
            "bytes": _bytes(p, lay, state),
            "states": {},
        }
        counted = {slot.name: _codes(lay, slot, state) for slot in lay.slots}
        # A step in a subspace is several, and its states are not of the parameter's elements.
        stepped_alone = lay.part.shape == tuple(p.shape)
        # Of a piece other holders may have a gradient, and need this one.
        wanted = stepped_alone and (p.grad is not None or isinstance(p, shard.Piece))
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
    opt: LowbitOptimizer,
) -> Iterator[tuple[dict[str, Any], str | None, Tensor, Layout]]:
    for (group, p, lay), member in zip(opt._laid_out(), opt._members(), strict=True):
        yield group, member[2], p, lay


def _ratio(a: float, b: float) -> float:
    """a / b; what nothing has a share of is 0."""
    return a / b if b else (0.0 if a == 0 else math.inf)


# A tally holds sums, so that those of several parameters add up; shares are made of them at the end.


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
    """Bytes here, of each component."""
    made = dict.fromkeys(COMPONENTS, 0)
    kinds = dict.fromkeys(("step", "stream", "shape"), "numbers")
    if lay.extra:
        kinds[lay.extra.key] = "beside"
    for slot in lay.slots:
        first, *scales = slot.entries(lay.part)
        kinds[first.key] = "codes" if slot.coded else "wide"
        kinds.update({entry.key: "scales" for entry in scales})
    kinds.update({entry.key: "factors" for entry in lay.factors})
    if lay.number:
        kinds[lay.number.key] = "numbers"
    made["parameter"] = _size(p)
    for key, value in state.items():
        made[kinds.get(key, "other")] += _size(value)
    return made


def _size(t: Tensor) -> int:
    here = shard.local(t)
    return here.numel() * here.element_size()


def _kept(lay: Layout, slot: Slot, state: Mapping[str, Tensor]) -> Tensor:
    """Float32 values of a slot; of a piece those of all the rows that it touches."""
    tensors = [shard.local(state[entry.key]) for entry in slot.entries(lay.part)]
    return decode_slot(tensors, lay, slot)


def _here(lay: Layout, slot: Slot, state: Mapping[str, Tensor]) -> Tensor:
    """Those that are this rank's, in one dimension."""
    return lay.part.without_room(_kept(lay, slot, state))


def _codes(lay: Layout, slot: Slot, state: Mapping[str, Tensor]) -> dict[str, float]:
    """How the codes of a slot are used; empty where it has none."""
    if not slot.coded:
        return {}
    bits = ops.state_format(slot.format)["bits"]
    part = lay.part
    codes = shard.local(state[slot.key])
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
    """Codes as they are packed, [rows, bytes], -> int64 [rows, cols]: the first in the low bits."""
    if bits == 8:
        return codes.to(torch.int64)
    eight = torch.arange(8, device=codes.device)
    single = (codes.to(torch.int64)[:, :, None] >> eight) & 1
    single = single.reshape(codes.shape[0], -1)[:, : cols * bits]
    weights = 1 << torch.arange(bits, device=codes.device)
    return (single.reshape(codes.shape[0], cols, bits) * weights).sum(-1)


@functools.cache
def ends_of(format: str) -> Tensor:
    """The codes of the lowest and the highest value but 0: those that values outside of the format's range become."""
    info = ops.state_format(format)
    bits, wide = info["bits"], 2048
    sample = torch.exp2(-(torch.arange(wide) % 21).float())
    if info["signed"]:
        sample[wide // 2 :] *= -1
    _, scales = ops.encode(sample.reshape(1, -1), format, wide)
    cols = min(1 << bits, wide)
    every = torch.arange(1 << bits).reshape(-1, cols)
    single = (every[:, :, None] >> torch.arange(bits)) & 1
    packed = (single.reshape(len(every), -1, 8) << torch.arange(8)).sum(-1).to(torch.uint8)
    values = ops.decode(packed, scales.expand(len(every), -1).contiguous(), format, wide, cols)
    values = values.reshape(-1)
    usable = values[values.isfinite() & ((values != 0) if info["signed"] else (values > 0))]
    return ((values == usable.min()) | (values == usable.max())).nonzero().reshape(-1)


def _probe(
    opt: LowbitOptimizer, group: dict[str, Any], p: Any, lay: Layout, state: dict[str, Tensor]
) -> tuple[dict[str, dict[str, float]], dict[str, float]] | None:
    """The next step on copies, as it is stored and without any rounding of what is stored: (errors of each state, updates lost); None where there is no
    gradient here. The holders of a piece must call it at once."""
    value = shard.local(p).detach()
    before = _weights(value, lay, state)
    stored_state = {key: shard.local(tensor).clone() for key, tensor in state.items()}
    stored = value.clone(memory_format=torch.contiguous_format)
    _run(opt, group, p, lay, stored, stored_state)
    slots = tuple(Slot(slot.name, "float32") for slot in lay.slots)
    part = replace(lay.part, cut=0)  # no blocks are left to cut
    exact_lay = replace(lay, slots=slots, part=part, param_format="float32")
    exact_state = {key: shard.local(tensor).clone() for key, tensor in state.items()}
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
    """The float32 weights that a stored parameter and what is beside it mean."""
    if not lay.extra:
        return value.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    extra = shard.local(state[lay.extra.key]).cpu().contiguous()
    if value.shape == lay.part.local:
        return ops.join(value.cpu().contiguous(), extra, lay.param_format).to(value.device)
    rows = lay.part.with_room(value).cpu()  # of a piece
    values = ops.join(rows, extra, lay.param_format)
    return lay.part.without_room(values).clone().to(value.device)


def _run(
    opt: LowbitOptimizer, group: dict[str, Any], p: Any, lay: Layout, value: Tensor, state: dict[str, Tensor]
) -> None:  # fmt: skip
    """One step of `value`, which stands for p, with p's gradient."""
    holders = Holders([(p, lay)]) if isinstance(p, shard.Piece) else None
    batches = []
    if p.grad is not None and (value.numel() or not holders):
        batch = Batch(group, lay)
        batch.add(p if holders else _Given(shard.gradient(p)), value, lay, state)  # type: ignore[arg-type]
        opt._bind(batch, batch.plan())
        batches.append(batch)
        if holders:
            holders.steps(p)
    run_phases(batches, holders)


class _Given:
    """Stands for a parameter whose gradient is given: torch would want it in the parameter's own dtype."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad
