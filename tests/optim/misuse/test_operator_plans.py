"""Operators that are called directly, with plans and sizes that contradict themselves: an error,
and nothing is written behind the end of a tensor.
"""

import pytest
import torch

from lowbit import ops
from tests.support.plans import SCALES, fresh_state, plan_row

CUTS = ops.plan_names("cuts")
COLUMNS = ops.plan_columns()
WIDE = 2**32
# rule, formats of its slots, changes of the row for 8 x 64 elements
CONTRADICTIONS = {
    "more elements than 64 bits count": ("sgd", [], {"rows": WIDE, "cols": WIDE}),
    "factored matrices smaller than the rows": ("adamw_factored", ["float32"], {"inner_rows": 1}),
    "factored matrices of other columns": ("adamw_factored", ["float32"], {"inner_cols": 48}),
    "factored matrices without columns": ("adamw_factored", ["float32"], {"inner_cols": 0}),
    "more matrices than 64 bits count": (
        "adamw_factored",
        ["float32"],
        {"batches": WIDE, "inner_rows": WIDE},
    ),
    "dimensions that make more columns": ("adamw", "rank1", {"dims": 3, "dim_1": 64, "dim_2": 64}),
    "a dimension of no length": ("adamw", "rank1", {"dims": 3, "dim_1": 0, "dim_2": 64}),
    "dimensions of other rows": ("adamw", "rank1", {"dim_0": 4}),
    "one dimension": ("adamw", "rank1", {"dims": 1}),
    "columns behind the end of the whole row": (
        "adamw",
        "block",
        {"global_cols": 2**20, "first": 2**20 - 32, "cut": CUTS.index("all")},
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_plan_that_contradicts_itself_is_refused(case):
    rule, formats, changes = CONTRADICTIONS[case]
    if formats in SCALES:
        scale = formats
        formats = [
            {"format": name, "scale": scale, "block": 32}
            for name in ("dynamic8", "dynamic8_unsigned")
        ]
    plan = plan_row(8, 64, formats)
    for name, value in changes.items():
        plan[0, COLUMNS[name]] = value
    number = ops.rule(rule)["index"]
    with pytest.raises(RuntimeError, match=r"impossible size|dimensions"):
        p, grad = torch.zeros(8, 64), torch.ones(8, 64)
        if case.startswith("more elements"):
            p = grad = torch.empty(0)
        state = fresh_state(rule, (8, 64), formats)
        torch.ops.lowbit.step_prepare(number, [p], [grad], state, [torch.zeros(())], [], plan)


def test_accumulators_of_impossible_sizes_are_refused():
    empty = torch.empty(0)
    for row in ([WIDE, WIDE, WIDE, 0, 0, 0], [8, 64, 32, 0, 0, 0]):
        held = empty if row[0] == WIDE else torch.zeros(8, 64)
        with pytest.raises(RuntimeError, match="impossible size"):
            torch.ops.lowbit.accumulate([held], [], [held], torch.tensor([row]), 0, 1.0, 0)


def test_more_singular_vectors_than_there_are():
    grad = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    assert torch.ops.lowbit.singular_vectors(grad, 1.0, torch.empty(4, 4))
    with pytest.raises(RuntimeError, match="a matrix of 4 by 300 has 4 singular vectors, not 9"):
        torch.ops.lowbit.singular_vectors(grad, 1.0, torch.empty(4, 9))


def test_parameters_that_share_memory_are_refused_before_anything_is_written():
    memory, grad = torch.zeros(8 * 64 + 1), torch.ones(8, 64)
    params = [memory[:-1].view(8, 64), torch.zeros(8, 64), memory[1:].view(8, 64)]
    plan = torch.cat([plan_row(8, 64, [])] * 3)
    steps = [torch.zeros(()) for _ in params]
    hyper = [0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    with pytest.raises(RuntimeError, match="parameters 0 and 2 share memory: list each once; if"):
        ops.step("sgd", params, [grad] * 3, [], steps, plan, hyper)
    assert not memory.any() and not any(steps)
    ops.step("sgd", params[:2], [grad] * 2, [], steps[:2], plan[:2], hyper)
    assert torch.equal(params[1], torch.full((8, 64), -0.5))
