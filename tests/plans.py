"""Plan rows for calling the operator directly, state for them, and the phases of a step."""

import torch

from lowbit import layout, ops

FORMATS = ops.catalog()["state"]


def slot_columns(choice):
    """Format, block length, kind of scale and rounding of one slot.

    Args:
        choice: a format's name; a pair of it and its block length; or a dict with `format` and any of `block`, `scale` (of
            layout.SCALES) and `stochastic`.
    """
    if isinstance(choice, str):
        choice = {"format": choice}
    elif isinstance(choice, tuple):
        choice = {"format": choice[0], "block": choice[1]}
    entry = ops.state_format(choice["format"])
    scale = choice.get("scale", "block" if entry["scaled"] else "none")
    block = (choice.get("block") or entry["block"]) if scale == "block" else 0
    return [entry["index"], block, layout.SCALES.index(scale), int(choice.get("stochastic", False))]


def plan_row(rows, cols, formats, param="float32", *, first=0, stream=0, global_cols=None):
    """One row of a plan for a matrix.

    Args:
        formats: for each slot what `slot_columns` takes.
    """
    slots = [column for choice in formats for column in slot_columns(choice)]
    slots += [-1, 0, 0, 0] * (layout.MAX_SLOTS - len(formats))
    index = ops.param_format(param)["index"]
    head = [rows, cols, cols if global_cols is None else global_cols, first, stream, index]
    row = [*head, rows * cols, 1, rows, cols, rows, cols, *slots, 2, rows, cols]
    return torch.tensor([row + [0] * (layout.PLAN_COLUMNS - len(row))])


def extra_for(shape, param):
    """What a parameter format keeps beside a parameter that it holds exactly: a list of one tensor, or of none."""
    entry = ops.param_format(param)
    if not entry["extra"]:
        return []
    dtype = getattr(torch, entry["extra"])
    width = entry["extra_bytes"] // torch.empty(0, dtype=dtype).element_size()
    return [torch.zeros((*shape, width) if width > 1 else shape, dtype=dtype)]


def fresh_state(rule, shape, formats, param="float32"):
    """Zero state of one matrix, as csrc/ops_plan.cpp takes it."""
    rows, cols = shape
    state = extra_for(shape, param)
    measured = {"row": [rows], "column": [cols], "tensor": [1], "rank1": [rows, cols]}
    for choice in formats:
        index, block, kind, _ = slot_columns(choice)
        entry, scale = FORMATS[index], layout.SCALES[kind]
        zeros = torch.zeros(shape)
        if scale == "none":
            state.append(zeros.to(getattr(torch, entry["dtype"])))
        elif scale == "block":
            state += ops.encode(zeros, entry["name"], block)
        else:
            state.append(ops.encode_given(zeros, zeros, entry["name"]))
            state += [torch.zeros(n) for n in measured[scale]]
    info = ops.rule(rule)
    for _ in info["factors"]:
        state += [torch.zeros(rows), torch.zeros(cols)]
    return state + ([torch.zeros(info["numbers"])] if info["numbers"] else [])


def run_step(rule, params, grads, state, steps, plan, hyper, **kwargs):
    """All phases of one step, as lowbit/batch.py runs them on one rank."""
    kinds = plan[:, 14 : 12 + 4 * layout.MAX_SLOTS : 4]
    phases = ops.rule(rule)["rounds"] + int((kinds > 1).any())
    scratch = ops.scratch(rule, plan, params[0].device) if phases else ()
    for phase in range(phases + 1):
        ops.step(
            rule, params, grads, state, steps, plan, hyper, phase=phase, scratch=scratch, **kwargs
        )
