"""FlashOptim 0.1.4: its companded moments, its weights split in two, and three steps of its
optimizers (tests/golden/README.md).

The parameter has 70 elements, so that blocks of 32 leave a rest of 6: one row here, and
`min_numel=1` for state in 8 bits. The golden arrays have the state of every step, so nothing is
re-derived: differences are to the peer itself. FlashOptim's fused kernels take lr, the betas and
1 - beta as float32, which the float32 values of these give here as well; its unfused code takes
them as they are.

Reasons beside those of tests/support/peers/golden.py:

* float16 range: a block's largest magnitude is no positive finite float16. FlashOptim stores 0, an
  infinity or what the other elements give, and reads back zeros, infinities and NaN; lowbit stores
  the nearest positive finite float16, and NaN where there is one;
* last bit: a float32 weight differs in its last bits, and the correction stored beside the
  parameter with them: both stand for the same weight within 5e-7 and a step of the correction.
"""

import numpy as np
import pytest
import torch

import lowbit
from lowbit import ops
from tests.support.peers.golden import F, Ours, arrays, explain

FLASH = arrays("flashoptim_golden")
SIGNED, UNSIGNED = "companded8", "companded8_unsigned"
STEPS = (1, 2, 3)
LR = float(F(1e-2))
BETAS = (float(F(0.9)), float(F(0.999)))
DECAY = {"weight_decay": 1e-2}
PARAMS = {  # parameter format, what the golden arrays call the correction's bits
    "bf16_8": ("bfloat16_split8", torch.bfloat16, np.int8),
    "bf16_16": ("bfloat16_split16", torch.bfloat16, np.int16),
    "fp16_8": ("float16_split8", torch.float16, np.int8),
    "fp16_16": ("float16_split16", torch.float16, np.int16),
}


def same(a, b):
    return (a == b) | (np.isnan(a) & np.isnan(b))


def signed_codes(codes, format):
    """FlashOptim's signed codes count from -127."""
    codes = codes.numpy().reshape(-1).astype(int)
    return codes - 127 if format == SIGNED else codes


# Moments


def coded(name, format):
    """Both codecs' codes, scales as bits, and values read back, of the same input."""
    x = torch.tensor(FLASH[f"{name}_in"]).reshape(1, -1)
    codes, scales = ops.quantize(x, format, 32)
    value = ops.dequantize(codes, scales, format, 32, x.shape[1]).numpy()[0]
    bits = scales.numpy()[0].view(np.uint16)
    theirs = tuple(FLASH[f"{name}_{k}"] for k in ("codes", "scales_f16bits", "deq"))
    return (signed_codes(codes, format), bits, value), theirs


def out_of_range(bits, count):
    """Elements of blocks whose scale the peer stored as zero or not finite."""
    return np.repeat((bits == 0) | (bits >= 0x7C00), 32)[:count]


def test_codes_of_first_moments():
    (codes, bits, value), (golden, golden_bits, golden_value) = coded("q_m", SIGNED)
    lost = out_of_range(golden_bits, codes.size)
    explain("q_m", codes != golden, {"float16 range": lost})
    assert bits[1] == 1 and golden_bits[1] == 0  # 2^-24, where FlashOptim has zero
    np.testing.assert_array_equal(np.delete(bits, 1), np.delete(golden_bits, 1))
    explain("q_m read back", ~same(value, golden_value), {"float16 range": lost})


def test_codes_of_second_moments():
    (codes, bits, value), (golden, golden_bits, golden_value) = coded("q_v", UNSIGNED)
    zero = (FLASH["q_v_in"] > 0) & (golden == 0) & (codes == 1)
    explain("q_v", codes != golden, {"zero": zero})
    np.testing.assert_array_equal(bits, golden_bits)
    explain("q_v read back", ~same(value, golden_value), {"zero": zero})


def test_blocks_that_float16_scales_cannot_hold():
    """Blocks of 7e4, 1e-8, 5e-8, an infinity and a NaN beside ordinary values."""
    (codes, bits, value), (golden, golden_bits, golden_value) = coded("q_edge", SIGNED)
    x = FLASH["q_edge_in"].reshape(5, 32)
    nan = np.repeat(np.isnan(x).any(axis=1), 32)
    lost = out_of_range(golden_bits, codes.size) | nan
    explain("q_edge", codes != golden, {"float16 range": lost})
    explain("q_edge read back", ~same(value, golden_value), {"float16 range": lost})
    value, golden_value = value.reshape(5, 32), golden_value.reshape(5, 32)
    # 65504 for 7e4 and the code of zero for the ones beside it; FlashOptim: an infinity and NaN
    assert value[0, 0] == 65504 and np.isfinite(value[0]).all()
    assert np.isinf(golden_value[0, 0]) and np.isnan(golden_value[0, 1:]).all()
    # 1e-8 within float16's smallest step; FlashOptim: zero
    assert 0 < value[1, 0] <= 2.0**-24 and golden_value[1, 0] == 0
    # a bad value shows; FlashOptim turns a NaN into zero
    assert np.isnan(value[3:]).all() and np.isnan(golden_value[3]).all()
    assert golden_value[4, 0] == 0
    assert (bits[3:] == 0x7E00).all() and bits[0] == 0x7BFF and bits[1] == 1
    assert bits[2] == golden_bits[2]


@pytest.mark.parametrize(
    "format, name", [(SIGNED, "deq_table_m_scale1"), (UNSIGNED, "deq_table_v_scale1")]
)
def test_what_codes_mean(format, name):
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, -1)
    value = ops.dequantize(codes, torch.ones((1, 8), dtype=torch.float16), format, 32, 256).numpy()[
        0
    ]
    np.testing.assert_array_equal(value[: FLASH[name].size], FLASH[name])


# Weights


def parts(stored, extra, dtype):
    """The parameter's bits, and the correction beside it."""
    return stored.view(torch.int16).numpy().view(np.uint16).reshape(-1), extra.numpy().reshape(
        -1
    ).view(dtype).astype(int)


@pytest.mark.parametrize("case", PARAMS)
def test_split_weights(case):
    format, _, dtype = PARAMS[case]
    x = FLASH["ecc_in_f32bits"].view(F)
    stored, extra = ops.split(torch.tensor(x), format)
    high, low = parts(stored, extra, dtype)
    theirs = FLASH[f"ecc_{case}_hi"]
    value = ops.join(stored, extra, format).numpy()
    golden = FLASH[f"ecc_{case}_recon_f32bits"].view(F)
    assert same(value, golden).all()
    as_float = stored.float().numpy()
    bad = ~np.isfinite(as_float)  # what is beside these means nothing
    explain(f"{case} corrections", low != FLASH[f"ecc_{case}_lo"], {"not finite": bad})
    explain(f"{case} parameters", high != theirs, {"which NaN": np.isnan(as_float)})


# Steps

ADAM = {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}
MOMENTUM = {"momentum_buffer": SIGNED}
RUNS = {  # optimizer, PARAMS or None for float32, moments, settings
    "adamw_f32": (lowbit.AdamW, None, ADAM, {**DECAY, "betas": BETAS}),
    "adamw_bf16_24": (lowbit.AdamW, "bf16_8", ADAM, {**DECAY, "betas": BETAS}),
    "adamw_bf16_32": (lowbit.AdamW, "bf16_16", ADAM, {**DECAY, "betas": BETAS}),
    "adamw_fp16_24": (lowbit.AdamW, "fp16_8", ADAM, {**DECAY, "betas": BETAS}),
    "adamw_bf16_24_unfused": (lowbit.AdamW, "bf16_8", ADAM, DECAY),
    # decouple_lr: p *= 1 - 1e-3 * lr / (lr of the first step)
    "adamw_bf16_24_dlr": (lowbit.AdamW, "bf16_8", ADAM, {"weight_decay": 0.1, "betas": BETAS}),
    "adam_bf16_24": (lowbit.Adam, "bf16_8", ADAM, {**DECAY, "betas": BETAS}),
    "sgd_bf16_24": (lowbit.SGD, "bf16_8", MOMENTUM, {**DECAY, "momentum": 0.9, "nesterov": True}),
    "sgd0_bf16_24": (lowbit.SGD, "bf16_8", {}, DECAY),
}


@pytest.mark.parametrize("name", RUNS)
def test_steps(name):
    optimizer, param, moments, settings = RUNS[name]
    format, dtype, _ = PARAMS[param] if param else ("float32", torch.float32, None)
    formats = {slot: lowbit.scaled(f, block=32) for slot, f in moments.items()} or "float32"
    ours = Ours(
        optimizer,
        FLASH["tr_p0_f32"],
        shape=(1, 70),
        dtype=dtype,
        lr=LR,
        min_numel=1,
        param_format=format,
        state_format=formats,
        **settings,
    )
    carried = np.zeros(70, bool)
    for t, g in zip(STEPS, FLASH["tr_grads_f32"], strict=True):
        ours.step(g)
        golden = {
            k[len(f"tr_{name}_s{t}_") :]: v
            for k, v in FLASH.items()
            if k.startswith(f"tr_{name}_s{t}_")
        }
        check_weights(f"{name} step {t}", ours, golden, param, carried)
        now = np.zeros_like(carried)
        for slot, f in moments.items():
            codes = signed_codes(torch.tensor(ours.codes(slot, f)), f)
            theirs = golden[f"{slot}_codes"]
            zero = (theirs == 0) & (codes == 1) & (f == UNSIGNED)
            differ = codes != theirs
            explain(f"{name} {slot} step {t}", differ, {"zero": zero, "carried": carried})
            now |= differ
            scale = ours.scale(slot, f).view(np.uint16)
            np.testing.assert_array_equal(scale, golden[f"{slot}_scales_f16bits"])
        carried |= now


def check_weights(what, ours, golden, param, carried):
    if param is None:
        apart = np.abs(ours.values - golden["param"]) > 5e-7
        explain(f"{what} parameters", apart, {"carried": carried})
        return
    format, _, dtype = PARAMS[param]
    extra = ours.state[f"param_{format}"]
    high, low = parts(ours.p.detach(), extra, dtype)
    # One more or less in a correction is a 254th or a 65534th of the parameter's last bit.
    exponent = np.frexp(ours.p.detach().float().numpy().reshape(-1))[1].astype(int)
    mantissa = 8 if ours.p.dtype == torch.bfloat16 else 11
    step = np.ldexp(1.0, exponent - mantissa) / (2 * np.iinfo(dtype).max)
    value = ops.join(ours.p.detach(), extra, format).numpy().reshape(-1)
    apart = np.abs(value.astype(float) - golden["recon"])
    same = apart <= 5e-7 + step
    explain(f"{what} weights", ~same, {"carried": carried})
    explain(f"{what} parameters", high != golden["param"], {"carried": carried})
    differ = low != golden["err"]
    explain(f"{what} corrections", differ, {"carried": carried, "last bit": same})


REFERENCES = {  # FlashOptim's own reference, without quantisation
    "adamw": (lowbit.AdamW, DECAY),
    "adamw_dlr": (lowbit.AdamW, {"weight_decay": 0.1}),
    "sgd": (lowbit.SGD, {**DECAY, "momentum": 0.9, "nesterov": True}),
    "lion": (lowbit.Lion, {**DECAY, "betas": (0.9, 0.99)}),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_steps_in_float32(name):
    optimizer, settings = REFERENCES[name]
    ours = Ours(
        optimizer, FLASH["tr_p0_f32"], shape=(1, 70), lr=1e-2, state_format="float32", **settings
    )
    for t, g in zip(STEPS, FLASH["tr_grads_f32"], strict=True):
        ours.step(g)
        np.testing.assert_allclose(ours.values, FLASH[f"ref_{name}_s{t}"], rtol=0, atol=5e-7)
