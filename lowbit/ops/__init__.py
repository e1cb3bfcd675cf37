"""The C++ operators and their catalog, typed. No other room touches `torch.ops`.

Operators that write in place do not bump the version counters that autograd checks: torch's stable
ABI, up to 2.13, has no function for it. Optimizers bump those of parameters once for each step
(`lowbit.step.versions`). If you call an operator directly, call
`torch.autograd.graph.increment_version` afterwards.
"""

from lowbit.ops import fakes
from lowbit.ops.gradient import accumulate, exact_powers, mean_add, mean_of
from lowbit.ops.library import (
    catalog,
    entries,
    names,
    param_format,
    plan_columns,
    plan_limit,
    plan_names,
    plan_row,
    policy,
    rule,
    set_isa,
    state_format,
)
from lowbit.ops.lowrank import (
    apollo_norm,
    apollo_step,
    channel_scales,
    column_absmax,
    column_values,
    exact_norm,
    fira_norm,
    fira_step,
    limit,
    lowrank_pass,
    lowrank_room,
    project_columns,
    project_rows,
    projection,
    singular_vectors,
    squares,
    tensor_scale,
)
from lowbit.ops.muon import bfloat16_product, newton_schulz, normalize_rows
from lowbit.ops.step import (
    step,
    step_discard,
    step_prepare,
    step_prepared,
    step_take,
    step_take_table,
)
from lowbit.ops.values import (
    allocate,
    dequantize,
    dequantize_given,
    has_zero,
    join,
    quantize,
    quantize_given,
    split,
)
from lowbit.ops.workspace import (
    Region,
    power_words,
    sum_words,
    workspace,
    workspace_regions,
    workspace_sizes,
    workspace_tensors,
)

__all__ = [
    "Region",
    "accumulate",
    "allocate",
    "apollo_norm",
    "apollo_step",
    "bfloat16_product",
    "catalog",
    "channel_scales",
    "column_absmax",
    "column_values",
    "dequantize",
    "dequantize_given",
    "entries",
    "exact_norm",
    "exact_powers",
    "fira_norm",
    "fira_step",
    "has_zero",
    "join",
    "limit",
    "lowrank_pass",
    "lowrank_room",
    "mean_add",
    "mean_of",
    "names",
    "newton_schulz",
    "normalize_rows",
    "param_format",
    "plan_columns",
    "plan_limit",
    "plan_names",
    "plan_row",
    "policy",
    "power_words",
    "project_columns",
    "project_rows",
    "projection",
    "quantize",
    "quantize_given",
    "rule",
    "set_isa",
    "singular_vectors",
    "split",
    "squares",
    "state_format",
    "step",
    "step_discard",
    "step_prepare",
    "step_prepared",
    "step_take",
    "step_take_table",
    "sum_words",
    "tensor_scale",
    "workspace",
    "workspace_regions",
    "workspace_sizes",
    "workspace_tensors",
]

fakes.register(entries, power_words)
