"""Operators that are called directly: one tensor on the meta device among those of the CPU is an
error, and nothing is written.
"""

import pytest
import torch

from lowbit import ops
from tests.support.plans import fresh_state, plan_row

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
WORDS = ops.sum_words()
SCALING = [1e-3, 0.9, 0.999, 0.0, 1.0, 1.0, 1.0]
COMPENSATED = ops.param_format("bfloat16_kahan")["index"]
DYNAMIC8 = ops.state_format("dynamic8")["index"]
# By a fake of lowbit's, by torch where an operator has none, and by the operators themselves.
REFUSED = (
    "some tensors are on the meta device|with Meta tensors, but there was no fake impl|"
    "is on another device than the parameter|must be .*CPU|"
    "(is|are) on a device without memory"
)
# Of a GPU alone, or without tensors.
OTHERS = {
    "allocate",
    "catalog",
    "cuda_error",
    "lowrank_pass",
    "lowrank_room",
    "set_isa",
    "step_discard",
}


def ones(*shape, dtype=F32):
    return torch.ones(shape, dtype=dtype)


def step():
    """The tensors of a step that measures something, and the numbers beside them."""
    formats = [{"format": name, "scale": "rank1"} for name in ("dynamic8", "dynamic8_unsigned")]
    plan = plan_row(8, 64, formats)
    state = fresh_state("adamw", (8, 64), formats)
    workspace = list(ops.workspace("adamw", plan, torch.device("cpu")).values())
    rule = ops.rule("adamw")["index"]
    tensors = [rule, [ones(8, 64)], [ones(8, 64)], state, [torch.zeros(())]]
    return [*tensors, workspace, plan, [1e-3, 0.9, 0.999, 1e-8, 0.0]]


def prepared():
    rule, params, grads, state, steps, workspace, plan, hyper = step()
    streams = [torch.zeros((), dtype=I64)]
    number = torch.ops.lowbit.step_prepare(rule, params, grads, state, steps, streams, plan)
    assert torch.ops.lowbit.step_take(number, params, grads)
    return number, params, grads, workspace, hyper


def scalars():
    return {"lr": ones(), "grad_scale": ones(), "found_inf": torch.zeros(())}


# Arguments of a call that runs, by operator
CALLS = {
    "step": lambda: (step(), scalars()),
    "step_prepare": lambda: (lambda s: ([*s[:5], [torch.zeros((), dtype=I64)], s[6]], {}))(step()),
    "step_take": lambda: (lambda n, p, g, *_: ([n, p, g], {}))(*prepared()),
    "step_prepared": lambda: (lambda n, p, g, w, h: ([n, w, h], scalars()))(*prepared()),
    "workspace_sizes": lambda: ([step()[0], step()[6]], {}),
    "workspace_regions": lambda: ([step()[0], step()[6], 0], {}),
    "accumulate": lambda: (
        [
            [ones(8, 64, dtype=BF16)],
            [ones(8, 64, dtype=BF16)],
            [ones(8, 64)],
            torch.tensor([[8, 64, 64, 0, 0, 0]]),
            COMPENSATED,
            1.0,
            0,
        ],
        {},
    ),
    "exact_powers": lambda: ([[ones(8), ones(8)], 2], {}),
    "mean_add": lambda: ([[torch.zeros(8, dtype=I64)], [ones(2, 8)], 2], {}),
    "mean_of": lambda: ([[torch.zeros(8, dtype=I64)], [ones(2, 8)], [ones(8)], 2, 2], {}),
    "quantize": lambda: ([ones(8, 64), DYNAMIC8, 64], {}),
    "dequantize": lambda: ([*ops.quantize(ones(8, 64), "dynamic8", 64), DYNAMIC8, 64, 64], {}),
    "quantize_given": lambda: ([ones(8, 64), ones(8, 64), DYNAMIC8], {}),
    "dequantize_given": lambda: (
        [torch.zeros(8, 64, dtype=torch.uint8), ones(8, 64), DYNAMIC8],
        {},
    ),
    "join": lambda: ([ones(8, 64, dtype=BF16), ones(8, 64, dtype=BF16), COMPENSATED], {}),
    "split": lambda: ([ones(8, 64), COMPENSATED, 0, 0], {}),
    "newton_schulz": lambda: ([ones(8, 64, dtype=BF16), [3.4, -4.8, 2.0], 1.0, 1e-7], {}),
    "normalize_rows": lambda: ([ones(8, 64, dtype=BF16), ones(8), 0.9], {}),
    "bfloat16_product": lambda: ([ones(8, 64, dtype=BF16), ones(8, 64, dtype=BF16)], {}),
    "projection": lambda: ([ones(8, 4), 0, 0, 0, 0], {}),
    "singular_vectors": lambda: ([ones(8, 64), 1.0, ones(8, 4)], {}),
    "project_rows": lambda: ([ones(8, 64), 1.0, ones(64, 4)], {}),
    "column_absmax": lambda: ([ones(8, 64), 1.0], {}),
    "project_columns": lambda: (
        [ones(8, 64), 1.0, ones(8, 4), torch.zeros(64, dtype=torch.int32), 0],
        {},
    ),
    "column_values": lambda: (
        [torch.zeros(4, 64, dtype=I64), torch.zeros(64, dtype=torch.int32), 0],
        {},
    ),
    "channel_scales": lambda: ([ones(8, 4), ones(8, 4), True], {}),
    "squares": lambda: ([ones(8, 4), ones(8, 4)], {}),
    "tensor_scale": lambda: ([torch.zeros(2, WORDS, dtype=I64)], {}),
    "apollo_norm": lambda: ([ones(8, 64), 1.0, ones(8), True, SCALING], {}),
    "fira_norm": lambda: (
        [ones(8, 64), 1.0, ones(8, 4), ones(64, 4), ones(8), True, SCALING],
        {},
    ),
    "exact_norm": lambda: ([torch.zeros(1, WORDS, dtype=I64)], {}),
    "limit": lambda: ([torch.zeros(1, WORDS, dtype=I64), ones(1), 1.0], {}),
    "apollo_step": lambda: (
        [
            *(ones(8, 64), 1.0, ones(8), True, SCALING, 1.0),
            *(ones(8, 64, dtype=BF16), ones(8, 64, dtype=BF16), COMPENSATED, 0, 0, 0, 1),
        ],
        {},
    ),
    "fira_step": lambda: (
        [
            *(ones(8, 64), ones(8, 4), ones(64, 4), ones(8, 64), True, SCALING, 1.0),
            *(ones(8, 64, dtype=BF16), ones(8, 64, dtype=BF16), COMPENSATED, 0, 0, 0, 1),
        ],
        {},
    ),
}


def places(args, options):
    """Of every tensor of a call: how it is read and replaced."""
    for holder, keys in ((args, range(len(args))), (options, list(options))):
        for key in keys:
            if isinstance(holder[key], torch.Tensor):
                yield holder, key
            elif isinstance(holder[key], list):
                for i, each in enumerate(holder[key]):
                    if isinstance(each, torch.Tensor):
                        yield holder[key], i


@pytest.mark.parametrize("name", CALLS)
def test_one_tensor_without_memory_is_refused(name):
    call = getattr(torch.ops.lowbit, name)
    args, options = CALLS[name]()
    call(*args, **options)  # it runs with all of them
    count = len(list(places(args, options)))
    for number in range(count if count > 1 else 0):  # one alone is a call on that device
        args, options = CALLS[name]()
        every = list(places(args, options))
        before = [(holder[key], holder[key].clone()) for holder, key in every]
        holder, key = every[number]
        holder[key] = holder[key].to("meta")
        if name == "step_take":  # which asks
            assert call(*args, **options) is False
        else:
            with pytest.raises((RuntimeError, NotImplementedError), match=REFUSED):
                call(*args, **options)
        assert all(torch.equal(tensor, values) for tensor, values in before), number


def test_every_operator_is_called():
    every = {
        name.removeprefix("lowbit::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("lowbit::")
    }
    assert every == {*CALLS, *OTHERS, "step_take_table"}


def test_numbers_that_are_no_table_are_not_read_as_addresses():
    """Of the right shape and length. test_step_cache_guards.py has what a table may lack."""
    number, params, *_ = prepared()
    from lowbit.step import objects

    columns = objects.module.COLUMNS if objects.module is not None else 15
    table = torch.randint(1, 2**62, (1, columns), generator=torch.Generator().manual_seed(0))
    table[0, 2] = params[0].numel()
    with pytest.raises(RuntimeError, match=r"table of addresses (is not as|must be)"):
        torch.ops.lowbit.step_take_table(number, table)
    with pytest.raises(RuntimeError, match="has no gradients"):
        torch.ops.lowbit.step_prepared(number, [], [0.0] * 5)
