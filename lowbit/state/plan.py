"""The plan: one row per parameter,
which tells an operator how its state is laid out (csrc/policy/plan.h).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.state.slot import Slot


def row(part: sharding.Part, slots: Sequence[Slot], factored: bool, param_format: str) -> list[int]:
    """One parameter's row but for its stream: the part of it here,
    its slots and its parameter format.

    Args:
        factored: some moment is kept as row and column means.
    """
    rows, cols, global_cols, first = part.place
    flat = not any(slot.coded for slot in slots) and not factored
    if part.whole_rows and flat:  # one long row: nothing but the element index counts
        rows, cols = 1, rows * cols
        global_cols = max(cols, part.global_rows * global_cols)
    inner_rows, inner_cols = _pair(part.local)
    global_inner_rows, global_inner_cols = _pair(part.shape)
    values = {
        "rows": rows,
        "cols": cols,
        "global_cols": global_cols,
        "first": first,
        "param_format": ops.param_format(param_format)["index"],
        "numel": math.prod(part.shape),
        "batches": math.prod(part.local[:-2]),
        "inner_rows": inner_rows,
        "inner_cols": inner_cols,
        "global_inner_rows": global_inner_rows,
        "global_inner_cols": global_inner_cols,
        "front": part.front,
        "back": part.back,
        "cut": ops.plan_names("cuts").index(part.cut),
    }
    scales = ops.plan_names("scales")
    for k, slot in enumerate(slots):
        values[f"slot_{k}_format"] = ops.state_format(slot.format)["index"]
        values[f"slot_{k}_block"] = slot.block
        values[f"slot_{k}_scale"] = scales.index(slot.scale)
        values[f"slot_{k}_stochastic"] = int(slot.stochastic)
    if any(slot.scale == "rank1" for slot in slots):
        values["dims"] = len(part.local)
        values.update({f"dim_{d}": length for d, length in enumerate(part.local)})
    return ops.plan_row(values)


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    """The last two dimensions, padded with 1."""
    return (1, 1, *shape)[-2:]  # type: ignore[return-value]


def plan_tensor(rows: Sequence[Sequence[int]]) -> Tensor:
    """Plan rows as the operator wants them: int64 [n, columns] on the CPU."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), -1)
