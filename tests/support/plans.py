"""Plan rows for calling the operator directly, state for them, and the phases of a step."""

import torch

from lowbit import ops

FORMATS = ops.catalog()["state"]
SCALES = ops.plan_names("scales")


def slot_columns(choice):
    """Format, block length, kind of scale and rounding of one slot.

    Args:
        choice: a format's name; a pair of it and its block length; or a dict with `format` and any
            of `block`, `scale` (of SCALES) and `stochastic`.
    """
    if isinstance(choice, str):
        choice = {"format": choice}
    elif isinstance(choice, tuple):
        choice = {"format": choice[0], "block": choice[1]}
    entry = ops.state_format(choice["format"])
    scale = choice.get("scale", "block" if entry["scaled"] else "none")
    block = (choice.get("block") or entry["block"]) if scale == "block" else 0
    return [entry["index"], block, SCALES.index(scale), int(choice.get("stochastic", False))]


def plan_row(rows, cols, formats, param="float32", *, first=0, stream=0, global_cols=None):
    """One row of a plan for a matrix.

    Args:
        formats: for each slot what `slot_columns` takes.
    """
    values = {
        "rows": rows,
        "cols": cols,
        "global_cols": cols if global_cols is None else global_cols,
        "first": first,
        "stream": stream,
        "param_format": ops.param_format(param)["index"],
        "numel": rows * cols,
        "batches": 1,
        "inner_rows": rows,
        "inner_cols": cols,
        "global_inner_rows": rows,
        "global_inner_cols": cols,
        "dims": 2,
        "dim_0": rows,
        "dim_1": cols,
    }
    for k, choice in enumerate(formats):
        names = ("format", "block", "scale", "stochastic")
        values.update(
            {f"slot_{k}_{name}": n for name, n in zip(names, slot_columns(choice), strict=True)}
        )
    return torch.tensor([ops.plan_row(values)])


def extra_for(shape, param):
    """What a parameter format keeps beside a parameter that it holds exactly: a list of one tensor,
    or of none.
    """
    entry = ops.param_format(param)
    if not entry["compensation"]:
        return []
    dtype = getattr(torch, entry["compensation"])
    width = entry["compensation_bytes"] // torch.empty(0, dtype=dtype).element_size()
    return [torch.zeros((*shape, width) if width > 1 else shape, dtype=dtype)]


def fresh_state(rule, shape, formats, param="float32"):
    """Zero state of one matrix, as csrc/ops/plan.cpp takes it."""
    rows, cols = shape
    state = extra_for(shape, param)
    measured = {"row": [rows], "column": [cols], "tensor": [1], "rank1": [rows, cols]}
    for choice in formats:
        index, block, kind, _ = slot_columns(choice)
        entry, scale = FORMATS[index], SCALES[kind]
        zeros = torch.zeros(shape)
        if scale == "none":
            state.append(zeros.to(getattr(torch, entry["dtype"])))
        elif scale == "block":
            state += ops.quantize(zeros, entry["name"], block)
        else:
            state.append(ops.quantize_given(zeros, zeros, entry["name"]))
            state += [torch.zeros(n) for n in measured[scale]]
    info = ops.rule(rule)
    for _ in info["factors"]:
        state += [torch.zeros(rows), torch.zeros(cols)]
    return state + ([torch.zeros(info["numbers"])] if info["numbers"] else [])


def run_step(rule, params, grads, state, steps, plan, hyper, **kwargs):
    """All phases of one step, as lowbit/step/phases.py runs them on one rank."""
    columns = [
        n
        for name, n in ops.plan_columns().items()
        if name.startswith("slot_") and name.endswith("_scale")
    ]
    kinds = plan[:, columns]
    phases = ops.rule(rule)["rounds"] + int((kinds > 1).any())
    workspace = ops.workspace(rule, plan, params[0].device) if phases else {}
    for phase in range(phases + 1):
        ops.step(
            rule,
            params,
            grads,
            state,
            steps,
            plan,
            hyper,
            phase=phase,
            workspace=workspace,
            **kwargs,
        )
