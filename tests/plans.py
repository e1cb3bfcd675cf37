"""Plan rows for calling the operator directly."""

import torch

from lowbit import layout, ops


def plan_row(
    rows,
    cols,
    formats,
    param="float32",
    *,
    first=0,
    stream=0,
    global_cols=None,
    stochastic=(False,) * 4,
):
    """One row of a plan for a matrix.

    Args:
        formats: for each slot a format's name, or a pair of it and its block length.
        stochastic: whether each slot's codes are rounded so.
    """
    slots = []
    for choice, by_chance in zip(formats, stochastic, strict=False):
        name, block = choice if isinstance(choice, tuple) else (choice, None)
        entry = ops.state_format(name)
        block = (entry["block"] if block is None else block) if entry["scaled"] else 0
        slots += [entry["index"], block, int(entry["scaled"]), int(by_chance)]
    slots += [-1, 0, 0, 0] * (layout.MAX_SLOTS - len(formats))
    index = ops.param_format(param)["index"]
    head = [rows, cols, cols if global_cols is None else global_cols, first, stream, index]
    row = [*head, rows * cols, 1, rows, cols, rows, cols, *slots, 2, rows, cols]
    return torch.tensor([row + [0] * (layout.PLAN_COLUMNS - len(row))])
