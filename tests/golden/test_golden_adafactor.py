"""adafactor-8bit's factored and elementwise second moments (tests/golden/README.md): version 0.1.9
in float32 and quantised, 0.4.6 in its three formats.

The settings of the golden runs, found by matching them (what is not named is the peer's default):

    af019_fp32             lr 1e-2, weight_decay 0.1 (times alpha), Fira's limiter with margin 0.01;
                           4 steps
    af019_quant, af046_al8 lr 1e-2, no decay, no limiter; 3 steps
    af046_adamw_uf8_al8    AdamW: lr 1e-3, betas 0.9 and 0.999, eps 1e-8 (beside the root),
                           weight_decay 1e-2 (times lr); 3 steps
    af046_adamw_uf4_al16, af046_adamw_d8_al16   the same without decay

so the runs named adamw are lowbit.AdamW, not lowbit.Adafactor: nothing clips, and eps is no floor.

The parameter is 96x64 and the peer's blocks (2048, 256) go over the flattened tensor, so
elementwise state is one row of 6144 here. The peer stores row and column means in 8 bits too, which
lowbit keeps in float32: the test stores them after each step. Of its uniform formats of the first
moment, whose largest positive value shrinks whenever it is stored, lowbit has that of 8 bits
(`test_golden_adafactor_paths.py`) and not that of 4.
"""

import numpy as np
import pytest

import lowbit
from tests.support.peers.golden import (
    AdamTwin,
    F,
    Ours,
    Stored,
    arrays,
    blockwise,
    encoded,
    entries,
    explain,
    follow,
    gradients,
    middle,
    nearest,
    same_values,
    unpack,
)

BLOCK = 2048


def golden(case):
    return {k.partition("/")[2]: v for k, v in arrays().items() if k.startswith(case + "/")}


def log2(v):
    return np.log2(np.maximum(v, F(2.0**-126)))


# 0.1.9


def test_adafactor_float32():
    left = golden("af019_fp32")
    ours = Ours(
        lowbit.Adafactor, left["p0"], lr=1e-2, weight_decay=0.1, decay_by="alpha", fira_margin=0.01
    )
    for g in gradients("96x64", 4):
        ours.step(g)
    np.testing.assert_allclose(ours.values, left["p4"].reshape(-1), rtol=0, atol=5e-7)
    for name in ("row", "col"):
        kept, theirs = ours.state[f"variance_{name}"].numpy(), left[f"{name}_var"].reshape(-1)
        np.testing.assert_allclose(kept, theirs, rtol=1e-6)
    np.testing.assert_allclose(ours.state["update_norm"], left["fira_prev_norm"], rtol=1e-6)


def fixed_log_divided_twice(v):
    """0.1.9's storage (0.1.3 to 0.2.0) without CUDA: the scale is already divided by 255 when
    values are divided by it, and again by 255 when codes are read. Every code is 255, and every
    value 2^(L / 255 - 126) or so."""
    log = np.full(BLOCK, F(-126))  # the filler is 2^-126
    log[: v.size] = log2(v).reshape(-1)
    scale = (log.max() + F(126)) / F(255)
    z = (log + F(126)) / scale * F(255)
    codes = np.minimum(np.rint(z), 255)
    value = np.exp2(codes[: v.size].astype(F) * scale / F(255) - F(126))
    return Stored(codes.astype(int), np.array([scale]), z, value.astype(F).reshape(v.shape))


def stored_factors(case, store):
    """Three steps of Adafactor with row and column means in the peer's storage."""
    left = golden(case)
    outside = {"variance_row": store, "variance_col": store}
    ours = Ours(lowbit.Adafactor, left["p0"], outside=outside, lr=1e-2)
    for g in gradients("96x64", 3):
        ours.step(g)
    np.testing.assert_allclose(ours.values, left["p3"].reshape(-1), rtol=0, atol=5e-7)
    return left, ours


def test_adafactor_019_quantised():
    left, ours = stored_factors("af019_quant", fixed_log_divided_twice)
    for name in ("row", "col"):
        np.testing.assert_array_equal(ours.codes(f"variance_{name}"), left[f"{name}_var_q"][0])
        kept = ours.scale(f"variance_{name}")
        np.testing.assert_allclose(kept, left[f"{name}_var_scale"], rtol=3e-7)


def test_defect_1_a_second_moment_divided_twice_by_255_is_lost():
    """0.1.9 reads back some 1e-38 of any second moment; lowbit's format of that design gives it
    back within half of a code.
    """
    v = arrays()["af019_fp32/row_var"].reshape(1, -1)
    assert (fixed_log_divided_twice(v).value < 1e-37).all()
    octaves = float(log2(v).max()) + 126  # the codes' range
    kept = encoded("log8_fixed", BLOCK)(v).value
    assert np.abs(np.log2(kept / v)).max() <= 0.5 * octaves / 255 * 1.001
    # and what Adafactor keeps are the means themselves
    left = golden("af019_quant")
    ours = Ours(lowbit.Adafactor, left["p0"], lr=1e-2)
    for g in gradients("96x64", 3):
        ours.step(g)
    weights = [t**-0.8 for t in (1, 2, 3)]
    mean = 0.0
    for g, weight in zip(gradients("96x64", 3), weights, strict=True):
        mean = mean + weight * ((g.astype(np.float64) ** 2).mean(axis=1) - mean)
    np.testing.assert_allclose(ours.state["variance_row"], mean, rtol=1e-6)


# 0.4.6


def adaptive_log(steps):
    """0.4.6: evenly spaced in log2 from the block's smallest positive value (code 1) to its
    largest; code 0 is zero.
    """

    def store(v):
        padded = np.zeros(-(-v.size // BLOCK) * BLOCK, F)
        padded[: v.size] = v.reshape(-1)
        blocks = padded.reshape(-1, BLOCK)
        log = log2(blocks)
        most = log.max(axis=1, keepdims=True)
        least = np.where(blocks > 0, log, F(np.inf)).min(axis=1, keepdims=True)
        scale = most - least
        z = (log - least) * F(steps) / scale
        codes = np.where(blocks > 0, np.clip(np.rint(z) + 1, 1, steps + 1), 0)
        value = np.exp2((codes.astype(F) - F(1)) * scale / F(steps) + least)
        value = np.where(codes == 0, F(0), value).astype(F).reshape(-1)[: v.size]
        size = v.size
        scales = np.concatenate([scale, least], axis=1).reshape(-1)
        return Stored(
            codes.reshape(-1)[:size].astype(int),
            scales,
            z.reshape(-1)[:size],
            value.reshape(v.shape),
        )

    return store


def middle_of_logs(steps, ulps=2):
    """Where a value lies between two codes to what float32 holds of its logarithm: around -50 that
    is 4e-6, and a step of 16 bits is 5e-4.
    """

    def near(stored):
        scale, least = (
            np.repeat(x, BLOCK)[: stored.z.size] for x in (stored.scale[::2], stored.scale[1::2])
        )
        slack = ulps * np.spacing(np.abs(least)).astype(np.float64) * steps / scale
        return np.abs(stored.z - np.floor(stored.z) - 0.5) <= slack

    return near


def test_adafactor_046_8bit_factors():
    """The peer stores the means of rows and columns in its adaptive 8-bit logarithms,
    which are lowbit's format log8.
    """
    left, ours = stored_factors("af046_al8", encoded("log8", BLOCK))
    for name in ("row", "col"):
        theirs = left[f"{name}_var_q"][0]
        codes = ours.codes(f"variance_{name}")
        assert (theirs[codes.size :] == 0).all()
        differ = codes != theirs[: codes.size]
        explain(f"af046_al8 {name}", differ, {})
        scale = np.concatenate([left[f"{name}_var_scale"], left[f"{name}_var_min_log"]])
        np.testing.assert_allclose(ours.scale(f"variance_{name}"), scale, rtol=3e-6)


def uniform_table(bits):
    half = 2 ** (bits - 1)
    return ((np.arange(2 * half) - half) / half).astype(F)


def uniform(bits):
    """uf4 and uf8: from -1 to 1 - 2^(1 - bits) of the block's largest magnitude, half to even."""
    half = 2 ** (bits - 1)

    def pick(z, table, tie_up):
        return np.clip(np.rint(z * F(half)), -half, half - 1).astype(int) + half

    return blockwise(uniform_table(bits), 256, floor=1e-12, pick=pick)


def towards_the_sign(z, table, tie_up):
    """d8: the nearest entry, and then the next one towards the value's sign where the entry has
    another: no value but zero becomes zero.
    """
    codes = nearest(z, table)
    other = (z != 0) & (np.sign(z) != np.sign(table[codes]))
    return np.clip(codes + np.where(other, np.sign(z), 0).astype(int), 0, 255)


DYNAMIC8 = entries("dynamic8")
CASES = {
    "uf8_al8": (uniform(8), 8, "log8", 254, 1e-2),
    "uf4_al16": (uniform(4), 4, "log16", 65534, 0.0),
    "d8_al16": (
        blockwise(DYNAMIC8, 256, floor=1e-12, pick=towards_the_sign),
        8,
        "log16",
        65534,
        0.0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_adamw_046(case):
    first, bits, second, steps, decay = CASES[case]
    left = golden(f"af046_adamw_{case}")
    numel = left["p0"].size
    formats = {"exp_avg_sq": lowbit.scaled(second, block=BLOCK)}
    outside = {"exp_avg": first}
    if case.startswith("d8"):  # lowbit's own, in blocks of 256
        formats["exp_avg"], outside = lowbit.scaled("dynamic8", block=256), {}
    ours = Ours(
        lowbit.AdamW,
        left["p0"],
        shape=(1, numel),
        outside=outside,
        lr=1e-3,
        weight_decay=decay,
        state_format=formats,
    )
    twin = AdamTwin(left["p0"], [first, adaptive_log(steps)], lr=1e-3, decay=decay)

    def reasons(k, codes, theirs):
        if k == 1 or outside:
            return {}
        return {"sign": (codes == 127) & (np.abs(theirs.codes - 127) == 1) & (theirs.z != 0)}

    widths = (bits, 16 if steps > 254 else 8)
    slots = [
        ("exp_avg", "dynamic8", middle(DYNAMIC8 if not outside else uniform_table(bits))),
        ("exp_avg_sq", second, middle_of_logs(steps)),
    ]
    carried, undecided = follow(case, ours, twin, gradients("96x64", 3), slots, reasons)

    same_values(f"{case} (re-derived)", twin.p, left["p3"], undecided)
    same_values(case, ours.values, left["p3"], undecided | carried)
    for k, (name, format, near) in enumerate(slots):
        theirs = unpack(left[("m_q", "variance_q")[k]], widths[k], high_first=True)
        why = {"midpoint": near(twin.stored[k]), "carried": undecided}
        explain(f"{case} {name} (re-derived)", twin.stored[k].codes != theirs, why)
        codes = ours.codes(name, format)
        why = reasons(k, codes, twin.stored[k]) | why | {"carried": undecided | carried}
        explain(f"{case} {name}", codes != theirs, why)
        # Blocks reach further down in the first step than in the third,
        # so a code of then is more than one of now.
        assert np.abs(codes - theirs).max() <= (3 if steps > 254 else 1)
    np.testing.assert_allclose(ours.scale("exp_avg", "dynamic8"), left["m_scale"], rtol=3e-7)
    scale = np.stack([left["variance_scale"], left["variance_min_log"]], axis=1).reshape(-1)
    np.testing.assert_allclose(ours.scale("exp_avg_sq", second), scale, rtol=3e-6)
