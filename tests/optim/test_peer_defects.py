"""Defects of other libraries' low-bit optimizers, one test each: what they do,
and that lowbit does not.
"""

import copy

import numpy as np
import pytest
import torch

import lowbit
from lowbit import ops
from tests.support.peers.golden import entries, nearest

SIGNED = [f["name"] for f in ops.catalog()["state"] if f["signed"] and f["scaled"]]


def trained(optimizer, shape=(64, 64), *, dtype=torch.float32, steps=2, scale=1.0, **options):
    """A parameter after some steps of random gradients, and its optimizer."""
    generator = torch.Generator().manual_seed(1)
    p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    made = optimizer([p], **options)
    for _ in range(steps):
        p.grad = (scale * torch.randn(shape, generator=generator)).to(dtype)
        made.step()
    return p, made


@pytest.mark.parametrize("state_format", ["8bit", "4bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchao_amsgrad_crashes(state_format, dtype):
    """Its state has no maximum; here the largest second moment is a third state tensor that never
    falls.
    """
    p, made = trained(lowbit.AdamW, dtype=dtype, amsgrad=True, state_format=state_format)
    key = next(key for key in made.state[p] if key.startswith("max_exp_avg_sq") and "scale" in key)
    before = made.state[p][key].clone()
    p.grad = torch.zeros_like(p)
    made.step()
    assert p.isfinite().all() and (made.state[p][key] >= before).all()


def test_torchao_state_dict_cannot_be_copied_and_float_lr_is_refused():
    """Its subclass has no clone, and its loader wants lr to be a tensor, which a scheduler or
    torch's own state dict does not have.
    """
    p, made = trained(lowbit.AdamW, lr=1e-3)
    saved = copy.deepcopy(made.state_dict())
    assert isinstance(saved["param_groups"][0]["lr"], float)
    other, into = trained(lowbit.AdamW, lr=torch.tensor(0.5), steps=1)
    into.load_state_dict(saved)
    for tensor, loaded in zip(made.state[p].values(), into.state[other].values(), strict=True):
        assert torch.equal(tensor, loaded)
    with torch.no_grad():
        other.copy_(p)
    for group in into.param_groups:
        group["lr"] = 1e-3  # as schedulers do
    for q, optimizer in ((p, made), (other, into)):
        q.grad = torch.ones_like(q)
        optimizer.step()
    assert torch.equal(p, other)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000])
def test_stochastic_rounding_turns_nan_into_zero(bits):
    """torchao and torchastic add random bits to those of a NaN: 0x7fffffff, which CUDA writes,
    becomes -0.
    """
    x = torch.tensor(np.full(512, bits, np.uint32).view(np.float32))
    for format in ops.catalog()["param"]:
        if format["random"]:
            for seed in range(4):
                stored, extra = ops.split(x, format["name"], seed=seed)
                assert stored.isnan().all(), format["name"]
                extra = extra if format["compensation"] else None
                assert ops.join(stored, extra, format["name"]).isnan().all(), format["name"]


@pytest.mark.parametrize("bits", range(2, 9))
def test_lpmm_linear_with_nearest_raises(bits):
    options = {"exp_avg": f"linear{bits}", "exp_avg_sq": f"linear{bits}_unsigned"}
    x = np.random.default_rng(bits).uniform(-1, 1, (1, 128)).astype(np.float32)
    x[0, 0] = 1.0
    for format in options.values():
        x = np.abs(x) if format.endswith("unsigned") else x
        table = entries(format)
        want = table[nearest(x, table)]
        if format.endswith("unsigned"):
            want[(want == 0) & (x > 0)] = table[1]
        back = ops.dequantize(*ops.quantize(torch.tensor(x), format, 128), format, 128, 128)
        np.testing.assert_array_equal(back, want)
    p, _ = trained(lowbit.AdamW, state_format=options)
    assert p.isfinite().all()


@pytest.mark.parametrize("format", SIGNED)
def test_lpmm_groups_of_zeros_read_past_the_map(format):
    """With 5 to 7 bits its code of such a group is 255, beyond the map."""
    block = ops.state_format(format)["block"]
    x = torch.zeros(1, 3 * block)
    x[0, block : 2 * block] = 1.0
    codes, scales = ops.quantize(x, format, block)
    back = ops.dequantize(codes, scales, format, block, x.shape[1])
    assert torch.equal(back[0, :block], x[0, :block]) and (back[0, 2 * block :] == 0).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
def test_lpmm_fused_wants_an_even_number_of_elements(bits):
    shape = (65, 67)
    p, made = trained(lowbit.AdamW, shape, state_format=f"{bits}bit", lr=1e-3)
    whole, _ = trained(lowbit.AdamW, shape, state_format="float32", lr=1e-3)
    assert (p - whole).abs().mean() < 1e-3
    codes = made.state[p][f"exp_avg_dynamic{bits}"]
    assert codes.shape == (65, -(-67 * bits // 8))  # rows begin on a byte


@pytest.mark.parametrize("state_format", ["factored8", "factored4"])
def test_lpmm_factor_turns_zero_gradients_into_nan(state_format):
    p = torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    before = p.detach().clone()
    made = lowbit.AdamW([p], state_format=state_format, weight_decay=0.0)
    for _ in range(2):
        p.grad = torch.zeros_like(p)
        made.step()
    assert torch.equal(p, before)
    p.grad = torch.ones_like(p)
    made.step()
    assert p.isfinite().all() and not torch.equal(p, before)


@pytest.mark.parametrize("state_format", ["8bit", "4bit", "lpmm4", "factored4"])
def test_lpmm_does_not_take_bfloat16(state_format):
    p, made = trained(lowbit.AdamW, dtype=torch.bfloat16, state_format=state_format)
    assert p.dtype == torch.bfloat16 and p.isfinite().all()
    assert all(t.dtype != torch.bfloat16 for t in made.state[p].values())


@pytest.mark.parametrize("state_format", ["8bit", "4bit", "log8", "companded8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_are_rounded_to_the_parameters_dtype_on_load(state_format, dtype):
    """torch's loader casts every tensor of state to the parameter's dtype: 110.37 becomes 110.5."""
    p, made = trained(lowbit.AdamW, dtype=dtype, scale=110.37, state_format=state_format)
    other, into = trained(lowbit.AdamW, dtype=dtype, steps=0, state_format=state_format)
    into.load_state_dict(made.state_dict())
    for key, tensor in made.state[p].items():
        loaded = into.state[other][key]
        assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor), key


@pytest.mark.parametrize("format", [name for name in SIGNED if name != "uniform8"])
def test_adafactor_8bit_positive_extremes_shrink(format):
    """Its uf4 and uf8 have no code for 1: the largest positive value loses an eighth, or a 128th,
    whenever it is stored. Here both extremes stay, or, in maps without a -1 (dynamic) or float16
    scales, stop after the first time. uniform8 is its uf8: test_golden_adafactor_paths.py."""
    block = ops.state_format(format)["block"]
    x = torch.zeros(1, block)
    x[0, 0], x[0, 1] = 1.37, -0.4
    first = None
    for _ in range(20):
        codes, scales = ops.quantize(x, format, block)
        x = ops.dequantize(codes, scales, format, block, block)
        first = x[0, 0].item() if first is None else first
    assert abs(first - 1.37) <= 1.37 * 2**-11
    assert x[0, 0].item() == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize("shape", [(64, 64), (96,)])
def test_adafactor_in_bfloat16_takes_its_epsilon(shape):
    """torch's Adafactor and adafactor-8bit up to 0.2.5 take eps1 = finfo(bfloat16).eps: no root of
    a second moment is below 7.8e-3, and gradients of 1e-4 move nothing. adafactor-8bit 0.1.9 raises
    for vectors besides."""
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        made = lowbit.Adafactor([p], lr=1e-2, scale_parameter=False)
        p.grad = torch.full_like(p, 1e-4)
        made.step()
        moved.append(p.detach().float())
    torch.testing.assert_close(moved[1], moved[0], rtol=2**-7, atol=0)
    torch.testing.assert_close(moved[0], torch.full(shape, -1e-2), rtol=1e-4, atol=0)
