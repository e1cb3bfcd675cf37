"""A thread that flushes denormal numbers, by torch.set_flush_denormal or as a library does that was
built with -ffast-math, gets the bits of one that does not: on one thread and on two, where torch's
pool has threads with and without, and on every instruction set.
"""

import pytest
import torch

import lowbit
from lowbit import ops
from tests.support import bits

SHAPE = (512, 1024)


@pytest.fixture(autouse=True)
def as_before():
    threads, isa = torch.get_num_threads(), ops.catalog()["isa"]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)
    ops.set_isa(isa)


def flushed(what):
    torch.set_flush_denormal(True)
    try:
        return what()
    finally:
        torch.set_flush_denormal(False)


def trained(dtype, size, grad, threads, flush, **options):
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter((torch.randn(SHAPE, generator=generator) * size).to(dtype))
    grads = [(torch.randn(SHAPE, generator=generator) * grad).to(dtype) for _ in range(2)]
    opt = lowbit.AdamW([p], lr=1e-9, weight_decay=0.0, **options)

    def steps():
        for p.grad in grads:
            opt.step()

    flushed(steps) if flush else steps()
    return bits.bits([p], opt)


@pytest.mark.parametrize(
    "dtype, size, grad, options",
    [
        (torch.float16, 2e-5, 1e-3, {"state_format": "8bit"}),
        (torch.float32, 1.0, 1e-20, {"state_format": "8bit"}),
        (torch.float32, 1.0, 1e-20, {"state_format": "float32"}),
        (torch.bfloat16, 1e-38, 1e-19, {"state_format": "log8"}),
        (torch.bfloat16, 1e-38, 1e-19, {"state_format": "4bit", "param_format": "bfloat16_kahan"}),
    ],
)
def test_steps_have_the_bits_of_other_threads(dtype, size, grad, options):
    for isa in ops.catalog()["isas"]:
        ops.set_isa(isa)
        plain = trained(dtype, size, grad, 1, False, **options)
        for threads in (1, 2):
            assert bits.same(trained(dtype, size, grad, threads, True, **options), plain), isa


def test_a_float16_weight_whose_gradients_are_zero_stays():
    p = torch.nn.Parameter(torch.full((64, 256), 3e-5, dtype=torch.float16))
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    flushed(lowbit.SGD([p], lr=0.1, momentum=0.9).step)
    assert torch.equal(p, before)


def test_norms_codes_and_sums_count_denormal_numbers():
    p = torch.nn.Parameter(torch.zeros(64, 256, dtype=torch.float16))
    p.grad = torch.full_like(p, 3e-5)
    norm = lowbit.clip_grad_norm_([p], 1.0)
    assert norm > 0 and torch.equal(flushed(lambda: lowbit.clip_grad_norm_([p], 1.0)), norm)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) * 3e38
    for state in ops.catalog()["state"]:
        if state["scaled"] and state["block"]:
            made = ops.quantize(x if state["signed"] else x.abs(), state["name"], state["block"])
            again = flushed(
                lambda s=state: ops.quantize(x if s["signed"] else x.abs(), s["name"], s["block"])
            )
            assert bits.same(again, made), state["name"]


def test_a_caller_keeps_its_own_way():
    """Also where an operator refuses its arguments."""
    tiny = torch.tensor([1e-40])
    torch.set_flush_denormal(True)
    p = torch.nn.Parameter(torch.ones(64, 64))
    p.grad = torch.ones_like(p)
    lowbit.AdamW([p], lr=0.1).step()
    with pytest.raises(RuntimeError, match="must be"):
        ops.quantize(torch.zeros(4, 4, dtype=torch.int32), "dynamic8", 256)
    assert (tiny * 1.0).item() == 0.0
    torch.set_flush_denormal(False)
    assert (tiny * 1.0).item() > 0
