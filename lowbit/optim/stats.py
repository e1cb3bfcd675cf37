"""Statistics of an optimizer's state: bytes, use of codes,
and what storing the next step would lose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.config.overrides import clean_name
from lowbit.optim.codes import use_of_codes
from lowbit.optim.report import COMPONENTS, Stats
from lowbit.optim.stepping import SteppingOptimizer
from lowbit.optim.warn import UPDATES_OF_LR, loses_updates, unreachable, warn_of_loss
from lowbit.state.layout import Layout
from lowbit.state.quantize import dequantize_slot
from lowbit.state.slot import Slot
from lowbit.state.weights import float32_weights
from lowbit.step.flat_shards import FlatShardReducer
from lowbit.step.group import StepGroup
from lowbit.step.home import at_home
from lowbit.step.phases import run_phases
from lowbit.step.presence import give_zeros

_AT_ONCE = 1 << 20  # values to process at a time
_IN_CACHE = 1 << 15  # the same on a CPU, where several passes follow


@torch.no_grad()
def collect(opt: SteppingOptimizer, probe: bool) -> Stats:
    """`LowbitOptimizer.stats`."""
    lacking = opt.lacking_gradients() if probe else []
    give_zeros(lacking)
    try:
        made = _collect(opt, probe)
    finally:
        for p, _ in lacking:
            p.grad = None
        if probe:
            # the next step asks again: its gradients may differ from the probe's
            opt.forget_step()
    warn_of_loss(opt, made)
    return made


def _collect(opt: SteppingOptimizer, probe: bool) -> Stats:
    parameters: dict[str, dict[str, Any]] = {}
    tallies: dict[str, list[dict[str, float]]] = {}
    total: dict[str, Any] = {"values": 0, "bytes": dict.fromkeys(COMPONENTS, 0)}
    tallied: list[dict[str, float]] = []
    for index, (group, name, p, lay) in enumerate(_named(opt)):
        state = opt.state_of(p)
        if not state:
            continue
        made: dict[str, Any] = {
            "values": sharding.local(p).numel(),
            "rule": lay.rule,
            "param_format": lay.param_format,
            "bytes": _bytes(p, lay, state),
            "states": {},
        }
        counted = {slot.name: use_of_codes(lay, slot, state) for slot in lay.slots}
        # Other ranks may have a gradient of a flat shard's parameter, and need this rank.
        wanted = not lay.in_passes and (p.grad is not None or isinstance(p, sharding.FlatShard))
        if probe and wanted and (found := _probe(opt, group, p, lay, state)):
            for key, tally in found[0].items():
                counted[key].update(tally)
            made.update(_finish(found[1]))
            tallied.append(found[1])
        if loses_updates(lay.param_format) and (reach := _reach(group, p, lay)):
            made.update(_finish(reach))
            tallied.append(reach)
        for slot in lay.slots:
            kept = {"format": slot.format, "scale": slot.scale, "block": slot.block}
            made["states"][slot.name] = {**kept, **_finish(counted[slot.name])}
            tallies.setdefault(slot.name, []).append(counted[slot.name])
        made["bytes_per_value"] = _ratio(sum(made["bytes"].values()), made["values"])
        key = clean_name(name) if name else str(index)
        parameters[f"{key} ({index})" if key in parameters else key] = made
        total["values"] += made["values"]
        for component in COMPONENTS:
            total["bytes"][component] += made["bytes"][component]
    total["bytes_per_value"] = _ratio(sum(total["bytes"].values()), total["values"])
    total["states"] = {name: _finish(_sum(several)) for name, several in tallies.items()}
    total.update(_finish(_sum(tallied)))
    return Stats(parameters=parameters, total=total)


def _named(
    opt: SteppingOptimizer,
) -> Iterator[tuple[dict[str, Any], str | None, Tensor, Layout]]:
    for (group, p, lay), member in zip(opt.laid_out(), opt.members(), strict=True):
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
            worse = value if math.isnan(value) or value > old else old
            made[key] = worse if key == "max_error" else old + value
    return made


def _finish(tally: Mapping[str, float]) -> dict[str, float]:
    made = {
        share: _ratio(tally[share], tally[over])
        for share, over in (
            ("saturated", "coded"),
            ("zero", "coded"),
            ("used", "levels"),
            ("updates", "probed"),
            ("lost", "probed"),
            ("lost_updates", "updates"),
            ("out_of_reach", "nearest"),
        )
        if share in tally
    }
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


def _reach(group: Mapping[str, Any], p: Any, lay: Layout) -> dict[str, float]:
    """How many weights an update of the size of the learning rate cannot change; empty where
    updates have another size.

    A scheduler's `initial_lr` counts if it is larger: a warm-up begins with steps that are meant to
    be small.
    """
    rates = (group["lr"], group.get("initial_lr", 0.0))
    lr = max(float(sharding.local(r) if isinstance(r, Tensor) else r) for r in rates)
    if lay.rule not in UPDATES_OF_LR or lr == 0 or not getattr(p, "requires_grad", True):
        return {}
    here, bound = sharding.local(p).detach().reshape(-1), unreachable(lr, lay.dtype)
    beyond = sum(
        int(torch.count_nonzero(some.float().abs() > bound)) for some in here.split(_AT_ONCE)
    )
    return {"nearest": here.numel(), "out_of_reach": beyond}


def _probe(
    opt: SteppingOptimizer, group: dict[str, Any], p: Any, lay: Layout, state: dict[str, Tensor]
) -> tuple[dict[str, dict[str, float]], dict[str, float]] | None:
    """The next step on copies, as it is stored and without any rounding of what is stored: (errors
    of each state, updates lost); None where there is no gradient here. All ranks that hold some of
    a flat shard's parameter must call it at once."""
    value = sharding.local(p).detach()
    if isinstance(p, sharding.FlatShard):
        return _probe_rows(opt, group, p, lay, value, state)
    grad = sharding.dense_gradient(p)
    if lay.home:
        value, state, grad = at_home(p, lay, state, grad)
        lay = lay.at_home
    cols = lay.part.cols
    if lay.phases or value.numel() <= _AT_ONCE:  # what is measured, is measured of the whole tensor
        return _probe_rows(opt, group, _Given(grad), lay, value, state)
    follow = {entry.key for entry in lay.entries() if entry.dims[:1] == (0,)}
    parts, at_once = [], max(1, _AT_ONCE // cols)
    for begin in range(0, lay.part.rows, at_once):
        rows = slice(begin, begin + at_once)
        here = value[rows]
        offset = (lay.part.offset[0] + begin, *lay.part.offset[1:])
        some = replace(lay, part=replace(lay.part, local=tuple(here.shape), offset=offset))
        of_them = {key: sharding.local(t)[rows] if key in follow else t for key, t in state.items()}
        parts.append(_probe_rows(opt, group, _Given(grad[rows]), some, here, of_them))
    found = [part for part in parts if part]
    errors = {slot.name: _sum([one[0][slot.name] for one in found]) for slot in lay.slots}
    return errors, _sum([one[1] for one in found])


def _probe_rows(
    opt: SteppingOptimizer,
    group: dict[str, Any],
    p: Any,
    lay: Layout,
    value: Tensor,
    state: dict[str, Tensor],
) -> tuple[dict[str, dict[str, float]], dict[str, float]] | None:
    """`_probe` of rows of a parameter, which `lay` describes: `value` and `state` are theirs,
    and p has their gradient.
    """
    before = float32_weights(value, lay, state)
    stored_state = {key: sharding.local(tensor).clone() for key, tensor in state.items()}
    stored = value.clone(memory_format=torch.contiguous_format)
    _run(opt, group, p, lay, stored, stored_state)
    slots = tuple(Slot(slot.name, "float32") for slot in lay.slots)
    part = replace(lay.part, cut=sharding.CUT_NONE)  # float32 has no blocks
    exact_lay = replace(lay, slots=slots, part=part, param_format="float32")
    needed = {"step", "stream", *exact_lay.keys} - {slot.name for slot in slots}
    exact_state = {key: sharding.local(state[key]).clone() for key in needed}
    for slot in lay.slots:
        values = _kept(lay, slot, state)
        exact_state[slot.name] = values.contiguous() if slot.coded else values.clone()
    exact = before.clone()
    _run(opt, group, p, exact_lay, exact, exact_state)
    if p.grad is None:
        return None
    errors = {
        slot.name: _errors(
            _here(lay, slot, stored_state), lay.part.without_room(exact_state[slot.name])
        )
        for slot in lay.slots
    }
    moved = exact != before
    lost = int(torch.count_nonzero(moved & (float32_weights(stored, lay, stored_state) == before)))
    # What random rounding leaves as it is, it moves the further another time.
    for_good = 0 if ops.param_format(lay.param_format)["random"] else lost
    updates = {"probed": moved.numel(), "updates": int(torch.count_nonzero(moved)), "lost": lost}
    return errors, {**updates, "lost_updates": for_good}


def _errors(got: Tensor, want: Tensor) -> dict[str, float]:
    """The tally of stored values beside exact ones, both float32 in one dimension."""
    at_once = _IN_CACHE if want.device.type == "cpu" else _AT_ONCE
    sums = torch.zeros(3, dtype=torch.float64, device=want.device)
    for a, b in zip(got.split(at_once), want.split(at_once), strict=True):
        if not b.numel():
            continue
        exact = b.double()
        off = a.double().sub_(exact).abs_()
        same = off == 0
        sums[0] += off.dot(off)
        sums[1] += exact.dot(exact)
        relative = off.div_(exact).abs_().masked_fill_(same, 0.0).max()
        sums[2] = torch.maximum(sums[2], relative)
    return dict(zip(("error2", "exact2", "max_error"), sums.tolist(), strict=True))


def _run(
    opt: SteppingOptimizer,
    group: dict[str, Any],
    p: Any,
    lay: Layout,
    value: Tensor,
    state: dict[str, Tensor],
) -> None:
    """Steps `value` in place of p, with p's gradient."""
    reducer = FlatShardReducer([(p, lay)]) if isinstance(p, sharding.FlatShard) else None
    step_groups = []
    if p.grad is not None and (value.numel() or not reducer):
        step_group = StepGroup(group, lay)
        step_group.add(p, value, lay, state)
        opt.bind_call(step_group, step_group.plan())
        step_groups.append(step_group)
        if reducer:
            reducer.steps(p)
    run_phases(step_groups, reducer)


class _Given:
    """A gradient in the role of a parameter;
    torch would require the gradient in the parameter's dtype.
    """

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad
